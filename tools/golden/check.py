"""Golden values: what a small run computes at every place, for ports to compare themselves with.

    python -m tools.golden dump.safetensors    a port's values, under the same names; any part of them
    python -m tools.golden.record              what this code computes
    python -m tools.golden.record --write      write tests/golden anew, after a change that is meant

golden.safetensors holds the values. index.json lists them in order of computation, says what each is and how far a
port may be off. The commands print a table of the values that differ, and for the first of them what it is and which
mistakes are known there. The first command needs numpy and safetensors, no torch. Exit codes: 0 all given values agree,
1 some differ, 2 nothing could be compared.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from flux_ref import errors
from flux_ref.errors import Options, Refusal
from tools.golden import places
from tools.golden.files import FOLDER, INDEX, Golden, Value, Values, read_tensors

NAMES_SHOWN = 20  # of a longer list
ACCEPTED = {"f": "f", "i": "iu", "u": "iu", "b": "bu"}  # kind of a golden array -> kinds that a dump may hold


class Difference(NamedTuple):
    """A value that is off: how far in words, and where it is worst."""

    value: Value
    words: str
    worst: str = ""


def compare(value: Value, want: np.ndarray, yours: np.ndarray) -> Difference | None:
    """How a value is off; None if it agrees. want: the golden one. NaN differs from all."""
    if yours.dtype.kind not in ACCEPTED[want.dtype.kind]:
        return Difference(value, f"its dtype is {yours.dtype}, want {value.dtype}")
    if yours.shape != want.shape and (yours.shape, want.shape) != ((1,), ()):  # some frameworks have no scalars
        return Difference(value, f"its shape is {list(yours.shape)}, want {value.shape}")

    computed = np.float64 if want.dtype.kind == "f" else want.dtype
    with np.errstate(all="ignore"):  # NaNs, infinities, and values of 0
        yours = yours.reshape(want.shape).astype(computed)
        want = want.astype(computed)
        wrong = is_off(yours, want, value.atol, value.rtol)
        if wrong.any():
            return measured(value, want, yours, wrong)
    if value.dtype == "bf16" and (np.frexp(yours)[0] * 2**8 % 1 != 0).any():  # bf16 keeps 8 bits
        return Difference(value, "it holds numbers that are not bf16; computed in fp32?")
    return None


def is_off(yours: np.ndarray, want: np.ndarray, atol: float, rtol: float) -> np.ndarray:
    """For each element, whether it is off."""
    if atol == rtol == 0:
        return yours != want  # differences of unsigned integers would wrap around
    return ~np.isclose(yours, want, rtol, atol)


def measured(value: Value, want: np.ndarray, yours: np.ndarray, wrong: np.ndarray) -> Difference:
    """How far two arrays of one shape differ where they are wrong."""
    words = f"{wrong.sum()} of {wrong.size} elements"
    worst = wrong  # of an exact value: the first one
    if value.atol or value.rtol:
        off = np.abs(yours - want)
        ratio = np.nan_to_num(off / (value.atol + value.rtol * np.abs(want)), nan=np.inf, posinf=np.inf)
        worst = np.where(wrong, ratio, 0.0)
        rms = np.sqrt(np.square(off).mean() / np.square(want).mean())
        words += f", up to {worst.max():.3g} x tolerance, rms {rms:.2g}"
    place = tuple(map(int, np.unravel_index(worst.argmax(), worst.shape)))
    return Difference(value, words, f"worst at {list(place)}: yours {yours[place]}, golden {want[place]}")


def report(golden: Golden, dump: Values) -> tuple[int, int, int]:
    """Print how a dump compares. Returns how many values differ, are missing and are unknown."""

    common = [value for value in golden.values if value.name in dump]
    found = [compare(value, golden.arrays[value.name], dump[value.name]) for value in common]
    differences = [difference for difference in found if difference]
    missing = [value.name for value in golden.values if value.name not in dump and not value.given]
    unknown = [errors.printable(name)[:100] for name in sorted(dump.keys() - golden.arrays.keys())]

    print(f"{len(common)} values compared, {len(differences)} differ, {len(missing)} missing, {len(unknown)} unknown")
    if differences:
        explain(golden, differences)
    for title, names in (("missing", missing), ("unknown", unknown)):
        if names:
            print(f"\n{title}: {', '.join(names[:NAMES_SHOWN])}{', ...' if len(names) > NAMES_SHOWN else ''}")
    return len(differences), len(missing), len(unknown)


def explain(golden: Golden, differences: list[Difference]) -> None:
    """Print a table, and what is known of the first value that differs."""
    print("\nin order of computation (rms: of the difference, as a share of the golden value's):")
    width = max(len(found.value.name) for found in differences)
    for found in differences:
        print(f"  {found.value.name:{width}}  {found.words}")

    value, _, worst = differences[0]
    print(f"\nfirst difference: {value.name}, {value.shape} {value.dtype}")
    print(f"  {value.meaning}")
    print(f"  tolerance: {value.atol:.3g} + {value.rtol:.3g} * |golden| ({value.why})")
    if worst:
        print(f"  {worst}")
    if value.shape == [len(golden.parameters)]:
        print("  one norm per parameter, in the order of `parameters` in the index")

    print("  known mistakes:")
    for hint in places.place(value.name).hints:
        print(f"    - {hint}")


def run(argv: list[str]) -> int:
    """Compare a dump. Returns the exit code. Raises: Refusal."""
    parser = Options("python -m tools.golden", __doc__)
    parser.add_argument("dump", type=Path, help="a safetensors file")
    args = parser.parse_args(argv)
    golden = Golden(FOLDER)
    dump = read_tensors(args.dump)
    if not dump.keys() & golden.arrays.keys():
        raise Refusal(f"{args.dump}: none of its {len(dump)} names is known; {FOLDER / INDEX} lists all names")
    differ, _, _ = report(golden, dump)
    return 1 if differ else 0


def main(argv: list[str]) -> int:
    return errors.run("golden", run, argv)
