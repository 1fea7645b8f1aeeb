"""How many training samples the reference needs to the target, by the points of the official convergence checker."""

from functools import cache

import numpy as np
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

from flux_ref.config import Config
from flux_ref.mlperf_closed import is_benchmark


def samples_to_target(cfg: Config) -> float | None:
    """Mean samples at the config's batch; None for a batch above all points, and for another model or target.

    A batch below all points gets the value of the smallest, as in the official checker.
    """
    if not is_benchmark(cfg):
        return None
    batches, means = zip(*_points(cfg.mllog.ruleset))
    return float(np.interp(cfg.train.global_batch, batches, means)) if cfg.train.global_batch <= batches[-1] else None


@cache
def _points(ruleset: str) -> list[tuple[int, float]]:
    """(batch, mean samples) by ascending batch, without points that converge more slowly than their neighbours."""
    pruned = RCP_Checker("training", ruleset, "flux1", verbose=False).pruned_rcp_data
    return sorted((point["BS"], point["RCP Mean"]) for point in pruned.values())
