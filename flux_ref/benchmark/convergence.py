"""Bands of validation losses, of published runs and of your own.

public_curves.csv holds quartiles of the losses in the 160 result files of MLPerf Training v5.1
(github.com/mlcommons/training_results_v5.1, Apache-2.0). Those runs validated with captions dropped, which raises a
loss by about 0.001.
"""

import csv
import io
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flux_ref.benchmark.facts import TARGET
from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Refusal
from flux_ref.formats.outside import decimal, read_text, shown

PUBLIC = Path(__file__).with_name("public_curves.csv")
QUARTILES = ("val_loss_p25", "val_loss_median", "val_loss_p75")
HEADER = ("global_batch", "lr", "warmup_steps", "samples", "runs", "val_loss_min", *QUARTILES, "val_loss_max")
AT_LEAST_SOME = ("global_batch", "runs", *QUARTILES, "val_loss_min", "val_loss_max")  # are above zero
CURVES = ("low", "median", "high", "spread")


@dataclass(frozen=True)
class Band:
    """Validation losses of runs that converged, at ascending numbers of training samples."""

    source: str  # in words
    samples: tuple[int, ...]
    low: tuple[float, ...]
    median: tuple[float, ...]
    high: tuple[float, ...]
    spread: tuple[float, ...]  # third quartile minus first

    def at(self, samples: float, curve: str) -> float:
        """The value of one of CURVES: on straight lines between its points, constant beyond its ends."""
        return float(np.interp(samples, self.samples, getattr(self, curve)))


def public_band(global_batch: int) -> Band | None:
    """The public runs of a batch, interpolated between two batches; None outside all batches."""
    return band(PUBLIC, global_batch, "public MLPerf v5.1 runs")


def band(path: Path, global_batch: int, source: str) -> Band | None:
    """The band of a batch in a file like public_curves.csv. Raises: Refusal."""
    by_batch: dict[float, list[dict]] = defaultdict(list)
    for row in _rows(path):
        by_batch[row["global_batch"]].append(row)
    below = max((batch for batch in by_batch if batch <= global_batch), default=0)
    above = min((batch for batch in by_batch if batch >= global_batch), default=0)
    if not below or not above:
        return None
    if below == above:
        return pooled(by_batch[below], f"{source} at batch {global_batch}")
    low = pooled(by_batch[below], "")
    high = pooled(by_batch[above], "")
    share = math.log(global_batch / below) / math.log(above / below)
    grid = [samples for samples in high.samples if samples >= low.samples[0]]
    if not grid:
        raise Refusal(f"{path}: bands of batch {below:.0f} and {above:.0f} share no samples; set eval.band to another")
    curves = [tuple((1 - share) * low.at(x, name) + share * high.at(x, name) for x in grid) for name in CURVES]
    return Band(f"{source} between batches {below:.0f} and {above:.0f}", tuple(grid), *curves)


def _rows(path: Path) -> list[dict[str, float]]:
    text = read_text(path, "band")
    try:
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    except csv.Error as error:
        raise Refusal(f"{path} is no band ({error}); it wants the columns {', '.join(HEADER)}") from None
    for number, row in enumerate(rows, 1):
        for name in HEADER:
            value = decimal(row.get(name) or "", 1e-12 if name in AT_LEAST_SOME else 0, 1e15)
            if value is None:
                what = f"{name}={shown(row.get(name))} in row {number}"
                raise Refusal(f"{path} is no band ({what}); it wants numbers for {', '.join(HEADER)}")
            row[name] = value
    return rows


def pooled(rows: list[dict[str, float]], source: str) -> Band:
    """One band of all rows of a batch, whatever their learning rates."""
    at: dict[int, list[dict]] = defaultdict(list)
    for row in rows:
        at[int(row["samples"])].append(row)
    points = []
    for samples, same in sorted(at.items()):
        runs = sum(row["runs"] for row in same)
        p25, median, p75 = (sum(row[name] * row["runs"] for row in same) / runs for name in QUARTILES)
        ends = min(row["val_loss_min"] for row in same), max(row["val_loss_max"] for row in same)
        points.append((samples, ends[0], median, ends[1], p75 - p25))
    return Band(source, *zip(*points))


def of_config(cfg: Config) -> Band | None:
    """The band that eval.band names; None if there is none for this config. Raises: Refusal."""
    if cfg.eval.band == "public":
        return public_band(cfg.train.global_batch) if is_benchmark(cfg) else None
    if not cfg.eval.band:
        return None
    batch = cfg.train.global_batch
    found = band(Path(cfg.eval.band), batch, cfg.eval.band)
    if found is None:
        raise Refusal(
            f"eval.band={cfg.eval.band} has no runs of batch {batch} or of batches on both sides; set another"
        )
    return found


def is_benchmark(cfg: Config) -> bool:
    """Whether a config trains the model of the public runs to their target."""
    return cfg.model == ModelConfig() and cfg.eval.target == TARGET
