"""What lies between the reference convergence points: as the official checker interpolates it."""

import pytest
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

from flux_ref import config_file
from flux_ref.config import Config
from tools.plan.plan import samples_to_target


def test_samples_to_the_target_are_the_official_checkers():
    for ruleset in ("5.1.0", "6.0.0", "6.1.0"):
        official = RCP_Checker("training", ruleset, "flux1", False)
        known = {record["BS"]: record for record in official.pruned_rcp_data.values()}
        cfg = config_file.replace(Config(), mllog__ruleset=ruleset)
        found = {
            n: samples_to_target(config_file.replace(cfg, train__global_batch=n)) for n in (256, *known, 700, 4097)
        }
        between = official._create_interp_rcp(700, known[512], known[min(n for n in known if n > 700)])[1]
        want = {n: record["RCP Mean"] for n, record in known.items()}
        assert found == pytest.approx(want | {256: want[512], 700: between["RCP Mean"], 4097: 0}), ruleset
    assert samples_to_target(config_file.replace(Config(), eval__target=0.6)) == 0
