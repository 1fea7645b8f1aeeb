"""Casts to the formats of formats.py, in blocks that share scales.

All arithmetic is fp32 by powers of two. So codes and scales are equal on every device, bit for bit. Only the rules
linear and two-level divide by other numbers, as their sources do. There a compiled scale may be off by an ulp: Inductor
divides by div.full.f32 on NVIDIA, which does not round correctly. So what is exact here is written as a product.

port: `rounded` and `encode` define a cast; `scaled` defines the scales of a tensor.
"""

import torch
from torch import Tensor

from flux_ref.precision.formats import E4M3, Format, Scaling

# The bits of an fp32 number, from the highest: sign, 8 of the exponent + 127, 23 of the mantissa.
FP32_BIAS = 127
FP32_MANTISSA = 23
FP32_FRACTION = (1 << 23) - 1
SCALE_NAN = 255  # the code of an E8M0 scale whose block holds a value that is not finite
# numerics: a larger scale, of a nearly vanished gradient, overflows in some kernels.
LARGEST_SCALE = 2.0**44


def exponent_of(x: Tensor) -> Tensor:
    """floor(log2 |x|) of fp32 as int32; -127 for zero and subnormal numbers, 128 for what is not finite."""
    return ((x.view(torch.int32) >> FP32_MANTISSA) & 0xFF) - FP32_BIAS


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as fp32, exact, for int32 exponents from -127 to 127."""
    normal = ((exponent + FP32_BIAS) << FP32_MANTISSA).view(torch.float32)
    return normal.where(exponent > -FP32_BIAS, 2.0**-FP32_BIAS)


def encode(form: Format, values: Tensor) -> Tensor:
    """fp32 values that `rounded` gave to uint8 codes of the same shape. A NaN needs a format that has one."""
    exponent = exponent_of(values).clamp(min=1 - form.bias)
    steps = (values.abs() * power_of_two(form.mantissa - exponent)).nan_to_num(nan=0.0).int()
    codes = steps + ((exponent + form.bias - 1) << form.mantissa)
    negative = values.signbit() if form.has_negative_zero else values < 0
    codes = codes + negative * form.sign
    return codes.where(~values.isnan(), form.nan or 0).to(torch.uint8)


def rounded(x: Tensor, form: Format, chance: Tensor | None = None) -> Tensor:
    """fp32 to the values of a format, in fp32. NaN stays NaN; what is too large becomes the largest value.

    chance: None rounds to the nearest value, of two equally near ones to that with an even code. Else uniform numbers
    in [0, 1) of the shape of x: a value in steps of the format becomes floor(value + chance). So it is rounded up with
    the probability of its distance from the value below.
    """
    exponent = exponent_of(x).clamp(1 - form.bias, form.top) - form.mantissa  # of the format's steps around x
    steps = x * power_of_two(-exponent)
    if chance is None:
        steps.round_()
    else:
        steps.add_(chance).floor_()
    steps.mul_(power_of_two(exponent)).clamp_(-form.largest, form.largest)
    return steps if form.has_negative_zero else steps.add_(0.0)  # numerics: turns a negative zero into zero


def blocks(x_MK: Tensor, scaling: Scaling) -> Tensor:
    """A view as (M / rows, rows, K / columns, columns)."""
    rows = scaling.rows or x_MK.shape[0]
    columns = scaling.columns or x_MK.shape[1]
    return x_MK.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def scaled(x_MK: Tensor, form: Format, scaling: Scaling, chance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """fp32 -> (values on the format's grid, fp32 of x's shape; block scales (M / rows, K / columns); tensor scale ()).

    A value times both scales is what the tensor has become. chance: as for `rounded`, of x's shape.
    A block that holds a NaN or an infinity gets a scale of NaN. (MX leaves this case to the implementation.)
    """
    parts = blocks(x_MK, scaling)
    amax = parts.abs().amax((1, 3), keepdim=True)
    whole = torch.ones((), device=x_MK.device)
    if scaling.rule == "two-level":
        whole = amax.amax() / (E4M3.largest * form.largest)
        # numerics: lower bounds keep 1 / whole and 1 / scale finite.
        whole = whole.where(whole > 0, 1.0).clamp(min=2.0**-120)
        scale = rounded((amax / form.largest / whole).clamp(min=2.0 ** (1 - E4M3.bias)), E4M3)
        factor = (1 / whole) / scale
    elif scaling.rule == "linear":
        factor = scale_of_magnitude(amax, form.largest)
        scale = factor.reciprocal()
    else:
        exponent = scale_exponent(amax, form, scaling.rule)
        scale = power_of_two(exponent)
        factor = power_of_two(-exponent)
    scale = scale.where(amax.isfinite(), torch.nan)
    values = rounded(parts * factor, form, None if chance is None else blocks(chance, scaling))
    return values.flatten(2).flatten(0, 1), scale[:, 0, :, 0], whole


def scale_of_magnitude(amax: Tensor, largest: float | Tensor) -> Tensor:
    """The scale that maps a magnitude to the largest value of a format, at most LARGEST_SCALE; fp32.

    amax: fp32. For 0 the scale is the cap. For infinity it is 0, which turns the product into NaN. NaN stays NaN.
    """
    return (largest / amax).clamp(max=LARGEST_SCALE)


def scale_exponent(amax: Tensor, form: Format, rule: str) -> Tensor:
    """log2 of the E8M0 scale of blocks with these largest magnitudes (fp32), int32 from -127 to 127.

    numerics: without a division. rceil adds 1 where the fraction of amax is above that of the largest value.
    """
    exponent = exponent_of(amax) - form.top
    if rule == "rceil":
        bound = int((form.largest / 2.0**form.top - 1) * 2**FP32_MANTISSA)
        exponent = exponent + ((amax.view(torch.int32) & FP32_FRACTION) > bound).int()
    return exponent.clamp(-FP32_BIAS, FP32_BIAS)


def scale_codes(scales: Tensor) -> Tensor:
    """Scales that are powers of two as E8M0, uint8: exponent + 127; 255 for NaN."""
    return (exponent_of(scales) + FP32_BIAS).where(~scales.isnan(), SCALE_NAN).to(torch.uint8)


def hadamard(x_MK: Tensor, size: int) -> Tensor:
    """Each `size` neighbours along K times the orthogonal Hadamard matrix of Sylvester. size: 16 or 32, divides K.

    A product does not change where both sides are transformed along the dimension that is summed over.
    numerics: sums of 32 bf16 values whose exponents lie within 11 are exact. Other sums may depend on their order.
    """
    signs = torch.ones(1, 1, device=x_MK.device)
    while len(signs) < size:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return (x_MK.unflatten(-1, (-1, size)) @ signs).flatten(-2) * size**-0.5
