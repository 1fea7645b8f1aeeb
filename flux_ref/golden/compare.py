"""Comparing a dump with the golden values: where it differs, by how much, and what it holds instead."""

import textwrap
from collections.abc import Iterator

import numpy as np

from flux_ref.formats.outside import printable
from flux_ref.golden import places
from flux_ref.golden.files import Golden, TensorFile, Value

NAMES_SHOWN = 20  # of a longer list
INTEGERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")
ACCEPTED = {  # dtype of a golden value -> the dtypes in which a dump may hold it
    "fp32": ("F32", "F64"),
    "bf16": ("BF16", "F32", "F64"),
    "int64": INTEGERS,
    "uint64": INTEGERS,
    "uint8": ("U8", "F8_E4M3", "F8_E5M2"),
    "bool": ("BOOL", "U8"),
}


def differs(yours: np.ndarray, golden: np.ndarray, atol: float, rtol: float) -> np.ndarray:
    """For each element, whether it is off."""
    if atol == rtol == 0:
        return yours != golden  # differences of unsigned integers would wrap around
    return ~(np.abs(yours - golden) <= atol + rtol * np.abs(golden))


def compare(golden: Golden, value: Value, dump: TensorFile) -> list[str]:
    """How a value of a dump is off, in words; [] if it agrees. Read only if its shape can be right or transposed."""
    dtype, shape = dump.entries[value.name]
    want_shape = tuple(value.shape)
    if dtype not in ACCEPTED[value.dtype]:
        return [f"its dtype is {dtype}, want {' or '.join(ACCEPTED[value.dtype])}"]
    if shape != want_shape and (shape, want_shape) != ((1,), ()):  # some frameworks have no scalars
        line = f"its shape is {list(shape)}, want {value.shape}"
        if len(shape) == 2 and shape == want_shape[::-1]:
            yours, want = dump.read(value.name).T, golden.file.read(value.name)
            is_transposed = not differs(yours, want, value.atol, value.rtol).any()
            line += " (it is the transposed)" if is_transposed else ""
        return [line]
    yours, want = dump.read(value.name).reshape(want_shape), golden.file.read(value.name)
    if want.dtype.kind == "f":
        yours, want = yours.astype(np.float64), want.astype(np.float64)
        if not np.isfinite(yours).all():
            return [f"{(~np.isfinite(yours)).sum()} of its {yours.size} elements are not finite"]
    else:
        yours, want = (array.astype(np.int64 if want.dtype == bool else want.dtype) for array in (yours, want))
    wrong = differs(yours, want, value.atol, value.rtol)
    if not wrong.any():
        return []
    return [*_distance(golden, value, yours, want, wrong), *resemblances(golden, value, yours, want)]


def _distance(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> list[str]:
    """How many elements differ, where and how far."""
    is_float = want.dtype.kind == "f"
    distance = np.abs(yours - want) if is_float else wrong
    at = np.unravel_index(np.argmax(distance), distance.shape)
    place, count = [int(i) for i in at], f"{wrong.sum()} of {wrong.size} differ"
    if not is_float:
        return [f"{count}, first at {place}: yours {yours[at]}, golden {want[at]}"]
    tolerance = f"{value.atol:.1e}" if value.atol else f"{value.rtol:.1e} of each" if value.rtol else "0"
    lines = [
        f"max |difference| {distance[at]:.3g} at {place}: yours {yours[at]:.7g}, golden {want[at]:.7g}",
        f"relative to the largest magnitude {distance[at] / max(np.abs(want).max(), 1e-300):.3g};"
        f" {count}; tolerance {tolerance} ({value.why})",
    ]
    if value.name.endswith("norms"):
        names = [name for name, off in zip(golden.parameters, wrong) if off]
        lines.append(f"parameters that differ, in the order of backward: {_some(names[::-1])}")
    return lines


def resemblances(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray) -> Iterator[str]:
    """What the values are instead, where that can be told."""

    def same(a: np.ndarray, b: np.ndarray) -> bool:
        return not differs(a, b, 2 * value.atol, 2 * value.rtol).any()

    for other in golden.values:
        is_alike = other.name != value.name and (other.shape, other.dtype) == (value.shape, value.dtype)
        if is_alike and same(yours, golden.file.read(other.name).astype(yours.dtype)):
            yield f"yours is the golden value of {other.name}"
            break
    if want.dtype.kind != "f" or want.size < 2:
        return
    factor = float((yours * want).sum() / max((want * want).sum(), 1e-300))
    if abs(factor - 1) > 1e-3 and same(yours, factor * want):
        yield "yours is the golden value negated" if abs(factor + 1) < 1e-3 else f"yours is {factor:.6g} x golden"
        return
    for axis in (*(axis for axis, size in enumerate(want.shape) if size > 1), None):  # None: all elements
        if same(np.sort(yours, axis), np.sort(want, axis)):
            yield "yours has the same numbers in another order" + (f" along axis {axis}" if axis is not None else "")
            return


# Reporting


def report(golden: Golden, dump: TensorFile) -> tuple[list[str], list[str], list[str]]:
    """Print how a dump compares. Returns the names of the values that differ, are missing, and are unknown."""
    compared = [value for value in golden.values if value.name in dump.entries]
    missing = [value.name for value in golden.values if value.name not in dump.entries and not value.given]
    unknown = sorted(dump.entries.keys() - {value.name for value in golden.values})
    differences = [(value, lines) for value in compared if (lines := compare(golden, value, dump))]
    print(f"{len(compared)} places compared, {len(differences)} differ, {len(missing)} missing, {len(unknown)} unknown")
    if differences:
        first, lines = differences[0]
        before = compared[: compared.index(first)]
        print(f"\nfirst difference: {first.name}\n  {first.meaning}; {first.shape} {first.dtype}")
        print("".join(f"  {line}\n" for line in lines), end="")
        last = f"all values before it agree, the last of them is {before[-1].name}" if before else ""
        print(f"  {last or 'no value before it was compared'}")
        if causes := places.place(first.name).causes:
            print("  known causes:\n" + "".join(f"    - {cause}\n" for cause in causes), end="")
        print(f"  of the {len(compared) - len(before) - 1} values after it, {len(differences) - 1} differ")
    for title, names in (("missing", missing), ("unknown", unknown)):
        if names:
            print(f"\n{title}:\n" + textwrap.fill(_some(names), 118, initial_indent="  ", subsequent_indent="  "))
    return [value.name for value, _ in differences], missing, unknown


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(printable(name)[:100] for name in names[:NAMES_SHOWN]) + rest
