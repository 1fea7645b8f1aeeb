"""The benchmark log: keys, order and values per ruleset, judged by mlperf-logging's own checker."""

import json

import pytest
from compliance import RULESETS, check
from conftest import ROOT

from flux_ref import config_file
from flux_ref.benchmark.mllog import BenchmarkLog


def write_log(path, cfg, loss=0.58, success=True):
    """A log as a run of two evaluations writes it."""
    log = BenchmarkLog(path)
    log.cache_clear()
    log.init_start()
    log.describe(cfg, world_size=8, train_count=1_099_776, val_count=29_696)
    log.run_start()
    samples = 0
    for value in (0.7, loss):
        log.block_start(samples)
        samples += 262_656
        log.eval_start(samples)
        log.eval_stop(samples, value)
    log.run_stop(samples, success, "target reached")
    log.close()
    prefix = ":::MLLOG "
    return [json.loads(line.removeprefix(prefix)) for line in path.read_text().splitlines() if line.startswith(prefix)]


@pytest.fixture
def cfg():
    # 2,304 does not divide 262,144: the interval is 114 steps, 262,656 samples.
    return config_file.load(ROOT / "configs" / "schnell_gbs512.toml", ["--train.global_batch=2304", "--train.seed=7"])


@pytest.mark.parametrize("ruleset", RULESETS)
def test_official_checker_accepts_the_log(tmp_path, cfg, ruleset):
    write_log(tmp_path / "result_0.txt", config_file.replace(cfg, mllog__ruleset=ruleset))
    accepted, output = check(tmp_path / "result_0.txt", ruleset)
    assert accepted, output


def test_official_checker_refuses_a_run_that_missed_the_target(tmp_path, cfg):
    write_log(tmp_path / "result_0.txt", cfg, loss=0.6)
    assert not check(tmp_path / "result_0.txt", "6.0.0")[0]


def test_evaluation_frequency_follows_the_ruleset(tmp_path, cfg):
    """6.1.0 asks for the interval rounded up to steps, earlier rulesets for 262,144."""
    found = {}
    for ruleset in RULESETS:
        events = write_log(tmp_path / ruleset, config_file.replace(cfg, mllog__ruleset=ruleset))
        keys = [event["key"] for event in events]
        assert keys.index("global_batch_size") < keys.index("evaluation_frequency")
        found[ruleset] = events[keys.index("evaluation_frequency")]["value"]
    assert found == {"5.1.0": 262_144, "6.0.0": 262_144, "6.1.0": 262_656}


def test_values_are_the_configs(tmp_path, cfg):
    """Nothing is hard-coded; the seed is a number and logged once."""
    events = write_log(tmp_path / "log", config_file.replace(cfg, mllog__submission_org="Some Org"))
    values = {event["key"]: event["value"] for event in events}
    assert values["seed"] == 7 and [event["key"] for event in events].count("seed") == 1
    assert values["submission_org"] == "Some Org"
    assert values["gradient_accumulation_steps"] == 2304 // 8 // 8
    assert values["opt_base_learning_rate"] == cfg.optim.lr
    assert values["opt_learning_rate_warmup_steps"] == cfg.optim.warmup_steps


@pytest.mark.parametrize("compute, reduce, comm", [("fp32", "bf16", "bfloat16"), ("fp32", "fp32", "fp32")])
def test_lowest_precisions_are_the_ones_in_use(tmp_path, cfg, compute, reduce, comm):
    own = config_file.replace(cfg, parallel__dtype=compute, parallel__reduce_dtype=reduce)
    values = {event["key"]: event["value"] for event in write_log(tmp_path / "log", own)}
    assert values["lowest_numerical_precision_in_linear"] == "fp32"
    assert values["lowest_numerical_precision_in_comm"] == comm


def test_linears_in_fp8_are_disclosed(tmp_path, cfg):
    own = config_file.replace(cfg, fp8__recipe="delayed", mllog__ruleset="6.1.0")
    values = {event["key"]: event["value"] for event in write_log(tmp_path / "result_0.txt", own)}
    assert values["lowest_numerical_precision_in_linear"] == "fp8"
    assert values["lowest_numerical_precision_in_attn"] == "bfloat16"
    assert check(tmp_path / "result_0.txt", "6.1.0")[0]


def test_order_and_outcome(tmp_path, cfg):
    """Init before run, blocks and evaluations alternate, status and reason at the end."""
    events = write_log(tmp_path / "log", cfg, success=False)
    keys = [event["key"] for event in events]
    landmarks = ["cache_clear", "init_start", "submission_benchmark", "seed", "init_stop", "run_start"]
    rest = ["block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop"] * 2 + ["run_stop"]
    assert [key for key in keys if key in landmarks + rest] == landmarks + rest
    assert events[-1]["metadata"]["status"] == "aborted" and events[-1]["metadata"]["reason"]
    assert all(event["metadata"]["samples_count"] >= 0 for event in events[keys.index("block_start") :])


def test_metadata_holds_no_word_that_the_convergence_checker_searches_for(tmp_path, cfg):
    """It finds lines by substring: such a word in another line's metadata would break it."""
    for event in write_log(tmp_path / "log", cfg):
        text = json.dumps(event["metadata"])
        assert not any(word in text for word in ("eval_accuracy", "global_batch_size", "train_samples"))


def test_other_ranks_write_nothing(tmp_path, cfg):
    log = BenchmarkLog(None)
    log.init_start()
    log.describe(cfg, 8, 1, 1)
    log.text("a line")
    log.close()
    assert not list(tmp_path.iterdir())
