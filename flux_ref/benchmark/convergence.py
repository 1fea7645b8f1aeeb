"""The validation losses of published runs, and the warning that a run lies above them.

public_curves.csv holds the lowest, median and highest loss of the 160 result files of MLPerf Training v5.1
(github.com/mlcommons/training_results_v5.1, Apache-2.0). Those runs validated with captions dropped, which raises a
loss by about 0.001.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flux_ref.config import Config, EvalConfig, ModelConfig

PUBLIC = Path(__file__).with_name("public_curves.csv")
# A run is above the band if two losses in a row exceed the highest by more than this share. One of 150 public runs is
# above the band of the other systems' runs.
MARGIN = 0.01


class Point(NamedTuple):
    """Validation losses of runs that converged, after so many training samples."""

    samples: float
    low: float
    median: float
    high: float


def public_band(global_batch: int) -> list[Point]:
    """The public runs of a batch by ascending samples; empty for a batch that no system has submitted."""
    with PUBLIC.open() as file:
        rows = [row for row in csv.DictReader(file) if row["global_batch"] == str(global_batch)]
    return [Point(*(float(row[name]) for name in Point._fields)) for row in rows]


def is_benchmark(cfg: Config) -> bool:
    """Whether a config trains the model of the public runs to their target."""
    return cfg.model == ModelConfig() and cfg.eval.target == EvalConfig.target


def warning(cfg: Config, curve: Sequence[tuple[float, float]]) -> str:
    """One line if the last two of a run's (training samples, loss) lie above the band, else ""."""
    band = public_band(cfg.train.global_batch) if cfg.eval.band and is_benchmark(cfg) else []
    if len(curve) < 2 or not band:
        return ""
    grid, _, _, high = zip(*band)
    for samples, loss in curve[-2:]:
        most = np.interp(samples, grid, high, left=np.inf)
        if loss <= (1 + MARGIN) * most:
            return ""
    return (
        f"warning: validation loss {loss:.4f}; public v5.1 runs of this batch had at most {most:.4f} here:"
        " check learning rate, warm-up, data and their scale"
    )
