"""How many training samples the reference needs to the target, as the official convergence checker interpolates it.

The reference convergence points are in mlperf-logging's own files, one for each ruleset.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mlperf_logging import rcp_checker

from flux_ref.benchmark.convergence import is_benchmark
from flux_ref.config import Config


@dataclass(frozen=True)
class Point:
    """One reference convergence point: what the reference needed to reach the target."""

    global_batch: int
    mean_samples: float  # over its runs, without the fastest and the slowest


def points(ruleset: str) -> list[Point]:
    """The reference's points by ascending batch."""
    path = Path(rcp_checker.__file__).parent / f"training_{ruleset}" / "rcps_flux1.json"
    found = []
    for entry in json.loads(path.read_text(encoding="utf-8")).values():
        kept = sorted(entry["samples to converge"])[1:-1]
        found.append(Point(entry["BS"], sum(kept) / len(kept)))
    return sorted(found, key=lambda point: point.global_batch)


def samples_to_target(cfg: Config) -> float | None:
    """Mean samples at the config's batch; None for a batch above all points, and for another model or target.

    A batch below all points gets the value of the smallest, as in the official checker.
    """
    if not is_benchmark(cfg):
        return None
    kept = prune(points(cfg.mllog.ruleset))
    batches = [point.global_batch for point in kept]
    if cfg.train.global_batch > batches[-1]:
        return None
    return float(np.interp(cfg.train.global_batch, batches, [point.mean_samples for point in kept]))


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
