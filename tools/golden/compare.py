"""Comparing a dump with the golden values: where it differs, by how much, and which mistakes are known there."""

import textwrap
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from flux_ref.formats import outside
from tools.golden import instead, places
from tools.golden.files import Golden, Value
from tools.golden.instead import differs
from tools.golden.tensor_file import TensorFile

NAMES_SHOWN = 20  # of a longer list
SMALL = 0.02  # relative difference that a change of order or a missing term exceeds
INTEGERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")
ACCEPTED = {  # dtype of a golden value -> the dtypes in which a dump may hold it
    "fp32": ("F32", "F64"),
    "bf16": ("BF16", "F32", "F64"),
    "int64": INTEGERS,
    "uint64": INTEGERS,
    "uint8": ("U8", "F8_E4M3", "F8_E5M2"),
    "bool": ("BOOL", "U8"),
}
COMPARED = {"f": np.float64, "u": np.uint64, "i": np.int64, "b": np.int64}  # kind of numbers -> dtype to compare in


@dataclass
class Difference:
    """How a value of a dump is off. extent: in a few words, for a list. lines: in full.

    pair: yours and golden as numbers of one shape and kind, all finite; None if they cannot be compared so.
    """

    value: Value
    extent: str
    lines: list[str]
    pair: tuple[np.ndarray, np.ndarray] | None = None


def compare(golden: Golden, value: Value, dump: TensorFile) -> Difference | None:
    """How a value of a dump is off; None if it agrees. Read only if its dtype and shape are right."""
    entry = dump.entries[value.name]
    shape = tuple(value.shape)
    accepted = ACCEPTED[value.dtype]
    if entry.dtype not in accepted:
        line = f"its dtype is {entry.dtype}, want {' or '.join(accepted)}"
        return Difference(value, f"dtype {entry.dtype}", [line])
    if entry.shape != shape and (entry.shape, shape) != ((1,), ()):  # some frameworks have no scalars
        line = f"its shape is {list(entry.shape)}, want {value.shape}"
        line += " (transposed?)" if entry.shape == shape[::-1] else ""
        return Difference(value, f"shape {list(entry.shape)}", [line])
    want = golden.file.read(value.name)
    kind = COMPARED[want.dtype.kind]
    with np.errstate(invalid="ignore"):  # some NaNs complain when they are cast
        yours = dump.read(value.name).reshape(shape).astype(kind)
    want = want.astype(kind)
    bad = ~np.isfinite(yours) & np.isfinite(want)
    if bad.any():
        extent = f"{bad.sum()} of {bad.size} elements are not finite"
        return Difference(value, extent, [f"{extent}, the first at {np.argwhere(bad)[0].tolist()}"])
    found = distance(golden, value, yours, want)
    if value.dtype == "bf16" and (count := instead.off_grid(yours)):
        found = found or Difference(value, "not bf16", [])
        line = f"yours is not bf16: {count} of {yours.size} elements lie off the grid of bf16. Computed in fp32?"
        found.lines.append(line)
    return found


def distance(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray) -> Difference | None:
    """How many elements differ, where and how far. yours, want: of one shape and kind."""
    wrong = differs(yours, want, value.atol, value.rtol)
    if not wrong.any():
        return None
    allowed = value.atol + value.rtol * np.abs(want)
    off = np.abs(yours - want.astype(np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(allowed > 0, off / allowed, np.inf)
    ratio = np.where(wrong, ratio, 0)
    place = np.argwhere(ratio == ratio.max())[0].tolist()
    at = tuple(place)
    extent = f"{wrong.sum()} of {wrong.size} elements"
    tolerance = f"{value.rtol} of each" if value.rtol else value.atol
    lines = [
        f"{extent} differ by more than {tolerance} ({value.why})",
        f"worst at {place}: yours {yours[at]}, golden {want[at]}",
    ]
    if tolerance:
        extent = f"{ratio.max():.3g} times its tolerance"
        size = instead.rms(yours - want) / max(instead.rms(want), 1e-300)
        word = "small" if size < SMALL else "large"
        lines.append(f"there {extent}; root mean square of the difference: {size:.2g} of golden's, which is {word}")
    if value.name.endswith("norms"):
        names = value.inputs.get("names", golden.parameters)
        parameters = [name for name, is_wrong in zip(names, wrong) if is_wrong]
        lines.append(f"parameters that differ, in the order of backward: {some(parameters[::-1])}")
    return Difference(value, extent, lines, (yours, want))


# Reporting


def report(golden: Golden, dump: TensorFile, only: str = "*", shows_all: bool = False) -> tuple[int, int, int]:
    """Print how a dump compares. Returns how many values differ, are missing and are unknown.

    only: a pattern of the names to compare. shows_all: lists are not cut.
    """
    asked = [value for value in golden.values if fnmatchcase(value.name, only)]
    compared = [value for value in asked if value.name in dump.entries]
    differences = [difference for value in compared if (difference := compare(golden, value, dump))]
    missing = [value.name for value in asked if value.name not in dump.entries and not value.given]
    unknown = sorted(dump.entries.keys() - {value.name for value in golden.values})
    print(f"{len(compared)} places compared, {len(differences)} differ, {len(missing)} missing, {len(unknown)} unknown")
    most = len(golden.values) + len(dump.entries) if shows_all else NAMES_SHOWN
    if differences:
        explain(golden, differences[0], compared)
        print("\nall that differ, in the order of computation (--only NAME explains another one):")
        for difference in differences[:most]:
            print(f"  {difference.value.name}: {difference.extent}")
        if len(differences) > most:
            print(f"  and {len(differences) - most} more; --all lists them")
    printable = [outside.printable(name)[:100] for name in unknown]
    for title, names in {"missing": missing, "unknown": printable}.items():
        if names:
            print(f"\n{title}:")
            print(textwrap.fill(some(names, most), 118, initial_indent="  ", subsequent_indent="  "))
    return len(differences), len(missing), len(unknown)


def explain(golden: Golden, first: Difference, compared: list[Value]) -> None:
    """Explain the first difference of the values that were compared."""
    value = first.value
    lines = list(first.lines)
    if first.pair:
        lines += instead.sentences(golden, value, *first.pair)
    print(f"\nfirst difference: {value.name}\n  {value.meaning}; {value.shape} {value.dtype}")
    for line in lines:
        print(f"  {line}")
    if number := compared.index(value):
        print(f"  all values before it agree, the last of them is {compared[number - 1].name}")
    if mistakes := places.mistakes(value.name, "\n".join(lines)):
        print("  known mistakes, the likeliest first:")
        for mistake in mistakes:
            print(f"    - {mistake}")


def some(texts: list[str], most: int = NAMES_SHOWN) -> str:
    """The first of some texts, and how many more there are."""
    shown = ", ".join(texts[:most])
    return f"{shown} and {len(texts) - most} more" if len(texts) > most else shown
