"""Comparing a dump with the golden values: where it differs, by how much, and which mistakes are known there."""

import difflib
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
    """How a value of a dump is off; None if it agrees. Read only if its shape can be right or transposed."""
    dtype, shape = dump.entries[value.name]
    want_shape = tuple(value.shape)
    if dtype not in ACCEPTED[value.dtype]:
        line = f"its dtype is {dtype}, want {' or '.join(ACCEPTED[value.dtype])}"
        return Difference(value, f"dtype {dtype}", [line])
    want = golden.file.read(value.name)
    if shape != want_shape and (shape, want_shape) != ((1,), ()):  # some frameworks have no scalars
        line = f"its shape is {list(shape)}, want {value.shape}"
        if len(shape) == 2 and shape == want_shape[::-1]:
            is_transposed = not differs(dump.read(value.name).T, want, value.atol, value.rtol).any()
            line += " (it is the transposed)" if is_transposed else ""
        return Difference(value, f"shape {list(shape)}", [line])
    yours = dump.read(value.name).reshape(want_shape)
    if want.dtype.kind != "f":
        kind = np.int64 if want.dtype == bool else want.dtype
        return _distance(golden, value, yours.astype(kind), want.astype(kind))
    with np.errstate(invalid="ignore"):  # some NaNs complain when they are cast
        yours = yours.astype(np.float64)
        want = want.astype(np.float64)
    bad = ~np.isfinite(yours) & np.isfinite(want)
    if bad.any():
        first = np.argwhere(bad)[0].tolist()
        line = f"{bad.sum()} of its {bad.size} elements are not finite, the first at {first}"
        return Difference(value, f"{bad.sum()} of {bad.size} not finite", [line])
    found = _distance(golden, value, yours, want)
    if value.dtype == "bf16" and (count := instead.off_grid(yours)):
        found = found or Difference(value, "not bf16", [])
        line = f"yours is not bf16: {count} of its {yours.size} elements lie off the grid of bf16. Computed in fp32?"
        found.lines.append(line)
    return found


def _distance(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray) -> Difference | None:
    """How many elements differ, where and how far."""
    wrong = differs(yours, want, value.atol, value.rtol)
    if not wrong.any():
        return None
    count = f"{wrong.sum()} of {wrong.size}"
    allowed = value.atol + value.rtol * np.abs(want)
    if not allowed[wrong].all():  # some must agree exactly
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
        ]
        size = instead.rms(yours - want) / max(instead.rms(want), 1e-300)
        word = "small" if size < SMALL else "large"
        lines.append(f"root mean square of the difference: {size:.2g} of golden's own, which is {word}")
    if value.name.endswith("norms"):
        names = value.inputs.get("names", golden.parameters)
        off = [name for name, is_wrong in zip(names, wrong) if is_wrong]
        lines.append(f"parameters that differ, in the order of backward: {_some(off[::-1])}")
    return Difference(value, extent, lines, (yours, want))


# Reporting


def report(golden: Golden, dump: TensorFile, only: str = "*", shows_all: bool = False) -> tuple[int, int, int]:
    """Print how a dump compares. Returns how many values differ, are missing and are unknown.

    only: a pattern of the names to compare. shows_all: lists are not cut.
    """
    compared = []
    differences = []
    missing = []
    for value in golden.values:
        if not fnmatchcase(value.name, only):
            continue
        if value.name in dump.entries:
            compared.append(value)
            difference = compare(golden, value, dump)
            differences += [difference] if difference else []
        elif not value.given:
            missing.append(value.name)
    names = {value.name for value in golden.values}
    unknown = sorted(dump.entries.keys() - names)
    print(f"{len(compared)} places compared, {len(differences)} differ, {len(missing)} missing, {len(unknown)} unknown")
    most = len(names | dump.entries.keys()) if shows_all else NAMES_SHOWN
    if differences:
        number = compared.index(differences[0].value)
        _print_first(golden, differences[0], compared[number - 1].name if number else None)
        print("\nall that differ, in the order of computation (--only NAME explains another one):")
        for difference in differences[:most]:
            print(f"  {difference.value.name}: {difference.extent}")
        if len(differences) > most:
            print(f"  and {len(differences) - most} more; --all lists them")
    _print_names("missing", missing, most)
    _print_names("unknown", _with_meant(unknown, sorted(names - dump.entries.keys())), most)
    return len(differences), len(missing), len(unknown)


def _with_meant(unknown: list[str], free: list[str]) -> list[str]:
    """Unknown names, printable, with the name that may be meant. free: those that the dump does not hold."""
    texts = []
    for number, name in enumerate(unknown):
        text = outside.printable(name)[:100]
        near = []
        if number < NAMES_SHOWN:  # slow, so not for all of a foreign file
            near = difflib.get_close_matches(name[:200], free, n=1, cutoff=0.8)
        texts.append(f"{text} (do you mean {near[0]}?)" if near else text)
    return texts


def _print_names(title: str, names: list[str], most: int) -> None:
    if names:
        text = textwrap.fill(_some(names, most), 118, initial_indent="  ", subsequent_indent="  ")
        print(f"\n{title}:\n{text}")


def _print_first(golden: Golden, first: Difference, before: str | None) -> None:
    """Explain a difference. before: the last value that agrees."""
    value = first.value
    lines = list(first.lines)
    if first.pair:
        lines += instead.sentences(golden, value, *first.pair)
    print(f"\nfirst difference: {value.name}\n  {value.meaning}; {value.shape} {value.dtype}")
    for line in lines:
        print(f"  {line}")
    agreed = (
        f"all values before it agree, the last of them is {before}" if before else "no value before it was compared"
    )
    print(f"  {agreed}")
    if mistakes := places.mistakes(value.name, "\n".join(lines)):
        print("  known mistakes, the likeliest first:")
        for mistake in mistakes:
            print(f"    - {mistake}")


def _some(texts: list[str], most: int = NAMES_SHOWN) -> str:
    return ", ".join(texts[:most]) + (f" and {len(texts) - most} more" if len(texts) > most else "")
