"""Golden values: what a small run computes at every place, for ports to compare themselves with.

    python -m flux_ref.golden check                          this code against tests/golden
    python -m flux_ref.golden check --from dump.safetensors  a port's values, under the same names; any part of them
    python -m flux_ref.golden write                          record tests/golden anew, after a change that is meant

golden.safetensors holds the values and index.json says in order of computation what each is and how far a port may be
off. `check` names the first place that differs. Exit codes: 0 all agree, 1 some differ, 2 nothing could be compared.
"""

import argparse
import hashlib
import importlib
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flux_ref import config_file
from flux_ref.errors import Refusal
from flux_ref.golden import places

FOLDER = Path(__file__).parents[2] / "tests" / "golden"
VALUES, INDEX, CONFIG = "golden.safetensors", "index.json", "config.toml"
HEADER_BYTES = 100_000_000  # the format's own limit
MOST_AXES = 8
SHOWN = 20  # names of a list
DTYPES = {  # of safetensors; bf16 and FP8 are read as bits
    **{"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "BOOL": np.bool_},
    **{"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U64": np.uint64, "U32": np.uint32},
    **{"U16": np.uint16, "U8": np.uint8, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8},
}
NAMES = {np.dtype(kind): name for name, kind in reversed(DTYPES.items())}
INTEGERS = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8")
ACCEPTED = {  # what a dump may hold for a value of a dtype
    "fp32": ("F32", "F64"),
    "bf16": ("BF16", "F32", "F64"),
    "int64": INTEGERS,
    "uint64": INTEGERS,
    "uint8": ("U8", "F8_E4M3", "F8_E5M2"),
    "bool": ("BOOL", "U8"),
}


@dataclass(frozen=True)
class Value:
    """An entry of the index: a value differs where |yours - golden| > atol + rtol * |golden|."""

    name: str
    shape: list[int]
    dtype: str  # that it is computed in; bf16 lies in the file as F32
    given: bool  # whether a port takes it from here
    meaning: str
    atol: float
    rtol: float
    why: str  # of the tolerance


class TensorFile:
    """The tensors of a safetensors file, which may be anyone's; read when asked for."""

    def __init__(self, path: Path):
        """Raises: Refusal for a file that is none."""
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                size = path.stat().st_size
                if size < 8 or length > min(size - 8, HEADER_BYTES):
                    raise ValueError("its header is cut short")
                header = json.loads(file.read(length))
            self.start = 8 + length
            self.entries = {
                name: self._entry(name, entry, size) for name, entry in header.items() if name != "__metadata__"
            }
        except OSError as error:
            raise Refusal(f"{path}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            reason = " ".join(str(error).split())[:200]
            raise Refusal(f"{path} is no whole safetensors file: {reason or type(error).__name__}") from None

    def _entry(self, name: str, entry: dict, size: int) -> tuple[str, tuple[int, ...], int]:
        """(dtype, shape, first byte)."""
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        counts = all(type(number) is int and number >= 0 for number in (*shape, first, last))
        if not counts or len(shape) > MOST_AXES or dtype not in DTYPES:
            raise ValueError(f"{printable(name)} has dtype {printable(str(dtype))} and shape {printable(str(shape))}")
        if last - first != prod(shape) * np.dtype(DTYPES[dtype]).itemsize or self.start + last > size:
            raise ValueError(f"the bytes of {printable(name)} are not all there")
        return dtype, shape, self.start + first

    def read(self, name: str) -> np.ndarray:
        """A tensor; bf16 as float32."""
        dtype, shape, first = self.entries[name]
        array = np.fromfile(self.path, DTYPES[dtype], prod(shape), offset=first).reshape(shape)
        return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array


def write_tensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Write a safetensors file."""
    header, at = {}, 0
    for name, array in arrays.items():
        header[name] = {"dtype": NAMES[array.dtype], "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())


class Golden:
    """The golden values of a folder."""

    def __init__(self, folder: Path):
        """Raises: Refusal if they are not there, or not as they were written."""
        self.folder, self.file = folder, TensorFile(folder / VALUES)
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            digest = hashlib.sha256((folder / VALUES).read_bytes()).hexdigest()
            self.parameters, self.values = index["parameters"], [Value(**entry) for entry in index["values"]]
            is_whole = index["sha256"] == digest
        except OSError as error:
            raise Refusal(f"{folder / INDEX}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Refusal(f"{folder / INDEX} is no index of golden values: {error}") from None
        if not is_whole:
            raise Refusal(f"{folder / VALUES} is not the file that {INDEX} was written with; restore both")

    def given(self) -> dict[str, np.ndarray]:
        return {value.name: self.file.read(value.name) for value in self.values if value.given}


# Comparing


class Yours(NamedTuple):
    """A value to be compared; dtype: as a file has it."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


@dataclass(frozen=True)
class Difference:
    """A place where a dump is off; lines: how, for people."""

    value: Value
    lines: list[str]


def differs(yours: np.ndarray, golden: np.ndarray, atol: float, rtol: float) -> np.ndarray:
    """Where it is off."""
    if atol == rtol == 0:
        return yours != golden  # also of integers, whose differences wrap around
    return ~(np.abs(yours - golden) <= atol + rtol * np.abs(golden))


def compare(golden: Golden, value: Value, given: Yours) -> Difference | None:
    """One value of a dump; it is read only if it has as many elements as it should."""
    if prod(given.shape) != prod(value.shape):
        return Difference(value, [f"its shape is {list(given.shape)}, want {value.shape}"])
    yours, want = given.read(), golden.file.read(value.name)
    yours = yours.reshape(()) if yours.shape == (1,) else yours  # some frameworks have no scalars
    if yours.shape != want.shape:
        turned = " (it is the transposed)" if yours.ndim == 2 and np.array_equal(yours.T, want) else ""
        return Difference(value, [f"its shape is {list(yours.shape)}, want {value.shape}{turned}"])
    if given.dtype not in ACCEPTED[value.dtype]:
        return Difference(value, [f"its dtype is {given.dtype}, want {' or '.join(ACCEPTED[value.dtype])}"])
    if want.dtype.kind == "f":
        yours, want = yours.astype(np.float64), want.astype(np.float64)
        if not np.isfinite(yours).all():
            return Difference(value, [f"{(~np.isfinite(yours)).sum()} of its {yours.size} elements are not finite"])
    else:
        yours, want = (array.astype(np.int64 if want.dtype == bool else want.dtype) for array in (yours, want))
    wrong = differs(yours, want, value.atol, value.rtol)
    if not wrong.any():
        return None
    how = _distance(golden, value, yours, want, wrong) if want.dtype.kind == "f" else _count(yours, want, wrong)
    return Difference(value, [*how, *resemblances(golden, value, yours, want)])


def _count(yours: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> list[str]:
    at = np.unravel_index(np.argmax(wrong), wrong.shape)
    return [f"{wrong.sum()} of {wrong.size} differ, first at {_place(at)}: yours {yours[at]}, golden {want[at]}"]


def _distance(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray, wrong: np.ndarray) -> list[str]:
    far = np.abs(yours - want)
    at = np.unravel_index(np.argmax(far), far.shape)
    tolerance = f"{value.atol:.1e}" if value.atol else f"{value.rtol:.1e} of each" if value.rtol else "0"
    lines = [
        f"max |difference| {far[at]:.3g} at {_place(at)}: yours {yours[at]:.7g}, golden {want[at]:.7g}",
        f"relative to the largest magnitude {far[at] / max(np.abs(want).max(), 1e-300):.3g};"
        f" {wrong.sum()} of {wrong.size} differ; tolerance {tolerance} ({value.why})",
    ]
    if value.name.endswith("norms"):
        names = [name for name, off in zip(golden.parameters, wrong) if off]
        lines.append(f"of {_some(names[::-1])}")
    return lines


def _place(at: tuple) -> str:
    return str([int(i) for i in at])


def resemblances(golden: Golden, value: Value, yours: np.ndarray, want: np.ndarray) -> Iterator[str]:
    """What the values are instead, where that can be told."""

    def same(a: np.ndarray, b: np.ndarray) -> bool:
        return not differs(a, b, 2 * value.atol, 2 * value.rtol).any()

    def of_other_places() -> Iterator[str]:
        for other in golden.values:
            if other.name != value.name and other.shape == value.shape and other.dtype == value.dtype:
                if same(yours, golden.file.read(other.name).astype(yours.dtype)):
                    yield other.name

    if other := next(of_other_places(), ""):
        yield f"yours is the golden value of {other}"
    if want.dtype.kind != "f" or want.size < 2:
        return
    factor = float((yours * want).sum() / max((want * want).sum(), 1e-300))
    if abs(factor - 1) > 1e-3 and same(yours, factor * want):
        yield "yours is the golden value negated" if abs(factor + 1) < 1e-3 else f"yours is {factor:.6g} x golden"
        return
    for axis in range(want.ndim):
        if want.shape[axis] > 1 and same(np.sort(yours, axis), np.sort(want, axis)):
            yield f"yours has the same numbers in another order along axis {axis}"
            return
    if same(np.sort(yours, None), np.sort(want, None)):
        yield "yours has the same numbers in another order"


# Reporting


def printable(name: str) -> str:
    """A name from a foreign file for the terminal."""
    return ascii(name)[1:-1][:100]


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(printable, names[:SHOWN])) + rest


def of_array(array: np.ndarray) -> Yours:
    return Yours(NAMES[array.dtype], array.shape, lambda: array)


def _grouped(missing: list[str], golden: Golden) -> list[str]:
    """The names, those of a section of which nothing is there as one."""
    sizes = Counter(_section(value.name) for value in golden.values if not value.given)
    absent = Counter(map(_section, missing))
    whole = {section for section in absent if absent[section] == sizes[section] > 1}
    shown = (f"{_section(name)}.* ({sizes[_section(name)]})" if _section(name) in whole else name for name in missing)
    return list(dict.fromkeys(shown))


def _section(name: str) -> str:
    return name.partition(".")[0]


def report(golden: Golden, dump: dict[str, Yours], extra: list[str]) -> tuple[int, int]:
    """Print what was found; returns how many places differ and are missing."""
    compared = [value for value in golden.values if value.name in dump]
    missing = [value.name for value in golden.values if value.name not in dump and not value.given]
    found = [difference for value in compared if (difference := compare(golden, value, dump[value.name]))]
    print(f"{len(compared)} places compared, {len(found)} differ, {len(missing)} missing, {len(extra)} unknown")
    if found:
        first = found[0].value
        before = [value.name for value in compared[: compared.index(first)]]
        print(f"\nfirst difference: {first.name}\n  {first.meaning}; {first.shape} {first.dtype}")
        print("".join(f"  {line}\n" for line in found[0].lines), end="")
        print(f"  all before it agree, the last of them {before[-1]}" if before else "  nothing before it was compared")
        start = golden.values.index(next((v for v in golden.values if before and v.name == before[-1]), first))
        between = [v.name for v in golden.values[start : golden.values.index(first)] if v.name in missing]
        if between:
            print(f"  between these, missing: {_some(between)}")
        if causes := places.place(first.name).causes:
            print("  known causes:\n" + "".join(f"    - {cause}\n" for cause in causes), end="")
        print(f"  after it, {len(found) - 1} of {len(compared) - len(before) - 1} differ")
    for title, names in (("missing", _grouped(missing, golden)), ("unknown", [printable(name) for name in extra])):
        if names:
            print(f"\n{title}:\n" + textwrap.fill(", ".join(names), 118, initial_indent="  ", subsequent_indent="  "))
    return len(found), len(missing)


# Commands


def check(folder: Path, dump: Path | None) -> int:
    """Compare a dump, or what this code computes. Raises: Refusal."""
    golden = Golden(folder)
    names = {value.name for value in golden.values}
    if dump is None:
        values = importlib.import_module("flux_ref.golden.record")
        recorded = values.record(config_file.load(folder / CONFIG), golden.given())
        found = {name: of_array(value.array) for name, value in recorded.items()}
        return 1 if any(report(golden, found, extra := sorted(found.keys() - names))) or extra else 0
    file = TensorFile(dump)
    known = [name for name in file.entries if name in names]
    if not known:
        raise Refusal(f"{dump}: none of its {len(file.entries)} names is in {folder / INDEX}; see there")
    found = {name: Yours(*file.entries[name][:2], partial(file.read, name)) for name in known}
    differ, _ = report(golden, found, [name for name in file.entries if name not in names])
    return 1 if differ else 0


def write(folder: Path) -> int:
    """Record everything anew, inputs too. Raises: Refusal."""
    values = importlib.import_module("flux_ref.golden.record")
    cfg = config_file.load(folder / CONFIG)
    recorded = values.record(cfg, values.inputs(cfg))
    entries = []
    for name, (dtype, array) in recorded.items():
        kind = places.place(name).kind
        about = (places.meaning(name), *kind.tolerances(array), kind.why)
        entries.append(asdict(Value(name, list(array.shape), dtype, places.is_given(name), *about)))
    unfinished = {name: folder / f".{name}.partial" for name in (VALUES, INDEX)}
    write_tensors(unfinished[VALUES], {name: value.array for name, value in recorded.items()})
    parameters = [name.removeprefix("weights.") for name in recorded if name.startswith("weights.")]
    head = {"sha256": hashlib.sha256(unfinished[VALUES].read_bytes()).hexdigest(), "parameters": parameters}
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    unfinished[INDEX].write_text(json.dumps(head)[:-1] + f', "values": [\n{lines}\n]}}\n')
    for name, path in unfinished.items():
        path.rename(folder / name)
    print(f"{folder}: {len(entries)} values, {(folder / VALUES).stat().st_size / 1e3:.0f} kB")
    return 0


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flux_ref.golden", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("check", "write"))
    parser.add_argument("--from", dest="dump", type=Path, help="a port's values as a safetensors file")
    parser.add_argument("--golden", type=Path, default=FOLDER, metavar="DIR", help="folder of the golden values")
    args = parser.parse_args(argv)
    try:
        if args.command == "check":
            return check(args.golden, args.dump)
        if args.dump:
            raise Refusal("--from is for check; write records this code's own values")
        return write(args.golden)
    except (Refusal, OSError) as error:
        print(f"golden: {' '.join(str(error).split())}", file=sys.stderr)
        return Refusal.exit_code
