"""The golden values of number formats: tables, casts, block scales, stochastic rounding, Hadamard, and four presets."""

import torch
from torch import Tensor

from flux_ref.config import Config, PrecisionConfig
from flux_ref.speed import casts, policy
from flux_ref.speed.block_product import BlockMatmul, Draws
from flux_ref.speed.chances import chances
from flux_ref.speed.number_formats import E2M1, E4M3, FORMATS, Format, Scaling
from tools.golden import places
from tools.golden.precision import tensors


def formats(values: dict, given: dict) -> None:
    """What codes mean, and what casts, scales of blocks and the Hadamard transform make of given values."""
    x = tensors(given, "formats.")
    tables = {name: torch.tensor(form.table()) for name, form in FORMATS.items()}
    exponents = torch.arange(-127, 128).int()
    tables["e8m0"] = torch.cat((casts.power_of_two(exponents), torch.tensor([torch.nan])))
    for name, table in tables.items():
        values[f"formats.table.{name}.finite"] = table.isfinite()
        values[f"formats.table.{name}.values"] = table[table.isfinite()]
    for name in ("e3m2", "e2m3", "e2m1"):
        values[f"formats.edge.{name}.bits"] = coded(FORMATS[name], x[f"edge.{name}.x"])
    about = places.inputs_of("formats.scales.floor")
    forms = [FORMATS[name] for name in about["formats"]]
    broken = x["blocks.x"].clone()
    broken[tuple(about["nan"])] = torch.nan
    broken[tuple(about["infinity"])] = torch.inf
    for rule in ("floor", "ceil", "rceil"):
        scaling = Scaling(rule, 1, 32)
        scales = []
        codes = []
        for form in forms:
            scales.append(casts.scaled(broken, form, scaling)[1][:, 0])
            codes.append(coded(form, casts.scaled(x["blocks.x"], form, scaling)[0]))
        values[f"formats.scales.{rule}"] = casts.scale_codes(torch.stack(scales))
        values[f"formats.codes.{rule}"] = torch.stack(codes)
    rows = places.inputs_of("formats.two_level.codes")["rows"]
    part, scales, whole = casts.scaled(x["blocks.x"][:rows], E2M1, Scaling("two-level", 1, 16))
    values["formats.two_level.tensor"] = whole
    values["formats.two_level.scales"] = coded(E4M3, scales)
    values["formats.two_level.codes"] = coded(E2M1, part)
    *key, count = places.inputs_of("formats.chances").values()  # seed, step, product, first
    values["formats.chances"] = chances(torch.tensor(key), torch.empty(count))
    for form in forms:
        values[f"formats.stochastic.{form.name}"] = coded(form, x["stochastic.x"], x["stochastic.chance"])
    for size in (16, 32):
        values[f"formats.hadamard.{size}"] = casts.hadamard(x["hadamard.x"], size)


def coded(form: Format, x: Tensor, chance: Tensor | None = None) -> Tensor:
    """The codes of x, rounded to the nearest value or, with chances, stochastically."""
    return casts.encode(form, casts.rounded(x, form, chance))


def presets(values: dict, given: dict) -> None:
    """The three products of one linear under four presets, two of which round stochastically."""
    for preset in ("mxfp8", "under80", "mxfp6_fp4", "nvfp4"):
        place = f"formats.linear.{preset}"
        about = places.inputs_of(f"{place}.y")
        fed = tensors(given, "formats.linear.")
        x = fed["x"].bfloat16().requires_grad_()
        weight = fed["weight"].bfloat16().requires_grad_()
        cfg = Config(precision=PrecisionConfig(preset=preset))
        pairs = policy.stages(cfg)[0].pairs[about["layer"]]
        draws = Draws(*(torch.tensor(about[key]) for key in ("seed", "step", "first_sample", "number")))
        y = BlockMatmul.apply(x, weight, None, pairs, "", draws, len(x))
        y.backward(fed["grad"].bfloat16())
        values[f"{place}.y"] = y
        values[f"{place}.grad_x"] = x.grad
        values[f"{place}.grad_weight"] = weight.grad
