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
        size = np.minimum(np.abs(x), self.top)
        above = np.clip(np.searchsorted(self.values, size), 1, len(self.values) - 1)
        low, high = self.values[above - 1], self.values[above]
        is_up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
        is_up = size >= high if down else is_up | (size >= high)
        code = np.where(is_up, above, above - 1)
        zero = self.has_zero if zero is None else zero
        return (code + 128 * (np.signbit(x) & ((code > 0) | zero))).astype(np.uint8)

    def decode(self, codes: np.ndarray) -> np.ndarray:
        known = np.concatenate((self.values, np.full(128 - len(self.values), np.nan)))
        return np.where(codes >= 128, -1.0, 1.0) * known[codes % 128]

    def edges(self, scaled: np.ndarray) -> tuple:
        """Which values are below normal; the sign's byte; NaN's byte; the right bytes."""
        sign, nan = 128 * (scaled < 0) * self.has_zero, 0x7F if self.has_zero else 0x80
        return np.abs(scaled) < self.normal, sign, nan, self.encode(scaled)

    def beyond(self, scaled: np.ndarray, rule: int) -> np.ndarray:
        """Which values overflow: 0 all above the largest; 1 those that are not rounded to it; 2 with the tie."""
        tie = self.top + (self.values[-1] - self.values[-2]) / 2
        return (np.abs(scaled) > (self.top, tie, tie)[rule]) | ((rule == 2) & (np.abs(scaled) == tie))


FORMATS = {
    "e4m3": Format(3, 7, 448.0, True),
    "e5m2": Format(2, 15, 57344.0, True),
    "e4m3fnuz": Format(3, 8, 240.0, False),
    "e5m2fnuz": Format(2, 16, 57344.0, False),
}
