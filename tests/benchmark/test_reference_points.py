"""Reference convergence points, and what lies between them: those of the official checker."""

import pytest
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

from flux_ref import config_file
from flux_ref.config import Config
from tools.shared import reference_samples


def samples_at(ruleset: str, batch: int) -> float | None:
    cfg = config_file.replace(Config(), mllog__ruleset=ruleset, train__global_batch=batch)
    return reference_samples.samples_to_target(cfg)


def test_points_and_what_lies_between_are_the_official_checkers():
    for ruleset in ("5.1.0", "6.0.0", "6.1.0"):
        official, points = RCP_Checker("training", ruleset, "flux1", False), reference_samples.points(ruleset)
        means = {record["BS"]: record["RCP Mean"] for record in official.rcp_data.values()}
        assert {point.global_batch: point.mean_samples for point in points} == means
        pruned = {record["BS"]: record for record in official.pruned_rcp_data.values()}
        assert {point.global_batch for point in reference_samples.prune(points)} == set(pruned)
        for batch in (512, 600, 1024, 1536, 2048, 2304, 3000, 4096):
            low = official._find_top_min_rcp(batch, "pruned_rcps")
            high = official._find_bottom_max_rcp(batch, "pruned_rcps")
            record = pruned.get(batch) or official._create_interp_rcp(batch, low, high)[1]
            assert samples_at(ruleset, batch) == pytest.approx(record["RCP Mean"]), (ruleset, batch)
        assert samples_at(ruleset, 256) == samples_at(ruleset, 512) and samples_at(ruleset, 4097) is None
    assert reference_samples.samples_to_target(config_file.replace(Config(), eval__target=0.6)) is None
