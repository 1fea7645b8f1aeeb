"""Reference convergence points: those of the official checker, and refused files."""

import json
import math

import pytest
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

from flux_ref.benchmark import reference_points
from flux_ref.benchmark.reference_points import Point
from flux_ref.errors import Refusal


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


def test_own_points(tmp_path):
    own = tmp_path / "points.json"
    knobs = {"opt_base_learning_rate": 1e-3, "opt_learning_rate_warmup_steps": 5}
    entry = {"Benchmark": "flux1", "BS": 96, "Hyperparams": knobs, "samples to converge": [40, 10, 20, 30]}
    own.write_text(json.dumps({"a": entry}))
    assert reference_points.points("6.0.0", own) == [Point(96, 1e-3, 5, 25.0)]
    for text in ("", "[1]", "{", '{"a": {"BS": 96}}', '{"a": 3}', "{}", "[" * 100_000, "\0"):
        own.write_text(text)
        with pytest.raises(Refusal, match=r"points.json is no file of reference convergence points"):
            reference_points.points("6.0.0", own)


BAD_VALUES = {
    "Benchmark": (None, "bert", 3),
    "BS": (None, "abc", 0, -512, 512.5, True, 10**400),
    "samples to converge": (None, [], [1, 2], [1, 2, math.nan], [1, 2, math.inf], [0, 1, 2], ["a"] * 3, 3),
    "opt_base_learning_rate": (None, 0, "1e-3", math.nan),
    "opt_learning_rate_warmup_steps": (None, -1, [], math.nan),
}


def test_a_bad_point_is_refused_by_its_key(tmp_path):
    path = tmp_path / "points.json"
    knobs = {"opt_base_learning_rate": 1e-3, "opt_learning_rate_warmup_steps": 5}
    for key, values in BAD_VALUES.items():
        for value in values:
            entry = {"Benchmark": "flux1", "BS": 96, "Hyperparams": dict(knobs), "samples to converge": [10, 20, 30]}
            (entry["Hyperparams"] if key in knobs else entry)[key] = value
            path.write_text(json.dumps({"mine": entry}))
            with pytest.raises(Refusal, match=rf"points.json is no file.*'{key}' of 'mine' must be"):
                reference_points.points("6.0.0", path)
