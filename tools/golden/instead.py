"""What a value that differs is instead, told from the numbers alone: golden negated, multiplied, moved, rounded.

places.toml names parts of these sentences as signs of mistakes.
"""

from collections.abc import Iterator

import numpy as np

from tools.golden.files import Golden, Value

GRIDS = (("bf16", 16), ("fp16 or TF32", 13))  # name, low bits of fp32 that are 0
SIZES = ((5e-5, 8e-4, "TF32"), (8e-4, 6e-3, "bf16"))  # relative differences that products in TF32 and bf16 make
MOST_SHIFTS = 256  # tried along an axis
FEW = 8  # so few numbers may agree by chance


def differs(yours: np.ndarray, golden: np.ndarray, atol: float, rtol: float) -> np.ndarray:
    """For each element, whether it is off."""
    if atol == rtol == 0:
        return yours != golden  # differences of unsigned integers would wrap around
    return ~np.isclose(yours, golden, rtol, atol)


def rms(x: np.ndarray) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.square(x).mean()))


def off_grid(x: np.ndarray, low: int = 16) -> int:
    """For how many values one of the `low` lowest bits, as fp32, is not 0. 16: how many values are not bf16."""
    single = np.array(x, np.float32, order="C")
    has_low_bits = single.view(np.uint32) & np.uint32(2**low - 1) != 0
    return int(((single != x) | has_low_bits).sum())


def sentences(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray) -> Iterator[str]:
    """What a value is instead, where that can be told.

    yours, want: (value.shape) integers, or finite numbers in float64.
    """
    yield from _where(yours, want, differs(yours, want, value.atol, value.rtol))
    is_exact = want.dtype.kind != "f"
    if value.dtype == "fp32" and want.size >= 4:
        for grid, low in GRIDS:
            if not off_grid(yours, low) and off_grid(want, low):
                yield f"yours has the precision of {grid}; {value.name} is fp32"
                break
    tolerance = 2 * value.atol, 2 * value.rtol
    candidates = _exact(golden, value, want) if is_exact else _computed(golden, value, yours, want)
    for words, other in (*_simple(golden, value, want), *candidates, *_moved(want)):
        is_same = not differs(yours, other, *tolerance).any()
        if is_same and differs(want, other, *tolerance).any():
            yield f"yours is {words}"
            return
    if place := _other_order(value, yours, want):
        yield f"yours has the same numbers in another order{place}"
    elif value.dtype == "fp32" and want.size >= FEW:
        yield from _scattered(yours, want)


Candidates = Iterator[tuple[str, np.ndarray]]  # what yours may be: in words, and in numbers of golden's shape


def _simple(golden: Golden, value: Value, want: np.ndarray) -> Candidates:
    """Golden with another sign, and other values."""
    yield "zero everywhere", 0 * want
    yield "golden negated", -want
    yield "1 - golden", 1 - want
    for other in golden.values:
        if other.name != value.name and other.shape == value.shape:
            array = golden.file.read(other.name)
            is_constant = array.size > 1 and array.min() == array.max()
            if array.dtype.kind == want.dtype.kind and not is_constant:
                yield f"the golden value of {other.name}", array


def _exact(golden: Golden, value: Value, want: np.ndarray) -> Candidates:
    yield "golden + 1 everywhere", want + want.dtype.type(1)
    yield "golden - 1 everywhere", want - want.dtype.type(1)


def _computed(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray) -> Candidates:
    """Golden times a factor, plus a number, or plus a multiple of a value of its shape or of a given row."""
    with np.errstate(divide="ignore"):
        yield "1 / golden", 1 / want
    factor = _factor(yours, want)
    yield f"{factor:.6g} x golden", factor * want
    off = yours - want
    if want.size > 1:
        yield f"golden {off.mean():+.6g} everywhere", want + off.mean()
    if want.size < FEW:
        return
    for other in golden.values:
        is_row = other.given and other.shape == value.shape[-1:]
        if other.name == value.name or other.dtype not in ("fp32", "bf16"):
            continue
        if not is_row and other.shape != value.shape:
            continue
        array = golden.file.read(other.name).astype(np.float64)
        if np.isfinite(array).all():
            factor = _factor(off, np.broadcast_to(array, want.shape))
            if rms(off - factor * array) < 0.05 * rms(off):
                sign = "+" if factor > 0 else "-"
                yield f"golden {sign} {abs(factor):.4g} x {other.name}", want + factor * array


def _factor(yours: np.ndarray, want: np.ndarray) -> float:
    """The multiple of `want` that comes nearest to yours."""
    squares = (want * want).sum()
    return float((yours * want).sum() / squares) if squares else 0.0


def _moved(want: np.ndarray) -> Candidates:
    """The same numbers at other places."""
    for axis, size in enumerate(want.shape):
        yield f"golden reversed along axis {axis}", np.flip(want, axis)
        for shift in range(1, min(size, MOST_SHIFTS)):
            yield f"golden rolled by {shift} along axis {axis}", np.roll(want, shift, axis)
        for other in range(axis):
            if want.shape[other] == size:
                yield f"golden with axes {other} and {axis} exchanged", want.swapaxes(other, axis)
    if want.ndim > 1:
        yield "golden, transposed but stored with golden's shape", want.T.reshape(want.shape)


def _other_order(value: Value, yours: np.ndarray, want: np.ndarray) -> str:
    """Along which axis the numbers have another order; "" if they are others, or too close together to tell."""
    tolerance = 2 * (value.atol + value.rtol * np.abs(want).max())
    flat = np.sort(want, None).astype(np.float64)
    if want.size < 3 or np.median(np.diff(flat)) <= tolerance:
        return ""
    for axis in range(want.ndim):
        off = np.sort(yours, axis).astype(np.float64) - np.sort(want, axis)
        if np.abs(off).max() <= tolerance:
            return f" along axis {axis}"
    off = np.sort(yours, None).astype(np.float64) - flat
    return " among all" if np.abs(off).max() <= tolerance else ""


def _scattered(yours: np.ndarray, want: np.ndarray) -> Iterator[str]:
    """Differences that are not proportional to golden, of a size that products of low precision make."""
    off = yours - want
    likeness = (off * want).mean() / (rms(off) * rms(want))  # 1: a factor; 0: rounding
    for least, most, name in SIZES:
        if abs(likeness) < 0.5 and least < rms(off) / rms(want) < most:
            yield f"the differences are those of products in {name}: ask the framework for its highest precision"


def _where(yours: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> Iterator[str]:
    """The indices to which the difference is confined, and a factor there."""
    used = [np.unique(index) for index in np.nonzero(wrong)] if wrong.ndim else []
    block = np.ix_(*used)
    is_confined = wrong[block].size < wrong.size and wrong[block].mean() >= 0.5
    if not is_confined:
        return
    for axis, at in enumerate(used):
        if len(at) < wrong.shape[axis]:
            yield f"only {len(at)} of {wrong.shape[axis]} differ along axis {axis}: {_runs(at)}"
    if want.dtype.kind == "f" and wrong.sum() > 2:
        factor = _factor(yours[block], want[block])
        if rms(yours[block] - factor * want[block]) < 1e-3 * rms(yours[block] - want[block]):
            yield f"there yours is {factor:.6g} x golden"


def _runs(at: np.ndarray) -> str:
    """Indices as text: 0 .. 3, 7."""
    texts = []
    for run in np.split(at, np.nonzero(np.diff(at) != 1)[0] + 1):
        texts.append(f"{run[0]} .. {run[-1]}" if len(run) > 1 else str(run[0]))
    return ", ".join(texts[:6]) + (", ..." if len(texts) > 6 else "")
