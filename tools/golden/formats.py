"""The golden values of number formats: tables, casts, block scales, stochastic rounding, Hadamard, and four presets."""

import torch
from torch import Tensor

from flux_ref.config import ModelConfig
from flux_ref.speed import casts, policy
from flux_ref.speed.block_product import BlockMatmul, Draws
from flux_ref.speed.chances import chances
from flux_ref.speed.number_formats import E2M1, E4M3, FORMATS, Format, Scaling
from tools.golden import places


def formats(values: dict, given: dict) -> None:
    """What codes mean, and what casts, scales of blocks and the Hadamard transform make of given values."""
    x = {name.removeprefix("formats."): torch.from_numpy(x) for name, x in given.items() if name.startswith("formats.")}
    tables = {name: torch.tensor(form.table()) for name, form in FORMATS.items()}
    tables["e8m0"] = torch.cat((casts.power_of_two(torch.arange(-127, 128).int()), torch.tensor([torch.nan])))
    for name, table in tables.items():
        values[f"formats.table.{name}.finite"] = table.isfinite()
        values[f"formats.table.{name}.values"] = table[table.isfinite()]
    values |= {f"formats.edge.{n}.bits": coded(FORMATS[n], x[f"edge.{n}.x"]) for n in ("e3m2", "e2m3", "e2m1")}
    about = places.inputs_of("formats.scales.floor")
    blocks = x["blocks.x"]
    broken = x["blocks.x"].clone()
    broken[tuple(about["nan"])], broken[tuple(about["infinity"])] = torch.nan, torch.inf
    forms = {name: FORMATS[name] for name in about["formats"]}
    for rule in ("floor", "ceil", "rceil"):
        scales = [casts.scaled(broken, form, Scaling(rule, 1, 32))[1][:, 0] for form in forms.values()]
        codes = [coded(form, casts.scaled(blocks, form, Scaling(rule, 1, 32))[0]) for form in forms.values()]
        values[f"formats.scales.{rule}"] = casts.scale_codes(torch.stack(scales))
        values[f"formats.codes.{rule}"] = torch.stack(codes)
    part = blocks[: places.inputs_of("formats.two_level.codes")["rows"]]
    part, scales, values["formats.two_level.tensor"] = casts.scaled(part, E2M1, Scaling("two-level", 1, 16))
    values["formats.two_level.scales"], values["formats.two_level.codes"] = coded(E4M3, scales), coded(E2M1, part)
    seed, step, product, first, count = places.inputs_of("formats.chances").values()
    values["formats.chances"] = chances(torch.tensor((seed, step, product, first)), torch.empty(count))
    for name, form in forms.items():
        values[f"formats.stochastic.{name}"] = coded(form, x["stochastic.x"], x["stochastic.chance"])
    values |= {f"formats.hadamard.{size}": casts.hadamard(x["hadamard.x"], size) for size in (16, 32)}


def coded(form: Format, x: Tensor, chance: Tensor | None = None) -> Tensor:
    return casts.encode(form, casts.rounded(x, form, chance))


def presets(values: dict, given: dict) -> None:
    """The three products of one linear under four presets, two of which round stochastically."""
    for preset in ("mxfp8", "mxfp4_backward", "mxfp6_fp4", "nvfp4"):
        x, weight, grad = (torch.from_numpy(given[f"formats.linear.{n}"]).bfloat16() for n in ("x", "weight", "grad"))
        name = f"formats.linear.{preset}"
        about = places.inputs_of(f"formats.linear.{preset}.y")
        pairs = policy.pairs([policy.parse(text) for text in policy.PRESETS[preset]], ModelConfig())[about["layer"]]
        draws = Draws(*(torch.tensor(about[key]) for key in ("seed", "step", "first_sample", "number")))
        y = BlockMatmul.apply(x.requires_grad_(), weight.requires_grad_(), None, pairs, "", draws, len(x))
        grads = torch.autograd.grad(y, (x, weight), grad)
        values |= dict(zip((f"{name}.y", f"{name}.grad_x", f"{name}.grad_weight"), (y, *grads)))
