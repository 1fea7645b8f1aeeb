"""What the closed division fixes: each departure disqualifies in the log, on the terminal and for `report`."""

import json
import re

import made_logs
import pytest
import yaml
from compliance import RULESETS
from conftest import ROOT

from flux_ref import config, config_file
from flux_ref.benchmark import closed
from flux_ref.benchmark.closed import TRAIN_SAMPLES, VAL_SAMPLES
from flux_ref.config import Config, MllogConfig
from tools.report import __main__ as report
from tools.report import page, score

COUNTS = (TRAIN_SAMPLES, VAL_SAMPLES)
CONFIGS = {path.stem: path for path in (ROOT / "configs").glob("*.toml")}
SMOKE = CONFIGS["closed_smoke"]
POINTS = SMOKE.with_name("closed_smoke_points.json")
# Another value for each key of a config, with what must change with it.
WITH = {
    "model.hidden": "1536 --model.heads=12",
    "model.heads": "12 --model.rope_axes=[32,112,112]",
    "model.rope_axes": "[32,48,48]",
}


def other(key: str) -> str:
    """Another value for a key that the closed division fixes, with what must change with it."""
    known = config.KEYS[key]
    if known.choices:
        return next(choice for choice in known.choices if choice != known.default)
    if isinstance(known.default, (str, bool)):
        return "weights.safetensors" if known.default == "" else str(not known.default).lower()
    return WITH.get(key) or str(known.default / 2 if known.type is float else 2 * known.default)


WRONG = {key: other(key) for key, known in config.KEYS.items() if known.closed}


@pytest.fixture(autouse=True)
def quick_rules(monkeypatch):
    """mlperf-logging reads its rules anew for every log. libyaml takes a tenth of the time."""
    monkeypatch.setattr(yaml, "BaseLoader", getattr(yaml, "CBaseLoader", yaml.BaseLoader))


def load(path, *overrides: str) -> Config:
    return config_file.load(path, [f"--{override}" for override in overrides])


def stripped(path, *keys: str) -> None:
    """Take out entries, and let the run have succeeded."""
    lines = [line for line in path.read_text().splitlines() if not any(f'"key": "{key}"' in line for key in keys)]
    path.write_text("\n".join(lines).replace('"aborted"', '"success"') + "\n")


def faults(path, ruleset: str = MllogConfig.ruleset) -> list[str]:
    """What `report` and the official compliance checker say against a log."""
    (run,) = score.judge("log", [path], ruleset).runs
    return run.faults


def test_each_departure_alone_disqualifies(tmp_path):
    """Without the entries `disqualified`, the logged values still speak, to `report` or to the official checker."""
    gbs512 = CONFIGS["schnell_gbs512"]
    cases = {key: (load(gbs512, *f"{key}={value}".split(" --")), COUNTS) for key, value in WRONG.items()}
    cases["data.train_count"] = load(gbs512, "data.train_count=0"), (512, VAL_SAMPLES)
    cases["data.val_count"] = load(gbs512, "data.val_count=0"), (TRAIN_SAMPLES, 8)
    assert {*cases, closed.VAL_PRECISION} == {*closed.FIXED}, "every compute of ours may validate"
    path = tmp_path / "result_0.txt"
    for key, (cfg, counts) in cases.items():
        path.unlink(missing_ok=True)
        flaw = made_logs.ours(path, cfg, counts=counts)
        stop = path.read_text().splitlines()[-1]
        for text in (flaw, " ".join(closed.warnings(cfg, *counts)), " ".join(faults(path)), stop):
            assert re.search(f"{key}=[^;]+, the closed division fixes ", text), (key, text)
        assert '"status": "aborted"' in stop, key
        stripped(path, "disqualified")
        name = {"eval.every_samples": "evaluation_frequency", "data.evict": "cache_clear"}.get(key, key.split(".")[1])
        name = re.sub("beta(.)", r"beta_\1", name).replace("eps", "epsilon")
        found = faults(path)
        assert len(found) == (2 if " --" in WRONG.get(key, "") else 1) and name in found[0], (key, found)


def test_the_benchmarks_configs_depart_in_nothing_and_the_open_division_is_left_alone(tmp_path):
    for name, path in CONFIGS.items():
        if name.startswith(("schnell", "mi3")):
            assert closed.warnings(load(path), *COUNTS) == closed.departures(load(path), *COUNTS) == [], name
    free = ("train.seed=3", "optim.lr=1e-3", "optim.warmup_steps=9", "train.global_batch=1024", "precision.preset=fp8")
    free += ("eval.at_start=true", "parallel.reduce_dtype=bf16", "sample.count=4")
    assert closed.departures(load(CONFIGS["schnell_gbs512"], *free), *COUNTS) == []
    (line,) = closed.warnings(load(CONFIGS["tiny"], "train.caption_drop=0.5"), 2592, 576)
    assert "no benchmark result: 16 settings differ" in line and "model.hidden=128" in line, "one line for a toy"
    opened = load(SMOKE, "mllog.submission_division=open", "mllog.rehearsal=false", "eval.target=0.9")
    assert made_logs.ours(tmp_path / "log", opened, counts=(512, 8)) == "" and closed.warnings(opened, 512, 8) == []
    given = config_file.replace(opened, init__weights="some")
    assert closed.departures(given, 512, 8) == ["init.weights='some', the open division fixes ''"]


def test_a_rehearsal_passes_all_checks_and_is_no_result(tmp_path, capsys, monkeypatch):
    """Its model and its data may be smaller, and nothing else."""
    cfg, counts = load(SMOKE), (16_384, VAL_SAMPLES)
    assert closed.warnings(cfg, *counts) == ["  rules   rehearsal: no benchmark result"]
    assert made_logs.ours(tmp_path / "log", cfg, (0.34,), counts) == closed.REHEARSAL
    assert {ruleset: faults(tmp_path / "log", ruleset) for ruleset in RULESETS} == {key: [] for key in RULESETS}
    for i in range(10):
        (tmp_path / "ten").mkdir(exist_ok=True)
        text = re.sub(r'("key": "seed", "value": )\d+', rf"\g<1>{i}", (tmp_path / "log").read_text())
        (tmp_path / "ten" / f"result_{i}.txt").write_text(text)
    monkeypatch.setattr(page, "svg", lambda figure: "")
    for points in ([], [f"--points={POINTS}", f"--out={tmp_path}"]):
        assert report.main([str(tmp_path / "ten"), *points, f"--json={tmp_path / 'out.json'}"]) == 0
        (system,) = json.loads((tmp_path / "out.json").read_text())["systems"]
        assert "ten: passes the checks as a rehearsal: no benchmark result\n" in capsys.readouterr().out
        assert system["score_minutes"] is None and system["olympic_mean_minutes"] > 0
        assert system["convergence"]["passed"] is (True if points else None)
    assert "ten: passes the checks as a rehearsal" in (tmp_path / "report.html").read_text()
