"""The golden values of number formats: casts, block scales, stochastic rounding, Hadamard, and four presets."""

import torch
from torch import Tensor

from flux_ref.config import Config, PrecisionConfig
from flux_ref.precision import casts, policy
from flux_ref.precision.blocks import BlockMatmul, Draws, chances
from flux_ref.precision.formats import E2M1, E4M3, FORMATS, Format, Scaling
from tools.golden import places
from tools.golden.files import Values
from tools.golden.forward import Tensors
from tools.golden.precision import tensors


def formats(given: Values) -> Tensors:
    """What casts, scales of blocks and the Hadamard transform make of given values."""
    fed = tensors(given, "formats.")
    values: Tensors = {}
    for name in ("e2m3", "e2m1"):
        values[f"formats.edge.{name}.bits"] = coded(FORMATS[name], fed[f"edge.{name}.x"])
    about = places.inputs_of("formats.scales.floor")
    forms = [FORMATS[name] for name in about["formats"]]
    whole = fed["blocks.x"]
    broken = whole.clone()
    broken[tuple(about["nan"])] = torch.nan
    broken[tuple(about["infinity"])] = torch.inf
    for rule in ("floor", "rceil"):
        scaling = Scaling(rule, 1, about["block"])
        scales = [casts.scaled(broken, form, scaling)[1][:, 0] for form in forms]
        values[f"formats.scales.{rule}"] = casts.scale_codes(torch.stack(scales))
        codes = [coded(form, casts.scaled(whole, form, scaling)[0]) for form in forms]
        values[f"formats.codes.{rule}"] = torch.stack(codes)
    rows = places.inputs_of("formats.two_level.codes")["rows"]
    part, of_blocks, of_tensor = casts.scaled(whole[:rows], E2M1, Scaling("two-level", 1, 16))
    values["formats.two_level.tensor"] = of_tensor
    values["formats.two_level.scales"] = coded(E4M3, of_blocks)
    values["formats.two_level.codes"] = coded(E2M1, part)
    *key, count = places.inputs_of("formats.chances").values()  # seed, step, product, first
    values["formats.chances"] = chances(torch.tensor(key), torch.empty(count))
    for form in forms:
        values[f"formats.stochastic.{form.name}"] = coded(form, fed["stochastic.x"], fed["stochastic.chance"])
    for size in (16, 32):
        values[f"formats.hadamard.{size}"] = casts.hadamard(fed["hadamard.x"], size)
    return values


def coded(form: Format, x: Tensor, chance: Tensor | None = None) -> Tensor:
    """The codes of x, rounded to the nearest value or, with chances, stochastically."""
    return casts.encode(form, casts.rounded(x, form, chance))


def presets(given: Values) -> Tensors:
    """The three products of one linear under four presets, two of which round stochastically."""
    fed = tensors(given, "formats.linear.")
    values: Tensors = {}
    for preset in ("mxfp8", "under80", "mxfp6_fp4", "nvfp4"):
        place = f"formats.linear.{preset}"
        about = places.inputs_of(f"{place}.y")
        x = fed["x"].bfloat16().requires_grad_()
        weight = fed["weight"].bfloat16().requires_grad_()
        pairs = policy.stages(Config(precision=PrecisionConfig(preset=preset)))[0].pairs[about["layer"]]
        draws = Draws(*(torch.tensor(about[key]) for key in ("seed", "step", "first_sample", "number")))
        y = BlockMatmul.apply(x, weight, None, pairs, "", draws, len(x))
        y.backward(fed["grad"].bfloat16())
        values |= {f"{place}.y": y, f"{place}.grad_x": x.grad, f"{place}.grad_weight": weight.grad}
    return values
