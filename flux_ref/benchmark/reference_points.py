"""Reference convergence points: how many samples the reference needs to reach the target, by global batch.

The points are in mlperf-logging's own files, one for each ruleset.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mlperf_logging import rcp_checker

from flux_ref.errors import Refusal
from flux_ref.formats.jsonl import is_number

# What a point must hold, and the rule in words. The official checker leaves out the fastest and the slowest run.
POINT = {
    "Benchmark": (lambda value: value == "flux1", "must be 'flux1'"),
    "BS": (lambda value: type(value) is int and 0 < value < 1e9, "must be a whole number above 0"),
    "samples to converge": (
        lambda values: isinstance(values, list) and len(values) >= 3 and all(is_number(x) and x > 0 for x in values),
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
    mean_samples: float  # over its runs, without the fastest and the slowest


def points(ruleset: str, file: Path | None = None) -> list[Point]:
    """The reference's points by ascending batch. file: your own points in the same format. Raises: Refusal."""
    path = file or Path(rcp_checker.__file__).parent / f"training_{ruleset}" / "rcps_flux1.json"
    try:
        entries = json.loads(path.read_text(encoding="utf-8")).items()
        if not entries:
            raise ValueError("it holds no point")
        return sorted((_point(name, entry) for name, entry in entries), key=lambda point: point.global_batch)
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
    _, batch, samples, lr, warmup_steps = (values[key] for key in POINT)
    kept = sorted(samples)[1:-1]
    return Point(batch, lr, warmup_steps, sum(kept) / len(kept))


def samples_to_target(ruleset: str, global_batch: int, file: Path | None = None) -> float | None:
    """Mean samples that the reference needs, interpolated by batch; None for a batch above all points.

    A batch below all points gets the value of the smallest, as in the official checker.
    """
    kept = prune(points(ruleset, file))
    if not kept or global_batch > kept[-1].global_batch:
        return None
    return float(np.interp(global_batch, [p.global_batch for p in kept], [p.mean_samples for p in kept]))


def prune(all_points: list[Point]) -> list[Point]:
    """The points that the official checker uses: without those that converge more slowly than their neighbours suggest.

    Source: mlperf-logging, rcp_checker, _prune_rcps.
    """
    fastest = min(all_points, key=lambda point: point.mean_samples, default=None)
    kept = [point for point in all_points if point.global_batch >= fastest.global_batch]
    i = 1
    while i < len(kept) - 1:
        ends = (kept[i - 1], kept[i + 1])
        between = np.interp(kept[i].global_batch, [p.global_batch for p in ends], [p.mean_samples for p in ends])
        if kept[i].mean_samples > between:
            del kept[i]
        else:
            i += 1
    return kept
