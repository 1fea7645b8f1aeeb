"""FP8 numbers as bytes, with numpy alone. Source: arXiv 2209.05433; arXiv 2206.02915 for the fnuz formats."""

import numpy as np


class Format:
    """An FP8 format: a sign, 7 - `mantissa` bits of exponent, `mantissa` bits of fraction. has_zero: 0x80 is -0."""

    def __init__(self, mantissa: int, bias: int, top: float, has_zero: bool):
        code = np.arange(128)
        exponent, fraction = code >> mantissa, (code & 2**mantissa - 1) / 2**mantissa
        values = np.where(exponent > 0, (1 + fraction) * 2.0 ** (exponent - bias), fraction * 2.0 ** (1 - bias))
        self.values, self.top, self.normal, self.has_zero = values[values <= top], top, 2.0 ** (1 - bias), has_zero

    def encode(self, x: np.ndarray, zero: bool | None = None, down: bool = False) -> np.ndarray:
        """Bytes of x, rounded to nearest even and clamped. zero: -0 has the byte 0x80. down: towards zero."""
        size, middles = np.minimum(np.abs(x), self.top), (self.values[1:] + self.values[:-1]) / 2
        below, above = (np.searchsorted(middles, size, side) for side in ("left", "right"))  # they differ in a tie
        code = np.searchsorted(self.values, size, "right") - 1 if down else np.where(below % 2 == 0, below, above)
        zero = self.has_zero if zero is None else zero
        return (code + 128 * (np.signbit(x) & ((code > 0) | zero))).astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        known = np.concatenate((self.values, np.full(128 - len(self.values), np.nan)))
        return np.where(codes >= 128, -1.0, 1.0) * known[codes % 128]


FORMATS = {
    "e4m3": Format(3, 7, 448.0, True),
    "e5m2": Format(2, 15, 57344.0, True),
    "e4m3fnuz": Format(3, 8, 240.0, False),
    "e5m2fnuz": Format(2, 16, 57344.0, False),
}
