"""Comparing a dump with the golden values: where it differs and by how much. causes.py says why."""

import difflib
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from flux_ref.formats import outside
from tools.golden import places
from tools.golden.causes import differs, likely, off_grid, relative, resemblances
from tools.golden.files import Golden, Value
from tools.golden.tensor_file import TensorFile

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


@dataclass
class Difference:
    """How a value of a dump is off. extent: in a few words, for a list. lines and causes: in full."""

    value: Value
    extent: str
    lines: list[str]
    causes: list[str]


def compare(golden: Golden, value: Value, dump: TensorFile, in_full: bool = True) -> Difference | None:
    """How a value of a dump is off; None if it agrees. Read only if its shape can be right or transposed.

    in_full: also look for what the value is instead, and for causes.
    """
    dtype, shape = dump.entries[value.name]
    want_shape = tuple(value.shape)
    known = []
    with suppress(KeyError):  # this version's table may not know the name
        known = list(places.place(value.name).causes)
    if dtype not in ACCEPTED[value.dtype]:
        line = f"its dtype is {dtype}, want {' or '.join(ACCEPTED[value.dtype])}"
        return Difference(value, f"dtype {dtype}", [line], known)
    if shape != want_shape and (shape, want_shape) != ((1,), ()):  # some frameworks have no scalars
        line = f"its shape is {list(shape)}, want {value.shape}"
        if len(shape) == 2 and shape == want_shape[::-1]:
            yours = dump.read(value.name).T
            want = golden.file.read(value.name)
            is_transposed = not differs(yours, want, value.atol, value.rtol).any()
            line += " (it is the transposed)" if is_transposed else ""
        return Difference(value, f"shape {list(shape)}", [line], known)
    yours = dump.read(value.name).reshape(want_shape)
    want = golden.file.read(value.name)
    if want.dtype.kind == "f":
        with np.errstate(invalid="ignore"):  # some NaNs complain when they are cast
            yours = yours.astype(np.float64)
            want = want.astype(np.float64)
        if (bad := ~np.isfinite(yours) & np.isfinite(want)).any():
            line = f"{bad.sum()} of its {bad.size} elements are not finite, the first at {np.argwhere(bad)[0].tolist()}"
            return Difference(value, f"{bad.sum()} of {bad.size} not finite", [line], known)
    else:
        yours, want = (array.astype(np.int64 if want.dtype == bool else want.dtype) for array in (yours, want))
    wrong = differs(yours, want, value.atol, value.rtol)
    fp32 = off_grid(yours) if value.dtype == "bf16" else 0
    line = f"yours is not bf16: {fp32} of its {yours.size} elements lie off the grid of bf16. Computed in fp32?"
    in_fp32 = f"computed in fp32; {value.name} is bf16"
    if not wrong.any():
        return Difference(value, "not bf16", [line], [in_fp32]) if fp32 else None
    extent, lines = _distance(golden, value, yours, want, wrong)
    if not in_full:
        return Difference(value, extent, lines, known)
    lines += [line] * bool(fp32) + list(resemblances(golden, value, yours, want))
    causes = list(dict.fromkeys(likely(golden, value, yours, want, known)))
    return Difference(value, extent, lines, [in_fp32] * bool(fp32) + causes)


def _distance(
    golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray, wrong: np.ndarray
) -> tuple[str, list[str]]:
    """How many elements differ, where and how far: in a few words, and in lines."""
    count = f"{wrong.sum()} of {wrong.size}"
    allowed = value.atol + value.rtol * np.abs(want)
    if value.atol == value.rtol == 0 or not allowed[wrong].all():
        place = np.argwhere(wrong)[0].tolist()
        at = tuple(place)
        extent = f"{count} elements"
        lines = [f"{count} differ, first at {place}: yours {yours[at]}, golden {want[at]}; tolerance 0 ({value.why})"]
    else:
        ratio = np.where(wrong, np.abs(yours - want) / np.where(wrong, allowed, 1), 0)
        place = np.argwhere(ratio == ratio.max())[0].tolist()
        at = tuple(place)
        extent = f"{ratio.max():.3g} x its tolerance"
        tolerance = f"{value.rtol:.1e} of each" if value.rtol else f"{value.atol:.1e}"
        lines = [
            f"worst: {ratio.max():.3g} times the tolerance, at {place}: yours {yours[at]:.7g}, golden {want[at]:.7g}",
            f"{count} differ by more than {tolerance} ({value.why})",
            f"root mean square of the difference: {relative(yours, want):.2g} of golden's own",
        ]
    if value.name.endswith("norms"):
        names = [name for name, off in zip(value.inputs.get("names", golden.parameters), wrong) if off]
        lines.append(f"parameters that differ, in the order of backward: {_some(names[::-1])}")
    return extent, lines


# Reporting


def report(golden: Golden, dump: TensorFile, only: str = "*", shows_all: bool = False) -> tuple[int, int, int]:
    """Print how a dump compares. Returns how many values differ, are missing and are unknown.

    only: a pattern of the names to compare. shows_all: lists are not cut.
    """
    asked = [value for value in golden.values if fnmatchcase(value.name, only)]
    compared = [value for value in asked if value.name in dump.entries]
    missing = [value.name for value in asked if value.name not in dump.entries and not value.given]
    names = {value.name for value in golden.values}
    unknown = sorted(dump.entries.keys() - names)
    differences: list[Difference] = []
    for value in compared:
        if difference := compare(golden, value, dump, in_full=not differences):
            differences.append(difference)
    print(f"{len(compared)} places compared, {len(differences)} differ, {len(missing)} missing, {len(unknown)} unknown")
    most = len(names | dump.entries.keys()) if shows_all else NAMES_SHOWN
    if differences:
        _print_first(differences[0], compared)
        print("\nall that differ, in the order of computation (--only NAME explains another one):")
        print("".join(f"  {other.value.name}: {other.extent}\n" for other in differences[:most]), end="")
        if len(differences) > most:
            print(f"  and {len(differences) - most} more; --all lists them")
    free = sorted(names - dump.entries.keys())
    texts = [outside.printable(name)[:100] for name in unknown]
    for i, name in enumerate(unknown[:NAMES_SHOWN]):  # slow, so not for all of a foreign file
        texts[i] += _nearest(name, free)
    for title, listed in (("missing", missing), ("unknown", texts)):
        if listed:
            some = _some(listed, most)
            print(f"\n{title}:\n" + textwrap.fill(some, 118, initial_indent="  ", subsequent_indent="  "))
    return len(differences), len(missing), len(unknown)


def _print_first(first: Difference, compared: list[Value]) -> None:
    value = first.value
    before = compared[: compared.index(first.value)]
    print(f"\nfirst difference: {value.name}\n  {value.meaning}; {value.shape} {value.dtype}")
    print("".join(f"  {line}\n" for line in first.lines), end="")
    last = f"all values before it agree, the last of them is {before[-1].name}" if before else ""
    print(f"  {last or 'no value before it was compared'}")
    if first.causes:
        print("  known causes, the likeliest first:\n" + "".join(f"    - {cause}\n" for cause in first.causes), end="")


def _nearest(name: str, names: list[str]) -> str:
    """The golden name that an unknown one may mean: one that the dump does not hold."""
    near = difflib.get_close_matches(name[:200], names, n=1, cutoff=0.8)
    return f" (do you mean {near[0]}?)" if near else ""


def _some(texts: list[str], most: int = NAMES_SHOWN) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
