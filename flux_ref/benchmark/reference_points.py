"""Reference convergence points: how many samples the reference needs to reach the target, by global batch.

The points are in mlperf-logging's own files, one for each ruleset.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mlperf_logging import rcp_checker


@dataclass(frozen=True)
class Point:
    """One reference convergence point: what the reference needed to reach the target."""

    global_batch: int
    lr: float
    warmup_steps: int
    mean_samples: float  # over its runs, without the fastest and the slowest


def points(ruleset: str) -> list[Point]:
    """The reference's points by ascending batch."""
    path = Path(rcp_checker.__file__).parent / f"training_{ruleset}" / "rcps_flux1.json"
    found = []
    for entry in json.loads(path.read_text(encoding="utf-8")).values():
        kept, knobs = sorted(entry["samples to converge"])[1:-1], entry["Hyperparams"]
        recipe = knobs["opt_base_learning_rate"], knobs["opt_learning_rate_warmup_steps"]
        found.append(Point(entry["BS"], *recipe, sum(kept) / len(kept)))
    return sorted(found, key=lambda point: point.global_batch)


def samples_to_target(ruleset: str, global_batch: int) -> float | None:
    """Mean samples that the reference needs, interpolated by batch; None for a batch above all points.

    A batch below all points gets the value of the smallest, as in the official checker.
    """
    kept = prune(points(ruleset))
    if global_batch > kept[-1].global_batch:
        return None
    return float(np.interp(global_batch, [p.global_batch for p in kept], [p.mean_samples for p in kept]))


def prune(all_points: list[Point]) -> list[Point]:
    """The points that the official checker uses: without those that converge more slowly than their neighbours suggest.

    Source: mlperf-logging, rcp_checker, _prune_rcps.
    """
    fastest = min(all_points, key=lambda point: point.mean_samples)
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
