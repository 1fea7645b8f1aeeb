"""A band of your own runs, for eval.band.

python -m tools.report.band RUN [RUN ...] > own.csv
"""

import csv
import statistics
import sys
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path

from flux_ref import config
from flux_ref.benchmark.convergence import HEADER
from flux_ref.config_file import of_run
from flux_ref.errors import Refusal
from flux_ref.formats.jsonl import ENDED, REACHED, outcome, records
from flux_ref.run.attempt import attempt
from flux_ref.run.options import Options

RECIPE = ("train.global_batch", "optim.lr", "optim.warmup_steps")  # a band has rows for each
# How fast losses fall depends on these, too. So they are equal in all runs of a band.
PATTERNS = ("model.*", "optim.*", "init.*", "data.kind", "train.caption_drop", "train.timestep*")
SAME = [key for key in config.TYPES if any(fnmatch(key, pattern) for pattern in PATTERNS) and key not in RECIPE]


def of_runs(folders: list[Path]) -> list[dict[str, object]]:
    """The rows of a band of your own runs. Raises: Refusal, for example for a run that has not come to its end."""
    curves: dict[tuple, list] = defaultdict(list)
    seen = set()
    first = None
    for folder in folders:
        if folder.resolve() in seen:
            raise Refusal(f"{folder} is given twice; a run counts once")
        seen.add(folder.resolve())
        cfg = of_run(folder)
        if outcome(folder) != (REACHED if cfg.eval.target else ENDED):
            goal = "its target" if cfg.eval.target else "train.max_samples"
            raise Refusal(f"{folder} has not reached {goal}; leave it out, because a band is made of whole runs")
        evaluations = records(folder / "eval.jsonl", figures=("val_loss",))
        if not evaluations:
            raise Refusal(f"{folder} has no eval.jsonl with an evaluation; leave it out")
        values = config.flat(cfg)
        first = first or values
        if differ := [f"{key}={values[key]!r}" for key in SAME if values[key] != first[key]]:
            raise Refusal(f"{folder} differs from {folders[0]} in {', '.join(differ)}; make a band of each")
        recipe = tuple(values[key] for key in RECIPE)
        curves[recipe].append([(record["samples"], record["val_loss"]) for record in evaluations])
    return [row for recipe, same in sorted(curves.items()) for row in quartile_rows(recipe, same)]


def quartile_rows(recipe: tuple, curves: list[list[tuple[float, float]]]) -> list[dict[str, object]]:
    """The rows of a band. recipe: global batch, learning rate, warm-up steps; curves: (samples, loss) of each run."""
    losses: dict[float, list[float]] = defaultdict(list)
    for curve in curves:
        for samples, loss in curve:
            losses[samples].append(loss)
    rows = []
    for samples, values in sorted(losses.items()):
        quartiles = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
        rows.append(dict(zip(HEADER, (*recipe, samples, len(values), min(values), *quartiles, max(values)))))
    return rows


def main(argv: list[str]) -> int:
    return attempt("report.band", lambda: write(argv))


def write(argv: list[str]) -> int:
    """Print the band of some runs as CSV. Raises: Refusal, before the first line is printed."""
    parser = Options("python -m tools.report.band", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    rows = of_runs(parser.parse_args(argv).runs)
    writer = csv.DictWriter(sys.stdout, HEADER, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    sys.stdout.flush()  # so that a full disk is reported here, in one line
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
