"""What a value that differs is instead, told from the numbers alone: golden negated, multiplied, moved, rounded.

places.toml names parts of these sentences as signs of mistakes.
"""

from collections.abc import Iterator

import numpy as np

from tools.golden.files import Golden, Value

MOST_SHIFTS = 256  # tried along an axis
SHOWN = 60  # characters of a list of indices
FEW = 8  # so few numbers may agree by chance


def differs(yours: np.ndarray, golden: np.ndarray, atol: float, rtol: float) -> np.ndarray:
    """For each element, whether it is off."""
    if atol == rtol == 0:
        return yours != golden  # differences of unsigned integers would wrap around
    return ~np.isclose(yours, golden, rtol, atol)


def rms(x: np.ndarray) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.square(x).mean()))


def off_grid(x: np.ndarray) -> int:
    """How many values are not bf16."""
    single = np.array(x, np.float32, order="C")
    return int(((single != x) | (single.view(np.uint32) & 0xFFFF != 0)).sum())


def sentences(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray) -> Iterator[str]:
    """What a value is instead, where that can be told.

    yours, want: (value.shape) integers, or finite numbers in float64.
    """
    wrong = differs(yours, want, value.atol, value.rtol)
    order = other_order(value, yours, want)  # of integers as they are: large ones do not fit into float64
    yours = yours.astype(np.float64)
    want = want.astype(np.float64)
    yield from where(yours, want, wrong)
    if value.dtype == "fp32" and want.size >= 4 and not off_grid(yours) and off_grid(want):
        yield f"yours has the precision of bf16; {value.name} is fp32"
    tolerance = 2 * value.atol, 2 * value.rtol
    for words, other in candidates(golden, value, yours, want):
        is_same = not differs(yours, other, *tolerance).any()
        if is_same and differs(want, other, *tolerance).any():
            yield f"yours is {words}"
            return
    if order:
        yield f"yours has the same numbers in another order{order}"


def candidates(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """What yours may be: in words, and in numbers of golden's shape."""
    factor = multiple(yours, want)
    off = yours - want
    yield "zero everywhere", 0 * want
    yield "golden negated", -want
    yield "1 - golden", 1 - want
    for other in golden.values:
        if other.shape == value.shape and other.name != value.name and other.dtype == value.dtype:
            array = golden.file.read(other.name).astype(np.float64)
            if array.size == 1 or array.min() != array.max():
                yield f"the golden value of {other.name}", array
    with np.errstate(divide="ignore"):
        yield "1 / golden", 1 / want
    yield f"{factor:.6g} x golden", factor * want
    if want.size > 1:
        yield f"golden {off.mean():+.6g} everywhere", want + off.mean()
    if want.size >= FEW:
        yield from added(golden, value, off, want)
    yield from moved(want)


def added(golden: Golden, value: Value, off: np.ndarray, want: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Golden plus a multiple of a value of its shape or of a given row."""
    for other in golden.values:
        is_row = other.given and other.shape == value.shape[-1:]
        if (
            other.name == value.name
            or other.dtype not in ("fp32", "bf16")
            or not (is_row or other.shape == value.shape)
        ):
            continue
        array = golden.file.read(other.name).astype(np.float64)
        if np.isfinite(array).all():
            factor = multiple(off, np.broadcast_to(array, want.shape))
            if rms(off - factor * array) < 0.05 * rms(off):
                sign = "+" if factor > 0 else "-"
                yield f"golden {sign} {abs(factor):.4g} x {other.name}", want + factor * array


def multiple(yours: np.ndarray, want: np.ndarray) -> float:
    """The multiple of `want` that comes nearest to yours."""
    squares = (want * want).sum()
    return float((yours * want).sum() / squares) if squares else 0.0


def moved(want: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The same numbers at other places."""
    for axis, size in enumerate(want.shape):
        yield f"golden reversed along axis {axis}", np.flip(want, axis)
        for shift in range(1, min(size, MOST_SHIFTS)):
            yield f"golden rolled by {shift} along axis {axis}", np.roll(want, shift, axis)
        for other in range(axis):
            if want.shape[other] == size:
                yield f"golden with axes {other} and {axis} exchanged", want.swapaxes(other, axis)
    yield "golden, transposed but stored with golden's shape", want.T.reshape(want.shape)


def other_order(value: Value, yours: np.ndarray, want: np.ndarray) -> str:
    """Along which axis the numbers have another order; "" if they are others, or too close together to tell."""
    tolerance = 2 * (value.atol + value.rtol * np.abs(want).max())
    if want.size < 3 or np.median(np.diff(np.sort(want, None))) <= tolerance:
        return ""
    for axis in (*range(want.ndim), None):
        if np.abs(np.sort(yours, axis) - np.sort(want, axis)).max() <= tolerance:
            return " among all" if axis is None else f" along axis {axis}"
    return ""


def where(yours: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> Iterator[str]:
    """The indices to which the difference is confined, and a factor there."""
    if not wrong.ndim:
        return
    used = [np.unique(index) for index in np.nonzero(wrong)]
    block = np.ix_(*used)
    if wrong[block].size == wrong.size or wrong[block].mean() < 0.5:
        return
    for axis, at in enumerate(used):
        size = wrong.shape[axis]
        if len(at) < size:
            yield f"only {len(at)} of {size} differ along axis {axis}: {', '.join(map(str, at))[:SHOWN]}"
    yours = yours[block]
    want = want[block]
    factor = multiple(yours, want)
    if wrong.sum() > 2 and rms(yours - factor * want) < 1e-3 * rms(yours - want):
        yield f"there yours is {factor:.6g} x golden"
