"""Number formats of low precision: what a code means, how a value is rounded, and how blocks of values are scaled.

All arithmetic is fp32 by powers of two, which is exact. So codes and scales are equal on every device, bit for bit.

port: `rounded`, `Format.encode` and `Format.decode` define a format; `scaled` defines the scales of a tensor.
Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0, called MX below; NVFP4:
arXiv 2509.25149, appendix C. The fnuz formats are those of AMD's MI300: without infinity and without negative zero.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

FP32_BIAS, FP32_MANTISSA = 127, 23
MAX_EXPONENT = 44
SCALE_NAN = 255  # the code of an E8M0 scale whose block holds a value that is not finite


@dataclass(frozen=True)
class Format:
    """A floating-point format. A code is, from its highest bit: sign, exponent field, mantissa field.

    An exponent field of 0 holds zero and the subnormal values. Values above `largest` are no numbers: infinity where
    the format has one, else NaN.
    """

    name: str
    exponent: int  # bits
    mantissa: int  # bits
    bias: int
    largest: float
    nan: int | None = None  # the code that encodes NaN; None: the format has no NaN
    infinity: int | None = None  # its code

    @property
    def sign(self) -> int:
        """The code of the sign bit alone."""
        return 1 << (self.exponent + self.mantissa)

    @property
    def has_negative_zero(self) -> bool:
        return self.nan != self.sign

    def value(self, code: int) -> float:
        """What one code means."""
        if code == self.nan:
            return float("nan")
        field, fraction = divmod(code & (self.sign - 1), 1 << self.mantissa)
        magnitude = (fraction + (field > 0) * 2**self.mantissa) * 2.0 ** (max(field, 1) - self.bias - self.mantissa)
        if magnitude > self.largest:
            magnitude = float("inf") if code & (self.sign - 1) == self.infinity else float("nan")
        return -magnitude if code & self.sign else magnitude

    def table(self) -> list[float]:
        """The values of all codes, by code."""
        return [self.value(code) for code in range(2 * self.sign)]

    def decode(self, codes: Tensor) -> Tensor:
        """uint8 codes to fp32 values of the same shape."""
        return _table(self, codes.device)[codes.int()]

    def encode(self, values: Tensor) -> Tensor:
        """fp32 values that `rounded` gave to uint8 codes of the same shape. A NaN needs a format that has one."""
        exponent = exponent_of(values).clamp(min=1 - self.bias)
        steps = (values.abs() / power_of_two(exponent - self.mantissa)).nan_to_num(nan=0.0).int()
        codes = steps + ((exponent + self.bias - 1) << self.mantissa)
        negative = values.signbit() if self.has_negative_zero else values < 0
        codes = codes + negative * self.sign
        return codes.where(~values.isnan(), self.nan or 0).to(torch.uint8)


E4M3 = Format("e4m3", 4, 3, 7, 448.0, nan=0x7F)
E5M2 = Format("e5m2", 5, 2, 15, 57344.0, nan=0x7F, infinity=0x7C)
E4M3FNUZ = Format("e4m3fnuz", 4, 3, 8, 240.0, nan=0x80)
E5M2FNUZ = Format("e5m2fnuz", 5, 2, 16, 57344.0, nan=0x80)
E3M2 = Format("e3m2", 3, 2, 3, 28.0)
E2M3 = Format("e2m3", 2, 3, 1, 7.5)
E2M1 = Format("e2m1", 2, 1, 1, 6.0)
FORMATS = {one.name: one for one in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E3M2, E2M3, E2M1)}


@cache
def _table(form: Format, device: torch.device) -> Tensor:
    return torch.tensor(form.table(), device=device)


def exponent_of(x: Tensor) -> Tensor:
    """floor(log2 |x|) of fp32 as int32; -127 for zero and subnormal numbers, 128 for what is not finite."""
    return ((x.view(torch.int32) >> FP32_MANTISSA) & 0xFF) - FP32_BIAS


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent as fp32, exact, for int32 exponents from -127 to 127."""
    normal = ((exponent + FP32_BIAS) << FP32_MANTISSA).view(torch.float32)
    return normal.where(exponent > -FP32_BIAS, 2.0**-FP32_BIAS)


def rounded(x: Tensor, form: Format, chance: Tensor | None = None) -> Tensor:
    """fp32 to the values of a format, in fp32. NaN stays NaN; what is too large becomes the largest value.

    chance: None rounds to the nearest value, of two equally near ones to that with an even code. Else uniform numbers
    in [0, 1) of the shape of x: a value is rounded up with the probability of its distance from the value below.
    """
    step = power_of_two(
        exponent_of(x).clamp(1 - form.bias, exponent_of(torch.tensor(form.largest)).item()) - form.mantissa
    )
    steps = x / step  # exact
    if chance is None:
        steps = steps.round()
    else:
        below = steps.floor()
        steps = below + (chance < steps - below)
    # numerics: + 0.0 turns a negative zero into zero, for formats that have no other.
    return (steps * step).clamp(-form.largest, form.largest) + (-0.0 if form.has_negative_zero else 0.0)


@dataclass(frozen=True)
class Scaling:
    """How a tensor is scaled.

    rows, columns: of a block whose values share a scale; 0 for all of the tensor.
    rule: of the scale. floor, ceil, rceil: a power of two, kept as E8M0, by the block's largest magnitude m and the
    format's largest value L. floor (MX 6.3): 2**(floor(log2 m) - floor(log2 L)). ceil: the same of ceil(log2 m). rceil
    (cuBLAS, 1-D block scaling): the least power of two that is at least m / L.
    linear: a cast multiplies by L / m in fp32, at most 2**44, and the scale is the inverse.
    two-level (NVFP4): an E4M3 for each block times one fp32 for the tensor.
    """

    rule: str
    rows: int = 0
    columns: int = 0


def blocks(x_MK: Tensor, scaling: Scaling) -> Tensor:
    """A view as (M / rows, rows, K / columns, columns)."""
    rows, columns = scaling.rows or x_MK.shape[0], scaling.columns or x_MK.shape[1]
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
        whole = whole.where(whole > 0, 1.0)
        # numerics: at least the smallest normal value, so that 1 / scale is finite.
        scale = rounded((amax / form.largest / whole).clamp(min=2.0 ** (1 - E4M3.bias)), E4M3)
        factor = (1 / whole) / scale
    elif scaling.rule == "linear":
        # numerics: some kernels overflow if a tiny gradient has an uncapped factor.
        factor = (form.largest / amax).clamp(max=2.0**MAX_EXPONENT)
        scale = factor.reciprocal()
    else:
        exponent = scale_exponent(amax, form, scaling.rule)
        scale = power_of_two(exponent)
        factor = power_of_two((-exponent).clamp(max=126)) * power_of_two((-exponent - 126).clamp(min=0))
    scale = scale.where(amax.isfinite(), torch.nan)
    values = rounded(parts * factor, form, None if chance is None else blocks(chance, scaling))
    return values.flatten(2).flatten(0, 1), scale[:, 0, :, 0], whole


def scale_exponent(amax: Tensor, form: Format, rule: str) -> Tensor:
    """log2 of the E8M0 scale of blocks with these largest magnitudes (fp32), int32 from -127 to 127."""
    if rule == "rceil":
        exponent = ceil_log2(amax / form.largest)
    else:
        of_largest = exponent_of(torch.tensor(form.largest)).item()
        exponent = (ceil_log2(amax) if rule == "ceil" else exponent_of(amax)) - of_largest
    return exponent.clamp(-FP32_BIAS, FP32_BIAS)


def ceil_log2(x: Tensor) -> Tensor:
    """ceil(log2 x) of fp32 above zero as int32; -127 for 2**-127 and less, and for zero."""
    fraction = x.view(torch.int32) & ((1 << FP32_MANTISSA) - 1)
    exponent = exponent_of(x)
    is_above = fraction > (exponent == -FP32_BIAS) * (1 << (FP32_MANTISSA - 1))  # a subnormal number has no hidden one
    return exponent + is_above.int()


def scale_codes(scales: Tensor) -> Tensor:
    """Scales that are powers of two as E8M0, uint8: exponent + 127; 255 for NaN."""
    return (exponent_of(scales) + FP32_BIAS).where(~scales.isnan(), SCALE_NAN).to(torch.uint8)


def hadamard(x_MK: Tensor, size: int) -> Tensor:
    """Each `size` neighbours along K times the orthogonal Hadamard matrix of Sylvester. size: 16 or 32, divides K.

    A product does not change where both sides are transformed along the dimension that is summed over.
    """
    return (x_MK.unflatten(-1, (-1, size)) @ _sylvester(size, x_MK.device)).flatten(-2)


@cache
def _sylvester(size: int, device: torch.device) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (matrix / size**0.5).to(device)
