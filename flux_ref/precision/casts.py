"""Casts to the formats of formats.py, in blocks that share scales.

All arithmetic is fp32 by powers of two. So values and scales are equal on every device, bit for bit. Only the rules
linear and two-level divide by other numbers, as their sources do. There a compiled scale may be off by an ulp: Inductor
divides by div.full.f32 on NVIDIA, which does not round correctly. So what is exact here is written as a product.

port: `round_to_format` defines a cast; `quantize` defines the scales of a tensor.
"""

import torch
from torch import Tensor

from flux_ref.precision.formats import E4M3, Format, Scaling

# The bits of an fp32 number, from the highest: sign, 8 of the exponent + 127, 23 of the mantissa.
BIAS = 127
MANTISSA = 23
SCALE_NAN = 255  # the code of an E8M0 scale whose block holds a value that is not finite
# numerics: a larger scale, of a nearly vanished gradient, overflows in some kernels.
LARGEST_SCALE = 2.0**44
Quantized = tuple[Tensor, Tensor, Tensor | None]  # see `quantize`


def exponent_of(x: Tensor) -> Tensor:
    """floor(log2 |x|) of fp32 as int32; -127 for zero and subnormal numbers, 128 for what is not finite."""
    return (x.abs().view(torch.int32) >> MANTISSA) - BIAS


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as fp32, exact, for int32 exponents from -127 to 127."""
    normal = ((exponent + BIAS) << MANTISSA).view(torch.float32)
    return normal.where(exponent > -BIAS, 2.0**-BIAS)


def round_to_format(x: Tensor, form: Format, chance: Tensor | None = None) -> Tensor:
    """fp32 to the values of a format, in fp32. NaN stays NaN; what is too large becomes the largest value.

    chance: None rounds to the nearest value, of two equally near ones to that with an even code. Else uniform numbers
    in [0, 1) of the shape of x: a value in steps of the format becomes floor(value + chance). So it is rounded up with
    the probability of its distance from the value below.
    """
    exponent = exponent_of(x).clamp(form.least, form.top) - form.mantissa  # of the format's steps around x
    steps = x * power_of_two(-exponent)
    if chance is None:
        steps.round_()
    else:
        steps.add_(chance).floor_()
    return steps.mul_(power_of_two(exponent)).clamp_(-form.largest, form.largest)


def blocks(x_MK: Tensor, scaling: Scaling) -> Tensor:
    """A view as (M / rows, rows, K / columns, columns)."""
    rows = scaling.rows or x_MK.shape[0]
    columns = scaling.columns or x_MK.shape[1]
    return x_MK.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def quantize(x_MK: Tensor, form: Format, scaling: Scaling, chance: Tensor | None = None) -> Quantized:
    """fp32 -> (values on the format's grid, fp32 of x's shape; scales of blocks, of the tensor).

    The scales of blocks are (M / rows, K / columns); that of the tensor is () or None for 1. A value times both scales
    is what the tensor has become. chance: as for `round_to_format`, of x's shape.
    A block that holds a NaN or an infinity gets a scale of NaN. (MX leaves this case to the implementation.)
    """
    parts = blocks(x_MK, scaling)
    amax = parts.abs().amax((1, 3), keepdim=True)
    scale = torch.ones_like(amax)
    whole = None
    if scaling.rule == "two-level":
        whole = amax.amax() / (E4M3.largest * form.largest)
        # numerics: lower bounds keep 1 / whole and 1 / scale finite.
        whole = whole.where(whole > 0, 1.0).clamp(min=2.0**-120)
        scale = round_to_format((amax / form.largest / whole).clamp(min=2.0**E4M3.least), E4M3)
        factor = (1 / whole) / scale
    elif scaling.rule == "linear":
        factor = scale_of_magnitude(amax.amax(), form.largest)
        whole = factor.reciprocal()
    else:
        exponent = scale_exponent(amax, form, scaling.rule)
        scale = power_of_two(exponent)
        factor = power_of_two(-exponent)
    scale = scale.where(amax.isfinite(), torch.nan)
    values = round_to_format(parts * factor, form, None if chance is None else blocks(chance, scaling))
    return values.flatten(2).flatten(0, 1), scale[:, 0, :, 0], whole


def scale_of_magnitude(amax: Tensor, largest: float | Tensor) -> Tensor:
    """The scale that maps a magnitude to the largest value of a format, at most LARGEST_SCALE; fp32.

    amax: fp32. For 0 the scale is the cap. For infinity it is 0, which turns the product into NaN. NaN stays NaN.
    """
    return (largest / amax).clamp(max=LARGEST_SCALE)


def scale_exponent(amax: Tensor, form: Format, rule: str) -> Tensor:
    """log2 of the E8M0 scale of blocks with these largest magnitudes (fp32), int32 from -127 to 127.

    numerics: without a division. rceil adds 1 where amax is above the format's largest value times 2**exponent.
    """
    exponent = exponent_of(amax) - form.top
    if rule == "rceil":
        fraction = (1 << MANTISSA) - 1
        bound = int((form.largest / 2.0**form.top - 1) * 2**MANTISSA)
        exponent = exponent + ((amax.view(torch.int32) & fraction) > bound).int()
    return exponent.clamp(-BIAS, BIAS)


def scale_codes(scales: Tensor) -> Tensor:
    """Scales that are powers of two as E8M0, uint8: exponent + 127; 255 for NaN."""
    return (exponent_of(scales) + BIAS).where(~scales.isnan(), SCALE_NAN).to(torch.uint8)


def fp4_codes(values: Tensor) -> Tensor:
    """Values of E2M1, fp32, as uint8: the codes 0 to 7 of 0, 0.5, 1, 1.5, 2, 3, 4, 6, with 8 for the sign; 0 for NaN.

    Between 0 and 2 a code counts halves, between 2 and 4 ones, above 4 twos. The least of the three lines is the code.
    """
    x = values.abs().nan_to_num(nan=0.0)
    codes = torch.minimum(torch.minimum(2 * x, x + 2), 0.5 * x + 4)
    return (codes + 8 * values.signbit()).to(torch.uint8)


def hadamard(x_MK: Tensor, size: int) -> Tensor:
    """Each `size` neighbours along K times the orthogonal Hadamard matrix of Sylvester. size: 16 or 32, divides K.

    A product does not change where both sides are transformed along the dimension that is summed over.
    numerics: sums of 32 bf16 values whose exponents lie within 11 are exact. Other sums may depend on their order.
    """
    two = torch.ones(2, 2, device=x_MK.device)
    two[1, 1] = -1.0
    signs = two
    while len(signs) < size:
        signs = torch.kron(two, signs)
    return (x_MK.unflatten(-1, (-1, size)) @ signs).flatten(-2) * size**-0.5
