"""Which of two configs is better: the validation losses of their runs, in pairs of one seed.

    python -m tools.compare --a runs/a_0 runs/a_1 runs/a_2 --b runs/b_0 runs/b_1 runs/b_2

Runs of one seed see the same samples, noise and dropped captions, so their losses rise and fall together, and their
difference varies less than each loss. Reads config.toml and eval.jsonl. Prints the keys in which the configs differ,
then a row for each evaluation that all runs have. p is that of a two-sided t test on the differences.
Exit codes: 0 done, 2 refused.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

from flux_ref import config, config_file, errors
from flux_ref.errors import Options, Refusal, package
from flux_ref.files import records

HEAD = f"{'samples':>12} {'A':>9} {'B':>9} {'B - A':>10} {'+-':>9} {'p':>8}"


class Row(NamedTuple):
    """One evaluation of n pairs."""

    a: float  # mean loss
    b: float
    diff: float  # mean of b - a
    stderr: float  # of diff
    p: float  # how likely a difference of at least this size is by chance


def paired(a: Sequence[float], b: Sequence[float]) -> Row:
    """a[i] and b[i] are losses of one seed; at least two pairs."""
    scipy = package("scipy", "tools.compare")
    n = len(a)
    each = [own - other for own, other in zip(b, a, strict=True)]
    diff = fmean(each)
    stderr = stdev(each) / n**0.5
    p = 2 * float(scipy.special.stdtr(n - 1, -abs(diff) / (stderr or 1e-300)))  # both tails of Student's distribution
    return Row(fmean(a), fmean(b), diff, stderr, p)


def curve(run: Path) -> dict[int, float]:
    """Validation loss by samples. Raises: Refusal."""
    found = records(run / "eval.jsonl")
    return {int(record["samples"]): record["val_loss"] for record in found}


def compare(a: list[Path], b: list[Path]) -> dict[int, Row]:
    """By samples; a[i] and b[i] are runs of one seed. Raises: Refusal."""
    of_a = [curve(run) for run in a]
    of_b = [curve(run) for run in b]
    common = set.intersection(*map(set, of_a), *map(set, of_b))
    if not common:
        raise Refusal(f"{a[0]}, {b[0]} and the others share no evaluation; train all with the same eval.every_samples")
    rows = {}
    for at in sorted(common):
        rows[at] = paired([losses[at] for losses in of_a], [losses[at] for losses in of_b])
    return rows


def by_seed(runs: list[Path]) -> list[tuple[int, Path]]:
    """Each run with its train.seed, in their order. Raises: Refusal."""
    return sorted((config_file.load(run / "config.toml").train.seed, run) for run in runs)


def main(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("python -m tools.compare", __doc__)
    parser.add_argument("--a", nargs="+", type=Path, required=True, metavar="RUN")
    parser.add_argument("--b", nargs="+", type=Path, required=True, metavar="RUN")
    args = parser.parse_args(argv)
    a = by_seed(args.a)
    b = by_seed(args.b)
    seeds = [seed for seed, _ in a]
    if seeds != [seed for seed, _ in b] or len({*seeds}) < max(2, len(seeds)):
        raise Refusal("--a and --b: give each a run of each seed (train.seed), at least two")
    of_a = config.flat(config_file.load(a[0][1] / "config.toml"))
    of_b = config.flat(config_file.load(b[0][1] / "config.toml"))
    for key in of_a:
        if of_a[key] != of_b[key] and key != "run.dir":
            print(f"{key} is {of_a[key]!r} in A, {of_b[key]!r} in B")
    print(HEAD)
    for at, row in compare([run for _, run in a], [run for _, run in b]).items():
        print(f"{at:>12,} {row.a:>9.5f} {row.b:>9.5f} {row.diff:>+10.5f} {row.stderr:>9.2g} {row.p:>8.2g}")
    return 0


if __name__ == "__main__":
    sys.exit(errors.run("compare", main, sys.argv[1:]))
