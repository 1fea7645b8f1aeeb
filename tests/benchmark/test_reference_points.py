"""Reference convergence points: those of the official checker."""

import pytest
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

from flux_ref.benchmark import reference_points


def test_points_and_what_lies_between_are_the_official_checkers():
    for ruleset in ("5.1.0", "6.0.0", "6.1.0"):
        official = RCP_Checker("training", ruleset, "flux1", False)
        assert {p.global_batch: p.mean_samples for p in reference_points.points(ruleset)} == {
            record["BS"]: record["RCP Mean"] for record in official.rcp_data.values()
        }
        pruned = {record["BS"]: record for record in official.pruned_rcp_data.values()}
        assert {p.global_batch for p in reference_points.prune(reference_points.points(ruleset))} == set(pruned)
        for batch in (512, 600, 1024, 1536, 2048, 2304, 3000, 4096):
            low = official._find_top_min_rcp(batch, "pruned_rcps")
            high = official._find_bottom_max_rcp(batch, "pruned_rcps")
            record = pruned.get(batch) or official._create_interp_rcp(batch, low, high)[1]
            assert reference_points.samples_to_target(ruleset, batch) == pytest.approx(record["RCP Mean"]), (
                ruleset,
                batch,
            )
        assert reference_points.samples_to_target(ruleset, 256) == reference_points.samples_to_target(ruleset, 512)
        assert reference_points.samples_to_target(ruleset, 4097) is None
