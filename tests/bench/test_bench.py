"""The benchmarks of a step and of feeding: their reports are whole and plausible. Times are not judged."""

import json

import pytest
from bench_report import report_of
from conftest import MICRO, data_overrides

from bench import feed, step
from flux_ref import config_file
from tools.shared import flops


def test_report_is_whole_and_plausible(tmp_path, shapes_dir, capsys):
    report = report_of(step, tmp_path, "--steps=2", "--warmup=1", *data_overrides(shapes_dir))
    shown = capsys.readouterr().out

    assert report["command"].startswith("python -m bench.step --config")
    assert {"commit", "torch", "device", "ranks", "threads", "load_average", "steps_run"} <= report.keys()
    assert report["config"]["train.global_batch"] == 12 and report["steps"] == 2 and not report["synthetic"]
    ms = report["step_ms"]
    assert 0 < ms["min"] <= ms["median"] <= ms["max"]
    assert 12e3 / ms["max"] * 0.999 <= report["samples_per_s"] <= 12e3 / ms["min"] * 1.001
    assert all(report["split_ms"][part] > 0 for part in ("forward", "backward", "optimizer"))
    assert 0 < report["data_share"] < 1 and 0.05 < report["peak_memory_gb"] < 20
    tflop = report["tflop"]
    assert tflop["per_sample"] == pytest.approx(flops.per_sample(config_file.load(MICRO).model) / 1e12)
    assert tflop["per_s_per_rank"] == pytest.approx(tflop["per_sample"] * report["samples_per_s"])
    assert 0 < tflop["share_of_ceiling"] < 1
    assert 0 < report["last_loss"] < 10
    assert all(word in shown for word in ("samples_per_s", "forward", "share_of_ceiling"))


def test_synthetic_needs_no_data(tmp_path):
    report_of(step, tmp_path, "--synthetic", "--steps=1", "--warmup=0", *data_overrides(tmp_path / "none"))
    assert not (tmp_path / "none").exists()


def test_the_feeds_report_is_whole_and_plausible(tmp_path, capsys):
    path = tmp_path / "new" / "report.json"
    options = ["--samples", "96", "--rounds", "2", "--workers", "1,2", "--flat", "640", "--folder", str(tmp_path)]
    assert feed.main([*options, "--config", str(MICRO), "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert {"command", "commit", "cores", "file_system", "load_average"} <= report.keys()
    for rates in report["rates"].values():
        assert list(rates) == ["pread", "unscanned", "read", "feed"]
        for ways in rates.values():
            assert list(ways) == ["1", "2"]
            for figures in ways.values():
                low, high = figures["share_quartiles"]
                assert figures["samples_per_s"] > 0 and 0 < low <= figures["share_of_pread"] <= high
    assert report["rates"].keys() == {"warm", "cold"}
    assert report["flat"]["samples"] == 640 and report["flat"]["first_mb"] > 10
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("cold", "unscanned", "kb_per_1000"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["new"], "the samples are gone"
