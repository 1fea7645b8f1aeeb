"""The benchmark of a step: its report is whole and plausible. Times are not judged."""

import pytest
from bench_report import report_of
from conftest import MICRO, data_overrides

from bench import kernels, step, sweep_table
from bench.static.predicted import Counts
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


def test_a_profile_takes_a_step_apart_and_synthetic_needs_no_data(tmp_path):
    options = ("--synthetic", "--steps=1", "--warmup=0", "--profile", *data_overrides(tmp_path / "none"))
    report = report_of(step, tmp_path, *options)
    assert not (tmp_path / "none").exists() and report["data_share"] is None
    found = report["kernels"]
    shares = {kind: part["share"] for kind, part in found["classes"].items()}
    assert all(shares[kind] > 0 for kind in ("gemm", "attention", "elementwise", "copy", "optimizer"))
    assert found["step_ms"] > 0 and len(found["top"]) == kernels.TOP
    assert sum(shares.values()) + found["idle"]["share"] >= 0.999
    names = [name for name, *_ in sweep_table.step_rows("part", report, Counts({"runs": [], "rates": {}}))]
    assert names[0] == "part" and {"  gemm", "  attention", "  idle"} <= {*names}
