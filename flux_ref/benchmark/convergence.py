"""What is publicly known of how FLUX.1 converges: the reference's points, and the losses of published runs.

The points are those of mlperf-logging's own files, per ruleset. The losses (public_curves.csv) are quartiles of the
160 result files of MLPerf Training v5.1 (github.com/mlcommons/training_results_v5.1, Apache-2.0). Those runs validated
with captions dropped, so their losses lie above a correct run's by what `bias` returns.

    python -m flux_ref.benchmark.convergence RUN [RUN ...] > own.csv        a band of your own runs, for eval.band
"""

import bisect
import csv
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from mlperf_logging import rcp_checker

from flux_ref.config import Config, ModelConfig
from flux_ref.config_file import of_run
from flux_ref.errors import Refusal, attempt
from flux_ref.formats.jsonl import ENDED, REACHED, is_number, outcome, records

PUBLIC = Path(__file__).with_name("public_curves.csv")
TARGET = 0.586
UNBIASED = "6.0.0"  # the first ruleset whose points were taken without captions dropped in validation
HEADER = (
    *("global_batch", "lr", "warmup_steps", "samples", "runs"),
    *("val_loss_min", "val_loss_p25", "val_loss_median", "val_loss_p75", "val_loss_max"),
)
PUBLIC_LR = (1.85e-4, 2e-4)  # of the public runs, at every batch
LEEWAY = 1.5  # factor by which a learning rate may lie outside what has converged
# What a point must hold, and the rule in words. The official checker leaves out the fastest and the slowest run.
POINT = {
    "Benchmark": (lambda value: value == "flux1", "must be 'flux1'"),
    "BS": (lambda value: type(value) is int and 0 < value < 1e9, "must be a whole number above 0"),
    "samples to converge": (
        lambda value: isinstance(value, list) and len(value) >= 3 and all(is_number(own) and own > 0 for own in value),
        "must be a list of at least 3 finite numbers above 0",
    ),
    "opt_base_learning_rate": (lambda value: is_number(value) and value > 0, "must be a number above 0"),
    "opt_learning_rate_warmup_steps": (lambda value: is_number(value) and value >= 0, "must be a number of steps"),
}


@dataclass(frozen=True)
class Point:
    """One reference convergence point: what the reference needed to reach the target."""

    global_batch: int
    lr: float
    warmup_steps: int
    mean_samples: float  # of its runs, the fastest and the slowest left out


@dataclass(frozen=True)
class Band:
    """Validation losses of runs that converged, at ascending numbers of training samples."""

    source: str  # in words
    samples: tuple[int, ...]
    low: tuple[float, ...]
    median: tuple[float, ...]
    high: tuple[float, ...]
    spread: tuple[float, ...]  # third quartile minus first

    def at(self, samples: float, what: str) -> float:
        """One of its curves between its points, and its ends beyond them."""
        return interpolate(samples, self.samples, getattr(self, what))


def points(ruleset: str, file: Path | None = None) -> list[Point]:
    """The reference's points by ascending batch. file: own ones in the same format. Raises: Refusal."""
    path = file or Path(rcp_checker.__file__).parent / f"training_{ruleset}" / "rcps_flux1.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8")).items()
        found = sorted((_point(name, entry) for name, entry in entries), key=lambda point: point.global_batch)
        if not found:
            raise ValueError("it holds no point")
        return found
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(
            f"{path} is no file of reference convergence points ({type(error).__name__}: {error});"
            " it wants mlperf-logging's format, see its rcp_checker/training_6.0.0/rcps_flux1.json"
        ) from None


def _point(name: str, entry: dict) -> Point:
    values = entry | entry["Hyperparams"]
    for key, (holds, rule) in POINT.items():
        if not holds(values.get(key)):
            raise ValueError(f"{key!r} of {name!r} {rule}")
    kept = sorted(values["samples to converge"])[1:-1]
    knobs = (values["opt_base_learning_rate"], values["opt_learning_rate_warmup_steps"])
    return Point(values["BS"], *knobs, sum(kept) / len(kept))


def samples_to_target(ruleset: str, global_batch: int, file: Path | None = None) -> float | None:
    """Mean samples that the reference needs, between points by batch; None for a batch above all of them.

    As the official checker has it: points that only make convergence look slower than their neighbours do are left
    out, and a batch below all points is held to the smallest.
    Source: mlperf-logging, rcp_checker, _prune_rcps.
    """
    kept = prune(points(ruleset, file))
    if not kept or global_batch > kept[-1].global_batch:
        return None
    return interpolate(global_batch, [p.global_batch for p in kept], [p.mean_samples for p in kept])


def prune(found: list[Point]) -> list[Point]:
    """The points that the official checker goes by."""
    fastest = min(found, key=lambda point: point.mean_samples, default=None)
    kept = [point for point in found if point.global_batch >= fastest.global_batch]
    i = 1
    while i < len(kept) - 1:
        below, own, above = kept[i - 1 : i + 2]
        between = interpolate(
            own.global_batch, (below.global_batch, above.global_batch), (below.mean_samples, above.mean_samples)
        )
        if own.mean_samples > between:
            del kept[i]
        else:
            i += 1
    return kept


def interpolate(x: float, xs: Iterable[float], ys: Iterable[float]) -> float:
    """Straight lines between points, flat beyond their ends."""
    i = bisect.bisect_left(xs, x)
    if i == 0 or i == len(xs):
        return ys[min(i, len(ys) - 1)]
    share = (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    return ys[i - 1] + share * (ys[i] - ys[i - 1])


def public_band(global_batch: int) -> Band | None:
    """The public runs of a batch; between batches that have some, what lies between them; None outside."""
    return band(PUBLIC, global_batch, "public MLPerf v5.1 runs")


def band(path: Path, global_batch: int, source: str) -> Band | None:
    """The band of a batch in a file like public_curves.csv. Raises: Refusal."""
    rows = _rows(path)
    batches = sorted({int(row["global_batch"]) for row in rows})
    if not batches or not batches[0] <= global_batch <= batches[-1]:
        return None
    i = bisect.bisect_left(batches, global_batch)
    if batches[i] == global_batch:
        return pooled([row for row in rows if row["global_batch"] == global_batch], f"{source} at batch {global_batch}")
    ends = [pooled([row for row in rows if row["global_batch"] == batch], "") for batch in batches[i - 1 : i + 1]]
    share = math.log(global_batch / batches[i - 1]) / math.log(batches[i] / batches[i - 1])
    grid = [samples for samples in ends[1].samples if samples >= ends[0].samples[0]]
    curves = {
        what: tuple((1 - share) * ends[0].at(x, what) + share * ends[1].at(x, what) for x in grid)
        for what in ("low", "median", "high", "spread")
    }
    return Band(f"{source} between batches {batches[i - 1]} and {batches[i]}", tuple(grid), **curves)


def _rows(path: Path) -> list[dict[str, float]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [{name: float(row[name]) for name in HEADER} for row in csv.DictReader(file)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(
            f"{path} is no band ({type(error).__name__}: {error}); it wants the columns {', '.join(HEADER)}"
        ) from None


def pooled(rows: list[dict[str, float]], source: str) -> Band:
    """One band of all rows of a batch, whatever their learning rates."""
    at: dict[int, list[dict]] = {}
    for row in rows:
        at.setdefault(int(row["samples"]), []).append(row)

    def curve(combine: Callable[[list[dict]], float]) -> tuple[float, ...]:
        return tuple(combine(at[samples]) for samples in sorted(at))

    def mean(group: list[dict], name: str) -> float:
        return sum(row[name] * row["runs"] for row in group) / sum(row["runs"] for row in group)

    return Band(
        source,
        tuple(sorted(at)),
        low=curve(lambda group: min(row["val_loss_min"] for row in group)),
        median=curve(lambda group: mean(group, "val_loss_median")),
        high=curve(lambda group: max(row["val_loss_max"] for row in group)),
        spread=curve(lambda group: mean(group, "val_loss_p75") - mean(group, "val_loss_p25")),
    )


def of_config(cfg: Config) -> Band | None:
    """The band that eval.band names; None if there is none for this config. Raises: Refusal."""
    if cfg.eval.band == "public":
        return public_band(cfg.train.global_batch) if is_benchmark(cfg) else None
    return band(Path(cfg.eval.band), cfg.train.global_batch, cfg.eval.band) if cfg.eval.band else None


def bias_of_config(cfg: Config) -> float:
    """`bias` of the band of a config; NaN for a band of own runs."""
    return bias(cfg.train.global_batch) if cfg.eval.band == "public" else math.nan


def is_benchmark(cfg: Config) -> bool:
    """Whether public runs are of this model and target."""
    return cfg.model == ModelConfig() and cfg.eval.target == TARGET


def bias(global_batch: int) -> float:
    """How far the public band lies above runs that validate without dropping captions.

    Its median where the reference, which drops none, has reached the target. Rough: the reference's learning rate is
    not that of the public runs, and before its mean it is some other amount.
    """
    found, needed = public_band(global_batch), samples_to_target(UNBIASED, global_batch)
    return found.at(needed, "median") - TARGET if found and needed else math.nan


def unlike_reference(cfg: Config) -> list[str]:
    """What in a config of the benchmark's model differs from all that is known to converge; one line each."""
    if not is_benchmark(cfg):
        return []
    batch, lr, found = cfg.train.global_batch, cfg.optim.lr, points(cfg.mllog.ruleset)
    batches = [point.global_batch for point in found]
    complaints = []
    if batch > batches[-1]:
        complaints.append(
            f"train.global_batch={batch} is above the largest reference convergence point, {batches[-1]};"
            " a closed submission needs points of its own"
        )
    elif batch not in batches:
        near = min(batches, key=lambda other: abs(other - batch))
        complaints.append(
            f"train.global_batch={batch} is no reference convergence point (nearest {near}): learning rate and"
            " warm-up are yours to find"
        )
    reference = interpolate(batch, batches, [point.lr for point in found])
    least, most = min(*PUBLIC_LR, reference) / LEEWAY, max(*PUBLIC_LR, reference) * LEEWAY
    if not least <= lr <= most:
        complaints.append(
            f"optim.lr={lr:g}: runs are known to converge from {least * LEEWAY:g} to {most / LEEWAY:g} at this batch"
        )
    # In samples, as warm-ups of different batches compare.
    warmup = interpolate(batch, batches, [point.warmup_steps * point.global_batch for point in found]) / batch
    if lr > max(PUBLIC_LR) * 1.25 and cfg.optim.warmup_steps < warmup / 2:
        complaints.append(
            f"optim.warmup_steps={cfg.optim.warmup_steps}: the reference takes about {warmup:.0f} at this batch and a"
            f" learning rate above {max(PUBLIC_LR):g}"
        )
    longest = max(point.warmup_steps * point.global_batch for point in found) * 2 / batch
    if cfg.optim.warmup_steps > longest:
        complaints.append(
            f"optim.warmup_steps={cfg.optim.warmup_steps} is more than twice the reference's longest,"
            f" {longest / 2:.0f} steps of this batch"
        )
    return complaints


def of_runs(folders: list[Path]) -> list[dict[str, object]]:
    """The rows of a band of own runs, of which each has come to its end. Raises: Refusal."""
    curves: dict[tuple, list] = {}
    for i, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:i]]:
            raise Refusal(f"{folder} is given twice; a run counts once")
        cfg = of_run(folder)
        key = (cfg.train.global_batch, cfg.optim.lr, cfg.optim.warmup_steps)
        if outcome(folder) != (REACHED if cfg.eval.target else ENDED):
            raise Refusal(
                f"{folder} has not reached {'its target' if cfg.eval.target else 'train.max_samples'}; a band is made"
                " of runs that reached their target or, if eval.target=0, train.max_samples: leave it out"
            )
        evaluations = records(folder / "eval.jsonl", figures=("val_loss",))
        if not evaluations:
            raise Refusal(f"{folder} has no eval.jsonl with an evaluation; leave it out")
        curves.setdefault(key, []).append([(record["samples"], record["val_loss"]) for record in evaluations])
    return [row for key, own in sorted(curves.items()) for row in quartile_rows(key, own)]


def quartile_rows(recipe: tuple, curves: list[list[tuple[float, float]]]) -> list[dict[str, object]]:
    """The rows of a band. recipe: global batch, learning rate, warm-up steps; curves: (samples, loss) of each run."""
    losses: dict[float, list[float]] = {}
    for samples, loss in chain.from_iterable(curves):
        losses.setdefault(samples, []).append(loss)
    rows = []
    for samples, own in sorted(losses.items()):
        first, median, third = statistics.quantiles(own, n=4, method="inclusive") if len(own) > 1 else own * 3
        rows.append(dict(zip(HEADER, (*recipe, samples, len(own), min(own), first, median, third, max(own)))))
    return rows


def main(argv: list[str]) -> int:
    if "-h" in argv or "--help" in argv:
        print(__doc__)
        return 0
    return attempt("convergence", lambda: write(argv))


def write(names: list[str]) -> int:
    if not names or "" in names:
        raise Refusal("an empty name is no run" if names else "give run folders, such as runs/tiny; see --help")
    rows = of_runs([Path(name) for name in names])  # before the first line, so that a refused band is no file
    writer = csv.DictWriter(sys.stdout, HEADER, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    sys.stdout.flush()  # here a full disk is one line
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
