"""What the closed division fixes: each departure disqualifies in the log, on the terminal and for `report`."""

import math
import re

import made_logs
from compliance import RULESETS
from conftest import ROOT
from other_values import with_another

from flux_ref import config, config_file, mlperf_closed
from flux_ref.config import MllogConfig
from tools.report import score

SIZES = made_logs.SIZES
SMALL = {"train_samples": 512, "val_samples": 8}
CONFIGS = {path.stem: path for path in (ROOT / "configs").glob("*.toml")}
SMOKE = CONFIGS["closed_smoke"]
POINTS = SMOKE.with_name("closed_smoke_points.json")


def load(path, *overrides):
    return config_file.load(path, [f"--{override}" for override in overrides])


def stripped(path, *keys):
    """Take out entries, and let the run have succeeded."""
    lines = [line for line in path.read_text().splitlines() if not any(f'"key": "{key}"' in line for key in keys)]
    path.write_text("\n".join(lines).replace('"aborted"', '"success"') + "\n")


def faults(path, ruleset=MllogConfig.ruleset):
    """What `report` and the official compliance checker say against a log."""
    (run,) = score.judge("log", [path], ruleset).runs
    return run.faults


def test_each_departure_alone_disqualifies(tmp_path):
    """Without the entries `disqualified`, the logged values still speak, to `report` or to the official checker."""
    plain = load(CONFIGS["schnell_gbs512"])
    cases = {key: (with_another(plain, key), SIZES) for key, known in config.KEYS.items() if known.closed}
    cases |= {
        "train_samples": (plain, SIZES | {"train_samples": 512}),
        "val_samples": (plain, SIZES | {"val_samples": 8}),
    }
    assert {*cases, mlperf_closed.VAL_PRECISION} == {*mlperf_closed.FIXED}, "every compute of ours may validate"
    path = tmp_path / "result_0.txt"
    for key, (cfg, sizes) in cases.items():
        path.unlink(missing_ok=True)
        flaw = made_logs.ours(path, cfg, sizes=sizes)
        stop = path.read_text().splitlines()[-1]
        for text in (flaw, mlperf_closed.verdict(cfg, sizes), " ".join(faults(path)), stop):
            assert re.search(f"{key}=[^;]+, MLPerf fixes ", text), (key, text)
        assert '"status": "aborted"' in stop, key
        stripped(path, "disqualified")
        name = {"eval.every_samples": "evaluation_frequency", "data.drop_page_cache": "cache_clear"}.get(
            key, key.split(".")[-1]
        )
        name = re.sub("beta(.)", r"beta_\1", name).replace("optim.eps", "optim.epsilon")
        (found,) = faults(path)
        assert name in found, (key, found)


def test_the_benchmarks_configs_depart_in_nothing_and_the_open_division_is_left_alone(tmp_path):
    for name, path in CONFIGS.items():
        if name.startswith(("schnell", "mi3")):
            assert mlperf_closed.verdict(load(path), SIZES) == "", name
    free = ("train.seed=3", "optim.lr=1e-3", "optim.warmup_steps=9", "train.global_batch=1024", "precision.preset=fp8")
    free += ("eval.at_start=true", "parallel.reduce_dtype=bf16", "pictures.count=4")
    assert mlperf_closed.departures(load(CONFIGS["schnell_gbs512"], *free), SIZES) == []
    assert mlperf_closed.verdict(load(CONFIGS["tiny"]), SMALL) == "no benchmark result: the data set is a toy"
    line = mlperf_closed.verdict(load(CONFIGS["tiny"], "data.kind=embeddings"), SMALL)
    assert line.startswith("no benchmark result: model.hidden=128, MLPerf fixes 3072; ") and len(line) < 350
    opened = load(SMOKE, "mllog.submission_division=open", "mllog.rehearsal=false", "eval.target=0.9")
    assert made_logs.ours(tmp_path / "log", opened, sizes=SMALL) == "" and mlperf_closed.verdict(opened, SMALL) == ""
    given = config_file.replace(opened, init__weights="some")
    assert mlperf_closed.departures(given, SMALL) == ["init.weights='some', MLPerf fixes ''"]


def test_a_rehearsal_passes_all_checks_and_is_no_result(tmp_path):
    """Its model and its data may be smaller, and nothing else."""
    cfg, sizes = load(SMOKE), SIZES | {"train_samples": 16_384}
    assert mlperf_closed.verdict(cfg, sizes) == "rehearsal: no benchmark result"
    assert made_logs.ours(tmp_path / "log", cfg, (0.34,), sizes) == mlperf_closed.REHEARSAL
    assert {ruleset: faults(tmp_path / "log", ruleset) for ruleset in RULESETS} == {key: [] for key in RULESETS}
    paths = [tmp_path / f"result_{i}.txt" for i in range(10)]
    for i, path in enumerate(paths):
        path.write_text(re.sub(r'("key": "seed", "value": )\d+', rf"\g<1>{i}", (tmp_path / "log").read_text()))
    for points in (None, POINTS):
        system = score.judge("ten", paths, MllogConfig.ruleset, points)
        assert system.verdict == "passes the checks as a rehearsal: no benchmark result"
        assert math.isnan(system.score_minutes) and bool(points) == bool(system.convergence.passed)
