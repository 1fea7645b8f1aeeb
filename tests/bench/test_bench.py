"""The benchmark of a step: its report is whole and plausible. Times are not judged."""

import pytest
from bench_report import report_of
from conftest import MICRO, data_overrides

from bench import kernels, step, sweep_table
from bench.static.predicted import Counts
from flux_ref import config_file
from tools.shared import flops


def test_report_is_whole_and_plausible(tmp_path, shapes_dir, capsys):
    report = report_of(step, tmp_path, "--steps=2", "--warmup=1", "--profile", *data_overrides(shapes_dir))
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("samples_per_s", "forward", "share_of_ceiling"))
    assert report["command"].startswith("python -m bench.step --config")
    assert {"commit", "sources", "torch", "device", "ranks", "load_average", "steps_run"} <= report.keys()
    assert report["config"]["train.global_batch"] == 12
    ms = report["step_ms"]
    assert 0 < ms["min"] <= ms["median"] <= ms["max"]
    assert 12e3 / ms["max"] * 0.999 <= report["samples_per_s"] <= 12e3 / ms["min"] * 1.001
    assert all(report["split_ms"][part] > 0 for part in ("forward", "backward", "optimizer"))
    assert 0 < report["data_share"] < 1 and 0.05 < report["peak_memory_gb"] < 20
    tflop = report["tflop"]
    assert tflop["per_sample"] == pytest.approx(flops.per_sample(config_file.load(MICRO).model) / 1e12)
    assert tflop["per_s_per_rank"] == pytest.approx(tflop["per_sample"] * report["samples_per_s"])
    assert 0 < tflop["share_of_ceiling"] < 1 and 0 < report["last_loss"] < 10
    found = report["kernels"]
    shares = {kind: part["share"] for kind, part in found["classes"].items()}
    assert all(shares[kind] > 0 for kind in ("gemm", "attention", "elementwise", "copy", "optimizer"))
    assert len(found["top"]) == kernels.TOP and sum(shares.values()) + found["idle"]["share"] >= 0.999
    names = [name for name, *_ in sweep_table.step_rows("part", report, Counts({"runs": [], "rates": {}}))]
    assert names[0] == "part" and {"  gemm", "  attention", "  idle"} <= {*names}


def test_synthetic_needs_no_data(tmp_path):
    report_of(step, tmp_path, "--synthetic", "--steps=1", "--warmup=0", *data_overrides(tmp_path / "none"))
    assert not (tmp_path / "none").exists()
