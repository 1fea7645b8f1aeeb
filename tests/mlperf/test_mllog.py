"""The benchmark log: keys, order and values per ruleset, judged by mlperf-logging's own checker."""

import json
from itertools import product

import made_logs
import pytest
from compliance import DIVISIONS, RULESETS, check
from conftest import ROOT

from flux_ref import config_file

PREFIX = ":::MLLOG "


def write_log(path, cfg, loss=0.58, success=True):
    """The events of a log as a run of two evaluations writes it."""
    path.unlink(missing_ok=True)
    made_logs.ours(path, cfg, (0.7, loss), success=success)
    return [json.loads(line.removeprefix(PREFIX)) for line in path.read_text().splitlines()]


@pytest.fixture
def cfg():
    # 2,304 does not divide 262,144: the interval is 114 steps, 262,656 samples.
    return config_file.load(ROOT / "configs" / "schnell_gbs512.toml", ["--train.global_batch=2304", "--train.seed=7"])


def values_of(events):
    return {event["key"]: event["value"] for event in events}


def test_official_checker_accepts_the_log_of_every_ruleset_and_division_at_the_target_only(tmp_path, cfg):
    """6.1.0 asks for the evaluation interval rounded up to steps, earlier rulesets for 262,144 samples."""
    path = tmp_path / "result_0.txt"
    for ruleset, division, loss in product(RULESETS, DIVISIONS, (0.58, 0.6)):
        own = config_file.replace(cfg, mllog__ruleset=ruleset, mllog__submission_division=division)
        events = write_log(path, own, loss)
        keys = [event["key"] for event in events]
        assert keys.index("global_batch_size") < keys.index("evaluation_frequency")
        assert values_of(events)["evaluation_frequency"] == (262_656 if ruleset == "6.1.0" else 262_144)
        losses = [event["value"] for event in events if event["key"] == "averaged_validation_loss"]
        assert losses == ([0.7, loss] if division == "open" else [])
        accepted, complaints = check(path, ruleset)
        assert accepted == (loss == 0.58), (ruleset, division, loss, complaints)


def test_lowest_precisions_are_the_ones_in_use(tmp_path, cfg):
    """Each case: values of the config; precision in linears, attention and communication. FP8 is disclosed."""
    for changes, want in (
        ({"compute__dtype": "fp32", "parallel__reduce_dtype": "bf16"}, ["fp32", "fp32", "bfloat16"]),
        ({"compute__dtype": "fp32", "parallel__reduce_dtype": "fp32"}, ["fp32", "fp32", "fp32"]),
        ({"precision__preset": "fp8_delayed"}, ["fp8", "bfloat16", "bfloat16"]),
    ):
        values = values_of(write_log(tmp_path / "log", config_file.replace(cfg, **changes)))
        assert [values[f"lowest_numerical_precision_in_{part}"] for part in ("linear", "attn", "comm")] == want


def test_a_run_without_the_target_is_aborted_and_no_word_misleads_the_official_checker(tmp_path, cfg):
    """The convergence checker finds lines by substring. The sample of a log proves the order and the values."""
    events = write_log(tmp_path / "log", cfg, success=False)
    assert events[-1]["metadata"]["status"] == "aborted" and events[-1]["metadata"]["reason"]
    words = ("eval_accuracy", "global_batch_size", "train_samples")
    assert not [event for event in events for word in words if word in json.dumps(event["metadata"])]
    assert values_of(events)["gradient_accumulation_steps"] == 18
