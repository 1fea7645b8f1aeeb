"""Alarms: none for runs that converged or ran steadily, one for each planted defect. Counts of real runs: README."""

import random

from conftest import ROOT

from flux_ref.benchmark import convergence
from flux_ref.benchmark.alarms import Alarm, of_losses, of_rates
from flux_ref.benchmark.convergence import Band
from flux_ref.formats.jsonl import records

BATCHES = (512, 1024, 2048, 2304, 4096)


def kinds(curve, band) -> list[str]:
    return [alarm.kind for alarm in of_losses([*curve], band)]


def like_the_band(band: Band, seed: int, factor: float = 1.0) -> list[tuple[int, float]]:
    """A curve that scatters around the median like the public runs: half of it is the run's own, half is chance."""
    noise = random.Random(seed)
    offset = noise.gauss(0, 1)
    return [
        (samples, median * factor + spread / 1.35 * (offset + noise.gauss(0, 1)) / 2**0.5)
        for samples, median, spread in zip(band.samples[:-4], band.median, band.spread)
    ]


def test_runs_like_the_public_ones_raise_no_warning():
    """Not even their extremes do; of simulated runs at most 2 in 100 do."""
    for batch in BATCHES:
        band = convergence.public_band(batch)
        for curve in (band.low, band.median, band.high):
            assert kinds(zip(band.samples, curve), band) == [], batch
        assert sum(bool(kinds(like_the_band(band, seed), band)) for seed in range(50)) <= 1, batch


def test_a_run_that_converges_too_slowly_is_noticed_early():
    for batch in BATCHES:
        band = convergence.public_band(batch)
        for factor in (1.02, 1.1, 2.0):
            alarms = of_losses(like_the_band(band, 1, factor=factor), band)
            assert "high" in [alarm.kind for alarm in alarms], (batch, factor)
            assert alarms[0].samples <= band.samples[-1] / (3 if factor < 1.1 else 8), (batch, factor)
        assert alarms[0].samples in band.samples[:2] and alarms[0].level == "warning", batch


def test_a_loss_below_all_is_as_suspect():
    """A first loss far too low is told at once: latents of the wrong scale would reach the target unseen."""
    band = convergence.public_band(512)
    alarms = of_losses(like_the_band(band, 1, factor=0.8), band)
    assert [alarm.kind for alarm in alarms] == ["low"] and "latents" in alarms[0].text
    assert kinds([(262_144, 0.4)], band) == ["low"] and kinds([(262_144, 0.62)], band) == []


def test_a_loss_beyond_the_ends_of_a_band_is_not_judged():
    band = convergence.public_band(512)
    for samples in (band.samples[0] - 1, band.samples[-1] + 1):
        assert kinds([(samples, 0.1), (samples, 9.0)], band) == []


def test_evaluations_that_stray():
    """One that strays far is told, and told again when it comes again; one that strays a little is not, two are."""
    band = convergence.public_band(1024)
    for lift, places, told_at in ((0.02, (8, 20), [8, 20]), (0.005, (20,), []), (0.005, (20, 21), [21])):
        curve = [*zip(band.samples, band.median)]
        for i in places:
            curve[i] = (curve[i][0], curve[i][1] + lift)
        told = [(alarm.kind, alarm.samples) for alarm in of_losses(curve, band)]
        assert told == [("high", curve[i][0]) for i in told_at]


def test_a_run_without_a_band_has_no_alarms():
    assert kinds([(1, 1.0), (2, 9.0), (3, 9.0)], None) == kinds([], None) == []


def rated(rates: list[float], wait: float = 0.0) -> list[dict]:
    return [{"samples": 600 * i, "samples_per_s": rate, "data_wait": wait} for i, rate in enumerate(rates)]


def test_a_rate_that_falls_and_stays_is_told_once():
    (alarm,) = of_rates(rated([120.0] * 40 + [60.0] * 100, wait=0.15))
    text = "training is slower: 60 samples/s over 10 logged steps, 15% of the time waiting for data; before"
    text += " 120 samples/s over 39 logged steps, 15% of the time waiting for data; is there other load?"
    assert alarm == Alarm(600 * 48, "slow", text) and alarm.level == "note"


def test_which_rates_are_told():
    steady = [100.0] * 40
    cases = {  # rates, how often a fall is told
        "steady": (steady * 5, 0),
        "a little slower for good": (steady + [85.0] * 100, 1),
        "8 % slower for good": (steady + [92.0] * 100, 0),
        "slow for eight steps": (steady + [20.0] * 8 + steady, 0),
        "every second step slow": (steady + [100.0, 30.0] * 50, 0),
        "slow at first": ([50.0] * 12 + steady * 2, 0),
        "slow twice": (steady + [50.0] * 10 + steady * 2 + [50.0] * 10 + steady, 2),
        "slower and slower": ([100.0] * 60 + [70.0] * 60 + [40.0] * 60, 2),
        "faster": (steady + [200.0] * 60, 0),
        "within its scatter": (([100.0] * 6 + [40.0] * 4) * 4 + [85.0] * 40, 0),
        "too short to tell": ([100.0] * 19 + [50.0] * 10, 0),
    }
    for seed in range(20):
        for scatter in (0.02, 0.1, 0.2):
            noise = random.Random(seed)
            rates = [1000 * (0.5 if i >= 60 else 1) * max(0.1, noise.gauss(1, scatter)) for i in range(160)]
            cases[f"half speed, scatter {scatter}, seed {seed}"] = rates, 1
            cases[f"no fall, scatter {scatter}, seed {seed}"] = rates[:60], 0
    wrong = {name: rates for name, (rates, count) in cases.items() if len(of_rates(rated(rates))) != count}
    assert [*wrong] == []


def test_a_tiny_run_beside_other_load_gets_a_note():
    """A real run, whose rate fell from 427 to 290 samples/s as another program began."""
    real = records(ROOT / "tests/benchmark/beside_other_load.jsonl", figures=("samples_per_s", "data_wait"))
    assert len(real) == 90 and [alarm.kind for alarm in of_rates(real)] == ["slow"]
