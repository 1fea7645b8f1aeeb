"""What a value that differs holds instead, and what the port may have done wrong, the likeliest cause first."""

import re
from collections.abc import Iterator

import numpy as np

from tools.golden import formulas
from tools.golden.files import Golden, Value

GRIDS = (("bf16", 16), ("fp16 or TF32", 13))  # name, low bits of fp32 that are 0
SIZES = ((5e-5, 8e-4, "TF32"), (8e-4, 6e-3, "bf16"))  # relative differences that products in TF32 and bf16 make
SMALL = 0.02  # relative difference that a change of order or a missing term exceeds
PRECISION = re.compile(r"bf16|fp16|fp32|fp64|eps outside|epsilon|GELU|rounded|correction")


def differs(yours: np.ndarray, golden: np.ndarray, atol: float, rtol: float) -> np.ndarray:
    """For each element, whether it is off."""
    if atol == rtol == 0:
        return yours != golden  # differences of unsigned integers would wrap around
    with np.errstate(invalid="ignore"):  # infinity is not far from infinity
        return (yours != golden) & ~(np.abs(yours - golden) <= atol + rtol * np.abs(golden))


def rms(x: np.ndarray) -> float:
    """The root of the mean square."""
    return float(np.sqrt(np.mean(np.square(x.astype(np.float64))))) if x.size else 0.0


def relative(yours: np.ndarray, want: np.ndarray) -> float:
    """The size of the difference against golden's own."""
    return rms(yours - want) / max(rms(want), 1e-300)


def likely(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray, known: tuple[str, ...]) -> list[str]:
    """Causes, the likeliest first: those whose formulas give yours, then those that `known` lists for the place."""
    found = _computed(golden, value, yours, want)
    if want.dtype.kind != "f":
        return found + list(known)
    size = relative(yours, want)
    grid = _coarse(value, yours, want)
    if grid:
        found = found or [f"computed in {grid}, or rounded to it; {value.name} is fp32"]
        return found + sorted(known, key=lambda cause: grid.split()[0] not in cause)
    alike = ((yours - want) * want).mean() / max(rms(yours - want) * rms(want), 1e-300)  # 1: a factor; 0: rounding
    is_scattered = want.size >= 16 and abs(alike) < 0.5 and not value.name.startswith("bf16.")
    if not found and is_scattered and value.dtype == "fp32" and value.atol:
        found = [
            f"differences of {size:.1e} of the values' size are those of products in {name}: ask the framework for its"
            " highest precision"
            for least, most, name in SIZES
            if least < size < most
        ]
    # A small difference is a matter of precision, a larger one of order or of a missing term.
    return found + sorted(known, key=lambda cause: bool(PRECISION.search(cause)) != (size < SMALL))


def _computed(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray) -> list[str]:
    """The causes whose formulas explain yours, the best first, at most three."""
    scores: dict[str, float] = {}
    for cause, formula in formulas.formulas(golden, value.name):
        formula = np.asarray(formula)
        if cause == formulas.RIGHT or formula.shape != want.shape:
            continue
        score = _left_over(value, yours, want, formula)
        scores[cause] = min(score, scores.get(cause, 1.0))
    best = min(scores.values(), default=1.0)
    near = {cause: score for cause, score in scores.items() if score < 0.2 and score <= 3 * best + 1e-3}
    return sorted(near, key=near.get)[:3]


def _left_over(value: Value, yours: np.ndarray, want: np.ndarray, formula: np.ndarray) -> float:
    """The share of the difference that a formula does not explain."""
    if want.dtype.kind != "f":
        return float((yours != formula).sum() / max((yours != want).sum(), 1))
    is_few = want.size < 4  # some formula comes near by chance
    if not np.isfinite(formula).all() or (is_few and differs(yours, formula, 2 * value.atol, 2 * value.rtol).any()):
        return 1.0
    return rms(yours - formula) / max(rms(yours - want), 1e-300)


# What yours is


def resemblances(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray) -> Iterator[str]:
    """What the values are instead, where that can be told."""

    def same(a: np.ndarray, b: np.ndarray) -> bool:
        return not differs(a, b, 2 * value.atol, 2 * value.rtol).any()

    if not yours.any():
        yield "yours is zero everywhere"
        return
    wrong = differs(yours, want, value.atol, value.rtol)
    yield from _where(yours, want, wrong)
    if want.dtype.kind != "f":
        yield from _whole_numbers(golden, value, yours, want)
        return
    if grid := _coarse(value, yours, want):
        yield f"yours has the precision of {grid}; it should be fp32"
    yield from _another(golden, value, yours, want, same)
    if want.size < 2:
        if want and yours:
            yield f"yours is {_named(golden, float(yours / want))}"
        return
    factor = float((yours * want).sum() / max((want * want).sum(), 1e-300))
    if abs(factor - 1) > 1e-3 and same(yours, factor * want):
        is_negated = abs(factor + 1) < 1e-3
        yield "yours is the golden value negated" if is_negated else f"yours is {_named(golden, factor)}"
        return
    if rms(yours - want - (yours - want).mean()) < 0.01 * rms(yours - want):
        yield f"yours is golden {(yours - want).mean():+.6g} everywhere"
    yield from _reordered(value, yours, want, same)


def _coarse(value: Value, yours: np.ndarray, want: np.ndarray) -> str | None:
    """The precision in which all values of yours are exact, though golden's are not."""
    if value.dtype != "fp32" or want.size < 4:
        return None
    return next((grid for grid, low in GRIDS if not off_grid(yours, low) and off_grid(want, low)), None)


def off_grid(x: np.ndarray, low: int = 16) -> int:
    """For how many values one of the `low` lowest bits, as fp32, is not 0. 16: how many values are not bf16."""
    words = np.array(x, np.float32, order="C")
    return int(((words != x) | (words.view(np.uint32) & np.uint32(2**low - 1) != 0)).sum())


def _where(yours: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> Iterator[str]:
    """The indices to which the difference is confined, and a factor there."""
    used = [np.unique(index) for index in np.nonzero(wrong)] if wrong.ndim else []
    confined = [(axis, at) for axis, at in enumerate(used) if len(at) < wrong.shape[axis]]
    if not confined or wrong[np.ix_(*used)].mean() < 0.5:
        return
    for axis, at in confined:
        runs = _runs(at)
        yield f"only {len(at)} of {wrong.shape[axis]} differ along axis {axis}: {runs}"
    if want.dtype.kind == "f" and min(wrong.sum(), want.size) > 2:
        part = yours[np.ix_(*used)]
        there = want[np.ix_(*used)]
        factor = float((part * there).sum() / max((there * there).sum(), 1e-300))
        if abs(factor - 1) > 1e-3 and rms(part - factor * there) < 1e-3 * rms(part - there):
            yield f"there yours is {factor:.6g} x golden" if factor else "there yours is zero"


def _runs(at: np.ndarray) -> str:
    """Indices as text: 0 .. 3, 7."""
    pieces = np.split(at, np.nonzero(np.diff(at) != 1)[0] + 1)
    texts = [f"{piece[0]} .. {piece[-1]}" if len(piece) > 1 else str(piece[0]) for piece in pieces]
    return ", ".join(texts[:6]) + (", ..." if len(texts) > 6 else "")


def _whole_numbers(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray) -> Iterator[str]:
    for other in golden.values:
        is_alike = other.name != value.name and (other.shape, other.dtype) == (value.shape, value.dtype)
        if is_alike and want.size > 1 and np.array_equal(yours, golden.file.read(other.name)):
            yield f"yours is the golden value of {other.name}"
            return
    for step in (1, -1):
        if want.size and np.array_equal(yours, want.astype(np.int64) + step):
            yield f"yours is golden {step:+d} everywhere"
    if want.size > 1 and np.array_equal(np.sort(yours, None), np.sort(want, None)):
        yield "yours has the same numbers in another order"


def _another(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray, same) -> Iterator[str]:
    """Another golden value, or golden plus a multiple of another one. Constant values tell nothing."""
    off = yours - want
    for other in golden.values:
        is_float = golden.file.entries[other.name][0] in ("F32", "F64")
        is_row = len(other.shape) == 1 and value.shape and other.shape[0] == value.shape[-1] and other.given
        if other.name == value.name or not is_float or not (other.shape == value.shape or is_row):
            continue
        array = golden.file.read(other.name).astype(np.float64)
        if array.min() == array.max() and (array.size > 1 or array in (0, 1)):
            continue
        if other.shape == value.shape and same(yours, array) and differs(want, array, value.atol, value.rtol).any():
            yield f"yours is the golden value of {other.name}"
            return
        if want.size < 8:
            continue
        whole = np.broadcast_to(array, want.shape)
        factor = float((off * whole).sum() / (whole * whole).sum())
        if rms(off - factor * whole) < 0.05 * rms(off) and same(yours, want + factor * whole):
            yield f"yours is golden {'+' if factor > 0 else '-'} {abs(factor):.4g} x {other.name}"
            return


def _reordered(value: Value, yours: np.ndarray, want: np.ndarray, same) -> Iterator[str]:
    """The golden elements at other places. Elements that lie close together prove nothing."""
    gaps = np.diff(np.sort(want, None))
    tolerance = value.atol + value.rtol * np.abs(want).max()
    if relative(yours, want) < SMALL or np.abs(yours - want).max() < 10 * tolerance or np.median(gaps) <= 2 * tolerance:
        return
    for axis, size in enumerate(want.shape):
        moves = [("reversed", np.flip(want, axis))] if size > 1 else []
        shifts = (shift for shift in range(1, min(size, 64)) if 2 * shift != size)
        moves += [(f"rolled by {shift}", np.roll(want, shift, axis)) for shift in shifts]
        if size % 2 == 0:
            moves.append(("with its halves exchanged", np.roll(want, size // 2, axis)))
        for title, other in moves:
            if same(yours, other):
                yield f"yours is golden {title} along axis {axis}"
                return
    for i in range(want.ndim):
        for j in range(i):
            if want.shape[i] == want.shape[j] and same(yours, want.swapaxes(i, j)):
                yield f"yours is golden with axes {j} and {i} exchanged"
                return
    if want.ndim > 1 and same(yours, want.T.reshape(want.shape)):
        yield "yours is golden, transposed but stored with golden's shape"
        return
    for axis in (*(axis for axis, size in enumerate(want.shape) if size > 1), None):  # None: all elements
        if same(np.sort(yours, axis), np.sort(want, axis)):
            yield "yours has the same numbers in another order" + (f" along axis {axis}" if axis is not None else "")
            return


def _named(golden: Golden, factor: float) -> str:
    """A factor, and which size of the golden run it is."""
    text = f"{factor:.6g} x golden"
    shapes = {value.name: value.shape for value in golden.values}
    if len(shapes.get("target", ())) != 3 or not factor:
        return text
    batch, tokens, features = shapes["target"]
    sizes = {"samples of a batch": batch, "image tokens": tokens, "features of a token": features}
    sizes |= {"elements of a sample": tokens * features, "elements of a batch": batch * tokens * features}
    for name, size in sizes.items():
        for power in (1, -1, 2, -2, 0.5, -0.5):
            if abs(abs(factor) / size**power - 1) < 1e-5:
                exponent = "" if power == 1 else f" to the power {power:g}"
                return f"{text} ({size} {name}{exponent})"
    return text
