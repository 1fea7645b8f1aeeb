"""Golden values: what a small run computes at every place, for ports to compare themselves with.

    python -m tools.golden dump.safetensors    a port's values, under the same names; any part of them
    python -m tools.golden.record              what this code computes
    python -m tools.golden.record --write      write tests/golden anew, after a change that is meant

golden.safetensors holds the values. index.json lists them in order of computation, says what each is and how far a
port may be off. The commands print a table of the values that differ, and for the first of them what it is and which
mistakes are known there. The first command needs numpy and safetensors, no torch. Exit codes: 0 all given values agree,
1 some differ, 2 nothing could be compared, 3 with --complete: names are missing or unknown.
"""

import textwrap
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flux_ref import errors
from flux_ref.errors import Refusal
from flux_ref.formats import outside
from flux_ref.run.options import Options
from tools.golden import places
from tools.golden.files import FOLDER, Golden, Value, read_tensors

NAMES_SHOWN = 20  # of a longer list
ACCEPTED = {"f": "f", "i": "iu", "u": "iu", "b": "bu"}  # kind of a golden array -> kinds that a dump may hold


class Difference(NamedTuple):
    """A value that is off. extent: which part of it. distance: how far, in two numbers. worst: where and what."""

    value: Value
    extent: str
    distance: str = ""
    worst: str = ""


def compare(golden: Golden, value: Value, yours: np.ndarray) -> Difference | None:
    """How a value is off; None if it agrees."""
    want = golden.arrays[value.name]
    if yours.dtype.kind not in ACCEPTED[want.dtype.kind]:
        return Difference(value, f"dtype {yours.dtype}, want {value.dtype}")
    if yours.shape != want.shape and (yours.shape, want.shape) != ((1,), ()):  # some frameworks have no scalars
        return Difference(value, f"shape {list(yours.shape)}, want {value.shape}")
    computed = np.float64 if want.dtype.kind == "f" else want.dtype
    with np.errstate(invalid="ignore"):  # some NaNs complain when they are cast
        yours = yours.reshape(want.shape).astype(computed)
    want = want.astype(computed)
    if differs := tolerated(yours, want, value):
        return differs
    if value.dtype == "bf16" and (count := np.count_nonzero(~on_bf16_grid(yours))):
        return Difference(value, f"{count} of {yours.size} are no bf16 numbers; computed in fp32?")
    return None


def tolerated(yours: np.ndarray, want: np.ndarray, value: Value) -> Difference | None:
    """The difference of two arrays of one shape and dtype; None within the tolerance. NaN differs from all."""
    wrong = is_off(yours, want, value.atol, value.rtol)
    if not wrong.any():
        return None
    size = np.abs(want.astype(np.float64))
    with np.errstate(all="ignore"):
        off = np.abs(yours.astype(np.float64) - want.astype(np.float64))
        ratio = off / (value.atol + value.rtol * size)
        share = np.sqrt(np.square(off).mean() / np.square(size).mean())
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    ratio = np.where(wrong, ratio, -1.0)
    place = tuple(map(int, np.unravel_index(ratio.argmax(), ratio.shape)))
    times = f"{ratio.max():.3g} x tolerance" if value.atol or value.rtol else "exact"
    worst = f"worst at {list(place)}: yours {yours[place]}, golden {want[place]}"
    return Difference(value, f"{wrong.sum()} of {wrong.size} elements", f"{times}, rms {share:.2g}", worst)


def is_off(yours: np.ndarray, want: np.ndarray, atol: float, rtol: float) -> np.ndarray:
    """For each element, whether it is off."""
    if atol == rtol == 0:
        return yours != want  # differences of unsigned integers would wrap around
    return ~np.isclose(yours, want, rtol, atol)


def on_bf16_grid(x: np.ndarray) -> np.ndarray:
    """For each element, whether it is a bf16 number."""
    single = x.astype(np.float32, order="C")
    return (single == x) & (single.view(np.uint32) & 0xFFFF == 0)


def report(golden: Golden, dump: dict[str, np.ndarray], only: str = "*") -> tuple[int, int, int]:
    """Print how a dump compares. Returns how many values differ, are missing and are unknown.

    only: a pattern of the names to compare.
    """
    asked = [value for value in golden.values if fnmatchcase(value.name, only)]
    compared = [value for value in asked if value.name in dump]
    differences = [found for value in compared if (found := compare(golden, value, dump[value.name]))]
    missing = [value.name for value in asked if value.name not in dump and not value.given]
    unknown = sorted(dump.keys() - golden.arrays.keys())
    print(f"{len(compared)} values compared, {len(differences)} differ, {len(missing)} missing, {len(unknown)} unknown")
    if differences:
        print("\nin order of computation (rms: of the difference, as a share of the golden value's):")
        width = max(len(found.value.name) for found in differences)
        extent = max(len(found.extent) for found in differences)
        for found in differences:
            print(f"  {found.value.name:{width}}  {found.extent:{extent}}  {found.distance}".rstrip())
        explain(golden, differences[0])
    for title, names in (("missing", missing), ("unknown", [outside.printable(name)[:100] for name in unknown])):
        if names:
            more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
            text = f"{title}: {', '.join(names[:NAMES_SHOWN])}{more}"
            print("\n" + textwrap.fill(text, 118, subsequent_indent="  "))
    return len(differences), len(missing), len(unknown)


def explain(golden: Golden, first: Difference) -> None:
    """Print what the first value that differs is, how far it may be off, and what is known to go wrong there."""
    value = first.value
    print(f"\nfirst difference: {value.name}, {value.shape} {value.dtype}\n  {value.meaning}")
    print(f"  tolerance: {value.atol:.3g} + {value.rtol:.3g} * |golden| ({value.why})")
    if first.worst:
        print(f"  {first.worst}")
    if value.shape == [len(golden.parameters)]:
        print("  one norm per parameter, in the order of `parameters` in the index")
    if hints := places.hints(value.name):
        print("  known mistakes:")
        for hint in hints:
            print(f"    - {hint}")


def options(prog: str) -> Options:
    """What both commands take."""
    parser = Options(prog, __doc__)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="compare these names, such as 'grad.*'")
    parser.add_argument("--golden", type=Path, default=FOLDER, metavar="DIR", help="folder of the golden values")
    return parser


def run(argv: list[str]) -> int:
    """Compare a dump. Returns the exit code. Raises: Refusal."""
    parser = options("python -m tools.golden")
    parser.add_argument("dump", type=Path, help="a safetensors file")
    parser.add_argument("--complete", action="store_true", help="exit with 3 if names are missing or unknown")
    args = parser.parse_args(argv)
    golden = Golden(args.golden)
    dump = read_tensors(args.dump)
    if not any(fnmatchcase(name, args.only) and name in golden.arrays for name in dump):
        raise Refusal(f"{args.dump}: none of its {len(dump)} names is asked for; the index in {args.golden} lists all")
    differ, missing, unknown = report(golden, dump, args.only)
    return 1 if differ else 3 if args.complete and (missing or unknown) else 0


def main(argv: list[str]) -> int:
    return errors.run("golden", run, argv)
