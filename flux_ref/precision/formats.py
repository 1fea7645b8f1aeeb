"""Number formats of low precision: what each code means, and the rules by which blocks of values are scaled.

port: `Format.table` gives the values of all codes. casts.py rounds and scales tensors.
Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0, called MX below; NVFP4:
arXiv 2509.25149, appendix C; E4M3 and E5M2 also arXiv 2209.05433. The fnuz formats are those of AMD's MI300 (arXiv
2206.02915): without infinity and without negative zero.
"""

import math
from dataclasses import dataclass


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

    @property
    def top(self) -> int:
        """floor(log2 largest)."""
        return math.frexp(self.largest)[1] - 1

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


E4M3 = Format("e4m3", 4, 3, 7, 448.0, nan=0x7F)
E5M2 = Format("e5m2", 5, 2, 15, 57344.0, nan=0x7F, infinity=0x7C)
E4M3FNUZ = Format("e4m3fnuz", 4, 3, 8, 240.0, nan=0x80)
E5M2FNUZ = Format("e5m2fnuz", 5, 2, 16, 57344.0, nan=0x80)
E2M3 = Format("e2m3", 2, 3, 1, 7.5)
E2M1 = Format("e2m1", 2, 1, 1, 6.0)
FORMATS = {one.name: one for one in (E4M3, E5M2, E4M3FNUZ, E5M2FNUZ, E2M3, E2M1)}


@dataclass(frozen=True)
class Scaling:
    """How a tensor is scaled.

    rows, columns: of a block whose values share a scale; 0 for all of the tensor.
    rule: of the scale. floor, rceil: a power of two, kept as E8M0, by the block's largest magnitude m and the format's
    largest value L. floor (MX 6.3): 2**(floor(log2 m) - floor(log2 L)). rceil (cuBLAS, 1-D block scaling): the least
    power of two that is at least m / L.
    linear: a cast multiplies by L / m in fp32, at most 2**44, and the scale is the inverse.
    two-level (NVFP4): an E4M3 for each block times one fp32 for the tensor.
    """

    rule: str
    rows: int = 0
    columns: int = 0
