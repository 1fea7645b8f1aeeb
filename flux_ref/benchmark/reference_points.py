"""Reference convergence points: how many samples the reference needs to reach the target, by global batch.

The points are in mlperf-logging's own files, one for each ruleset.
"""

import json
from dataclasses import dataclass
from pathlib import Path

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
        kept = sorted(entry["samples to converge"])[1:-1]
        knobs = entry["Hyperparams"]
        recipe = knobs["opt_base_learning_rate"], knobs["opt_learning_rate_warmup_steps"]
        found.append(Point(entry["BS"], *recipe, sum(kept) / len(kept)))
    return sorted(found, key=lambda point: point.global_batch)
