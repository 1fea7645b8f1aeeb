"""Golden values: what a small run computes at every place, for ports to compare themselves with.

    python -m tools.golden.check dump.safetensors         a port's values, under the same names; any part of them
    python -m tools.golden.check dump.safetensors --all   the same; names that are missing or unknown count, too
    python -m tools.golden.record                         what this code computes
    python -m tools.golden.record --write                 write tests/golden anew, after a change that is meant

golden.safetensors holds the values. index.json lists them in order of computation, says what each is and how far a
port may be off. The commands print a table of the values that differ, and for the first of them what it is and which
mistakes are known there. Those come first whose difference, as mistakes.json knows it, has the same size. The first
command needs numpy, safetensors and tqdm, no torch. Exit codes: 0 all given values agree, 1 some differ, 2 nothing
could be compared.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flux_ref import cli
from flux_ref.cli import Options, Refusal, one_line
from flux_ref.dataset import from_bf16_bits, to_bf16_bits
from tools.figures import read_json
from tools.golden.files import FOLDER, INDEX, MISTAKES, Golden, Value, Values, hints, read_tensors

NAMES_SHOWN = 500  # letters
ALIKE = 0.05  # two differences of one mistake in two programs, as a share of their size
BF16_RMS = 1e-3, 6e-3  # of differences that one rounding to bf16 makes
OWN_LOSSES = 5e-6  # relative: of losses in bf16 and those that follow from the same prediction


class Difference(NamedTuple):
    """A value that is off: how far in words, where it is worst, and the difference as a share of the golden value."""

    value: Value
    words: str
    worst: str = ""
    rms: float = 0.0
    cause: str = ""  # what the difference itself tells


def compare(value: Value, want: np.ndarray, yours: np.ndarray) -> Difference | None:
    """How a value is off; None if it agrees. NaN differs from all.

    want: the golden one. yours: floats in float32; words, indices, codes and flags as bool or integers of any width.
    A value of fp32 whose numbers are all bf16 is off, even within its tolerance. So is one of bf16 whose are not.
    """
    fits = yours.dtype == np.float32 if want.dtype.kind == "f" else yours.dtype.kind in "biu"
    if not fits:
        cause = f"the numbers may be right; store them in {value.dtype}"
        return Difference(value, f"its dtype is {yours.dtype}, want {value.dtype}", cause=cause)
    if np.atleast_1d(yours).shape != np.atleast_1d(want).shape:  # some frameworks have no scalars
        return Difference(value, f"its shape is {list(yours.shape)}, want {value.shape}")

    with np.errstate(all="ignore"):  # NaNs, infinities, and values of 0
        kind = want.dtype if want.dtype.kind == "f" else np.dtype(np.uint64)  # int64 may hold the bits of words
        want = want.astype(kind)
        yours = yours.reshape(want.shape).astype(kind)
        off = np.subtract(yours, want, dtype=np.float64)
        rms = float(np.sqrt(np.square(off).mean() / np.square(want, dtype=np.float64).mean()))
        ratio = np.abs(off) / (value.atol + value.rtol * np.abs(want))
    wrong = (yours != want) & ~(ratio <= 1)  # `off` may be 0 for words that differ: it has 53 bits

    words = "within tolerance"
    worst = ""
    cause = ""
    if wrong.any():
        words = f"{wrong.sum()} of {wrong.size} elements"
        ratio = np.where(wrong, np.nan_to_num(ratio, nan=np.inf, posinf=np.inf), 0.0)
        place = np.unravel_index(ratio.argmax(), ratio.shape)
        worst = f"worst at {[*map(int, place)]}: yours {yours[place]}, golden {want[place]}"
        if bad := np.count_nonzero(yours != yours):
            words += f", {bad} of them NaN"
            cause = "a division by 0, a root of a negative number, or exp of a large one"
        if value.atol or value.rtol:
            words += f", up to {ratio.max():.3g} x tolerance, rms {rms:.2g}"

    if value.dtype == "fp32" and rms < np.inf and is_bf16(yours) and not is_bf16(want):
        words += ", but all its numbers are bf16"
        cause = "it is rounded to bf16; it is fp32"
    elif not wrong.any():
        if value.dtype == "bf16" and not is_bf16(yours):
            return Difference(value, "it holds numbers that are not bf16; computed in fp32?")
        return None
    return Difference(value, words, worst, rms, cause)


def is_bf16(array: np.ndarray) -> bool:
    """Whether all numbers are those of bf16; NaN is none."""
    return bool((from_bf16_bits(to_bf16_bits(array)) == array).all())


def own_losses(golden: Golden, dump: Values) -> Difference | None:
    """How bf16.losses differ from what follows from the dump's own prediction; None if they agree or are not there.

    bf16's tolerance would hide how a loss is computed. The dump's values are within their tolerances.
    """
    if not {"bf16.prediction", "bf16.losses"} <= dump.keys():
        return None
    own = np.square(dump["bf16.prediction"] - golden.arrays["target"].astype(np.float64)).mean((1, 2))
    value = next(value for value in golden.values if value.name == "bf16.losses")
    meaning = "mean squared error of each sample of your own bf16.prediction"
    own_value = replace(value, rtol=OWN_LOSSES, meaning=meaning, why="a mean in fp32")
    return compare(own_value, own, dump["bf16.losses"])


def report(golden: Golden, dump: Values, demands_all: bool) -> int:
    """Print how a dump compares; returns the exit code. demands_all: names that are missing or unknown count, too."""
    common = [value for value in golden.values if value.name in dump]
    found = [compare(value, golden.arrays[value.name], dump[value.name]) for value in common]
    differences = [*filter(None, found)] or [*filter(None, [own_losses(golden, dump)])]
    missing = [value.name for value in golden.values if value.name not in dump and not value.given]
    unknown = sorted(dump.keys() - golden.arrays.keys())

    print(f"{len(common)} values compared, {len(differences)} differ, {len(missing)} missing, {len(unknown)} unknown")
    if differences:
        explain(golden, differences)
    for title, names in (("missing", missing), ("unknown", unknown)):
        if names:
            print(f"\n{title}: {one_line(', '.join(names), NAMES_SHOWN)}")
    return int(bool(differences or (demands_all and missing + unknown)))


def explain(golden: Golden, differences: list[Difference]) -> None:
    """Print a table, and what is known of the first value that differs."""
    print("\nin order of computation (rms: of the difference, as a share of the golden value's):")
    width = max(len(found.value.name) for found in differences)
    for found in differences:
        print(f"  {found.value.name:{width}}  {found.words}")

    first = differences[0]
    value = first.value
    print(f"\nfirst difference: {value.name}, {value.shape} {value.dtype}")
    print(f"  {value.meaning}")
    print(f"  tolerance: {value.atol:.3g} + {value.rtol:.3g} * |golden| ({value.why})")
    if first.worst:
        print(f"  {first.worst}")
    if value.shape == [len(golden.parameters)]:
        print("  one norm per parameter, in the order of `parameters` in the index")

    for title, listed in zip(("mistakes with a difference of this size", "known mistakes"), causes(first)):
        if listed:
            print(f"  {title}:", *listed, sep="\n    - ")


def causes(found: Difference) -> tuple[list[str], list[str]]:
    """What may be wrong: mistakes that are as far off, the nearest first; and what else is known at the place."""
    if found.cause and not found.rms > 0:  # there are no numbers to look at
        return [], [found.cause]
    known = read_json(FOLDER / MISTAKES).get(found.value.name, {})
    nearest = sorted((abs(rms - found.rms), cause) for cause, rms in known.items())
    alike = [cause for off, cause in nearest if off < ALIKE * found.rms]
    if found.cause:
        alike.append(found.cause)
    elif found.value.dtype == "fp32" and BF16_RMS[0] < found.rms < BF16_RMS[1]:
        alike.append("an operand, or a step before, is rounded to bf16")
    return alike, [hint for hint in hints(found.value.name) if hint not in alike]


def main(argv: list[str]) -> int:
    """Compare a dump. Returns the exit code. Raises: Refusal."""
    parser = Options("python -m tools.golden.check", __doc__)
    parser.add_argument("dump", type=Path, help="a safetensors file")
    parser.add_argument("--all", action="store_true", help="names that are missing or unknown count, too")
    args = parser.parse_args(argv)
    golden = Golden(FOLDER)
    dump = read_tensors(args.dump)
    if not dump.keys() & golden.arrays.keys():
        raise Refusal(f"{args.dump}: none of its {len(dump)} names is known; {FOLDER / INDEX} lists all names")
    return report(golden, dump, args.all)


if __name__ == "__main__":
    sys.exit(cli.run("golden", main, sys.argv[1:]))
