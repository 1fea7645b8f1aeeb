"""Alarms: none for runs that converged, one each for planted defects; the counts over real runs are in README."""

import csv
import json
import math
import random

import pytest
from conftest import ROOT
from made_logs import MadeLog

from bench import alarms as bench_alarms
from flux_ref import config_file
from flux_ref.benchmark import convergence
from flux_ref.benchmark.alarms import RATE_SPAN, of_last_rate, of_losses, of_rates
from flux_ref.benchmark.convergence import Band

BATCHES = (512, 1024, 2048, 2304, 4096)
QUARTILES = ("min", "p25", "median", "p75", "max")


def public_curve(batch: int, quartile: str) -> list[tuple[int, float]]:
    with convergence.PUBLIC.open() as file:
        rows = [row for row in csv.DictReader(file) if int(row["global_batch"]) == batch]
    rows = [row for row in rows if row["lr"] == rows[0]["lr"]]
    return [(int(row["samples"]), float(row[f"val_loss_{quartile}"])) for row in rows]


def kinds(curve, band, bias=math.nan) -> list[str]:
    return [alarm.kind for alarm in of_losses(curve, band, bias)]


def like_the_band(band: Band, seed: int, lift: float = 0.0, factor: float = 1.0) -> list[tuple[int, float]]:
    """A curve around the median that lies as far from it as those of the public runs, half for good, half by chance."""
    noise = random.Random(seed)
    own = noise.gauss(0, 1)
    return [
        (samples, median * factor + lift + spread / 1.35 * (own + noise.gauss(0, 1)) / 2**0.5)
        for samples, median, spread in zip(band.samples[:-4], band.median, band.spread)
    ]


@pytest.mark.parametrize("batch", BATCHES)
def test_quartiles_of_the_public_runs_raise_no_warning(batch):
    for quartile in QUARTILES:
        assert kinds(public_curve(batch, quartile), convergence.public_band(batch)) == []


@pytest.mark.parametrize("batch", BATCHES)
def test_of_a_hundred_runs_that_scatter_like_the_public_ones_two_are_warned_of_at_most(batch):
    band = convergence.public_band(batch)
    assert sum(bool(kinds(like_the_band(band, seed), band)) for seed in range(100)) <= 2


@pytest.mark.parametrize("batch", BATCHES)
def test_a_correct_run_raises_nothing_and_one_with_dropped_captions_a_note(batch):
    band, bias = convergence.public_band(batch), convergence.bias(batch)
    correct = [kinds(like_the_band(band, seed, -bias), band, bias) for seed in range(50)]
    dropped = [kinds(like_the_band(band, seed), band, bias) for seed in range(50)]
    assert sum(map(bool, correct)) <= 11 and sum(found == ["biased"] for found in dropped) >= 30
    assert of_losses(like_the_band(band, 0), band, bias)[0].level == "note"


@pytest.mark.parametrize("batch", BATCHES)
def test_a_run_that_converges_too_slowly_is_noticed_early(batch):
    band = convergence.public_band(batch)
    for factor in (1.02, 1.1, 2.0):
        alarms = of_losses(like_the_band(band, 1, factor=factor), band)
        assert "high" in [alarm.kind for alarm in alarms]
        assert alarms[0].samples <= band.samples[-1] / (3 if factor < 1.1 else 8)
    assert alarms[0].samples in band.samples[:2] and alarms[0].level == "warning"


def test_a_loss_below_all_is_as_suspect():
    band = convergence.public_band(512)
    alarms = of_losses(like_the_band(band, 1, factor=0.8), band)
    assert [alarm.kind for alarm in alarms] == ["low"] and "latents" in alarms[0].text


def test_a_first_loss_far_too_low_is_told_at_once():
    """Or a run with latents of the wrong scale would reach the target unseen."""
    band = convergence.public_band(512)
    assert kinds([(262_144, 0.4)], band) == ["low"] and kinds([(262_144, 0.62)], band) == []


def test_what_comes_again_is_told_again():
    band = convergence.public_band(1024)
    curve = public_curve(1024, "median")
    for i in (8, 20):
        curve[i] = (curve[i][0], curve[i][1] + 0.02)
    assert [alarm.samples for alarm in of_losses(curve, band)] == [curve[8][0], curve[20][0]]


def test_a_band_of_own_runs_has_no_bias():
    cfg = config_file.load(ROOT / "configs/schnell_gbs512.toml")
    assert convergence.bias_of_config(cfg) == convergence.bias(512)
    assert math.isnan(convergence.bias_of_config(config_file.replace(cfg, eval__band="own.csv")))


def test_one_evaluation_that_strays_a_little_is_none():
    band = convergence.public_band(1024)
    curve = public_curve(1024, "median")
    curve[20] = (curve[20][0], curve[20][1] + 0.005)
    assert kinds(curve, band) == []
    curve[21] = (curve[21][0], curve[21][1] + 0.005)
    assert kinds(curve, band) == ["high"]


def test_what_needs_no_band():
    assert kinds([(1, 1.0), (2, 0.8), (3, 0.7)], None) == []
    assert kinds([(1, 1.0), (2, 0.8), (3, 0.9), (4, 0.85)], None) == ["rising"]
    assert kinds([(1, 1.0), (2, 0.8), (3, 0.9), (4, 0.8)], None) == []
    assert kinds([], None) == []


def test_late_is_after_the_slowest():
    band = convergence.public_band(4096)
    end = band.samples[-1]
    assert kinds([(end, 0.586)], band) == []
    assert kinds([(end + 1, 0.5861)], band) == ["late"]


def rated(rates: list[float], wait: float = 0.0) -> list[dict]:
    return [{"samples": i, "samples_per_s": rate, "data_wait": wait} for i, rate in enumerate(rates)]


def test_a_rate_that_falls_and_stays_is_told_once():
    steady, slow = [100.0] * 20, [85.0] * 10
    assert of_rates(rated(steady)) == [] and of_rates(rated([1.0, *steady])) == []
    assert of_rates(rated([*steady, 10.0, 10.0, *steady])) == []  # two slow steps are nobody's business
    alarms = of_rates(rated(steady + slow))
    assert [(alarm.kind, alarm.samples) for alarm in alarms] == [("slow", 22)]
    assert "look at the nodes" in alarms[0].text
    assert "waiting for data" in of_rates(rated(steady + slow, wait=0.15))[0].text
    again = of_rates(rated(steady + slow + [100.0] * 60 + slow))
    assert len(again) == 2


def test_a_slow_beginning_is_forgotten():
    records = rated([50.0] * 5 + [100.0] * 60)
    assert all(of_last_rate(records[:n][-RATE_SPAN:]) is None for n in range(len(records)))


def test_public_logs_are_counted_by_system_against_all_and_against_the_others(tmp_path, capsys):
    median = dict(public_curve(1024, "median"))
    for system, lift in {"good": 0.0, "slow": 0.03}.items():
        for run in range(2):
            log = MadeLog(run, batch=1024)
            for k, (samples, loss) in enumerate(list(median.items())[:32]):
                log.change("eval_accuracy", loss + lift, which=k, samples_count=samples)
            log.write(tmp_path / system / f"result_{run}.txt")
    broken = MadeLog(5, batch=1024).change("run_stop", status="aborted")
    broken.write(tmp_path / "good" / "result_2.txt")
    assert bench_alarms.main([str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    good, slow = json.loads(out)["systems"]
    known = {"global_batch": 1024, "runs": 2}
    assert good.items() >= (known | {"system": "good", "warned": 0, "warned_by_others": 0}).items()
    assert slow.items() >= (known | {"system": "slow", "warned": 2, "warned_by_others": 2}).items()
    assert "2 of 4" in err.splitlines()[-1]


def test_a_system_alone_at_its_batch_has_no_others(tmp_path, capsys):
    MadeLog(batch=4096).write(tmp_path / "result_0.txt")
    assert bench_alarms.main([str(tmp_path), "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)["systems"]
    assert only["warned_by_others"] is None
