"""Which of two configs is better: the validation losses of their runs, in pairs of one seed.

    python -m tools.compare --a runs/a_0 runs/a_1 runs/a_2 --b runs/b_0 runs/b_1 runs/b_2

Runs of one seed see the same samples, noise and dropped captions, so their losses rise and fall together, and their
difference varies less than each loss. Reads config.toml and eval.jsonl. Prints the keys in which the configs differ,
then a row for each evaluation that all runs have. p is that of a two-sided t test on the differences.
Exit codes: 0 done, 2 refused.
"""

import sys
from pathlib import Path
from statistics import fmean

import numpy as np

from flux_ref import cli, config, config_file
from flux_ref.cli import Options, Refusal
from flux_ref.files import records
from tools.figures import table

HEAD = ("samples", "A", "B", "B - A", "+-", "p")
Curve = dict[int, float]  # validation loss by samples
FORMATS = (".5f", ".5f", "+.5f", ".2g", ".2g")  # of what `paired` gives


def paired(a: list[float], b: list[float]) -> tuple[float, ...]:
    """(mean loss of a, of b, mean of b - a, its standard error, p).

    a[i] and b[i] are losses of one seed; at least two pairs. p: how likely a difference of at least this size is by
    chance.
    """
    from scipy import stats

    each = np.subtract(b, a)
    return fmean(a), fmean(b), each.mean(), stats.sem(each), stats.ttest_rel(a, b).pvalue


def by_seed(runs: list[Path]) -> tuple[dict[int, Curve], dict[str, object]]:
    """(the curve of each run by its train.seed, the keys of a run). Raises: Refusal if two have the same seed."""
    curves = {}
    for run in runs:
        keys = config.flat(config_file.load(run / "config.toml"))
        curves[keys["train.seed"]] = {
            record["samples"]: record["val_loss"] for record in records(run / "eval.jsonl", "val_loss")
        }
    if len(curves) < len(runs):
        raise Refusal("two runs have one train.seed; give a run of each seed")
    return curves, keys


def main(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("python -m tools.compare", __doc__)
    parser.add_argument("--a", nargs="+", type=Path, required=True, metavar="RUN")
    parser.add_argument("--b", nargs="+", type=Path, required=True, metavar="RUN")
    args = parser.parse_args(argv)
    a, of_a = by_seed(args.a)
    b, of_b = by_seed(args.b)
    if a.keys() != b.keys() or len(a) < 2:
        raise Refusal("--a and --b: give each a run of each seed (train.seed), at least two")

    for key in of_a:
        if of_a[key] != of_b[key] and key not in ("run.dir", "train.seed"):
            print(f"{key} is {of_a[key]!r} in A, {of_b[key]!r} in B")

    common = set.intersection(*map(set, (*a.values(), *b.values())))
    if not common:
        raise Refusal("the runs share no evaluation; train all with the same eval.every_samples")

    rows = []
    for at in sorted(common):
        figures = paired([a[seed][at] for seed in a], [b[seed][at] for seed in a])
        rows.append((f"{at:,}", *map(format, figures, FORMATS)))
    print("\n".join(table(HEAD, rows)))
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("compare", main, sys.argv[1:]))
