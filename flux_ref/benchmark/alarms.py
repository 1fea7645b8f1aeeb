"""Telling early, from what a run has written down, that it will not reach the target or has become slow.

Losses are held against a band of runs that converged (convergence.py). Only what no such run did counts: twice in a
row, as single evaluations stray, or once by far, or a little at four in a row.
"""

import math
import statistics
from dataclasses import dataclass

from flux_ref.benchmark.convergence import Band

# A loss is too high so many times the band's reach above its median: once, at two evaluations in a row, at four.
FAR, WIDE, ABOVE = 6.0, 2.0, 1.25
CONFIRM, LASTS = 2, 4
LEAST_REACH = 0.00075  # about the standard deviation of one evaluation's loss in the public runs
BELOW, FAR_BELOW = 0.9, 0.75  # too low: of the band's lower edge, at two in a row or once; recipes differ early
RISE = 1.03  # of the best loss so far
RATE_DROP, RATE_WINDOW, RATE_SPAN = 0.9, 5, 55  # of the rate before; logged steps
BIAS_EVALUATIONS, BIAS_SHARE = 16, 0.75  # whose mean reaches so much of a bias of about a thousandth


@dataclass(frozen=True)
class Alarm:
    """Something that runs which converge do not do."""

    samples: int  # when it was noticed
    kind: str  # high, low, rising, late, biased, slow
    text: str

    @property
    def level(self) -> str:
        return "note" if self.kind in ("biased", "late") else "warning"


def of_losses(curve: list[tuple[int, float]], band: Band | None, bias: float = math.nan) -> list[Alarm]:
    """The alarms that a validation curve of (training samples, loss) gives, each when it began.

    bias: how far the band lies above runs validated without dropped captions; NaN: not known.
    """
    found: list[Alarm] = []
    before: set[str] = set()
    for n in range(1, len(curve) + 1):
        own = curve[:n]
        now = [_outside(own, band), _rising(own, band), _late(own, band), _biased(own, band, bias)]
        for alarm in now:
            told = alarm and alarm.level == "note" and alarm.kind in {other.kind for other in found}
            if alarm and alarm.kind not in before and not told:
                found.append(alarm)
        before = {alarm.kind for alarm in now if alarm}
    return found


def _outside(curve: list[tuple[int, float]], band: Band | None) -> Alarm | None:
    recent = [(samples, loss) for samples, loss in curve[-LASTS:] if band and samples >= band.samples[0]]
    if not recent or recent[-1] != curve[-1]:
        return None
    last, loss = curve[-1]
    low, high = band.at(last, "low"), band.at(last, "high")
    seen = f"validation loss {loss:.4f}; {band.source} had {low:.4f} to {high:.4f} here"
    above = [(own - band.at(samples, "median")) / _reach(band, samples, spreads=2) for samples, own in recent]
    lasts = [(own - band.at(samples, "median")) / _reach(band, samples, spreads=0) for samples, own in recent]
    below = [own / band.at(samples, "low") for samples, own in recent]
    few = above[-CONFIRM:]
    if above[-1] > FAR or (min(few) > WIDE and len(few) == CONFIRM) or (min(lasts) > ABOVE and len(lasts) == LASTS):
        return Alarm(last, "high", f"{seen}: check learning rate, warm-up, data and their scale")
    if below[-1] < FAR_BELOW or (max(below[-CONFIRM:]) < BELOW and len(few) == CONFIRM):
        return Alarm(last, "low", f"{seen}: check the scale of the latents, the validation set and the learning rate")
    return None


def _reach(band: Band, samples: int, spreads: int) -> float:
    """How far above the median the band's runs come; no less than so many of its spreads, nor than noise comes."""
    highest = band.at(samples, "high") - band.at(samples, "median")
    return max(highest, spreads * band.at(samples, "spread"), LEAST_REACH)


def _rising(curve: list[tuple[int, float]], band: Band | None) -> Alarm | None:
    if band is not None:  # which tells a rise from luck
        return None
    best = min(loss for _, loss in curve)
    recent = [loss for _, loss in curve[-CONFIRM:]]
    if len(curve) > CONFIRM and min(recent) > RISE * best:
        return Alarm(curve[-1][0], "rising", f"validation loss {recent[-1]:.4f} after {best:.4f}: training diverges")
    return None


def _late(curve: list[tuple[int, float]], band: Band | None) -> Alarm | None:
    samples = curve[-1][0]
    if band is None or samples <= band.samples[-1]:
        return None
    return Alarm(
        samples,
        "late",
        f"the slowest of {band.source} ended at {band.samples[-1]:,} samples, with {band.median[-1]:.4f}",
    )


def _biased(curve: list[tuple[int, float]], band: Band | None, bias: float) -> Alarm | None:
    """Slower than the reference by a little, as runs are that drop captions in validation."""
    if band is None or len(curve) < BIAS_EVALUATIONS or math.isnan(bias):
        return None
    recent = curve[-BIAS_EVALUATIONS:]
    if recent[0][0] < band.samples[-1] / 3:  # before, recipes differ by more
        return None
    above = statistics.fmean(loss - (band.at(samples, "median") - bias) for samples, loss in recent)
    if above < BIAS_SHARE * bias:
        return None
    return Alarm(
        curve[-1][0],
        "biased",
        f"the last {BIAS_EVALUATIONS} evaluations lie {above:.4f} above the reference's, as those of runs that drop"
        " captions in validation: the target will come late",
    )


def of_rates(records: list[dict]) -> list[Alarm]:
    """The alarms that the records of metrics.jsonl give: where the rate fell and stayed."""
    found: list[Alarm] = []
    slow_before = False
    for n in range(1, len(records) + 1):
        alarm = of_last_rate(records[:n][-RATE_SPAN:])
        if alarm and not slow_before:
            found.append(alarm)
        slow_before = alarm is not None
    return found


def of_last_rate(records: list[dict]) -> Alarm | None:
    """Whether the last records of metrics.jsonl are slower than those before."""
    rates = [record["samples_per_s"] for record in records]
    before, now = rates[:-RATE_WINDOW], rates[-RATE_WINDOW:]
    if len(before) < 2 * RATE_WINDOW:
        return None
    usual, own = statistics.median(before), statistics.median(now)
    if own >= RATE_DROP * usual:
        return None
    wait = statistics.median(record["data_wait"] for record in records[-RATE_WINDOW:])
    cause = (
        f"{wait:.0%} of it waiting for data"
        if wait > (1 - RATE_DROP) / 2
        else "not for want of data: look at the nodes"
    )
    return Alarm(records[-1]["samples"], "slow", f"{own:.4g} samples/s after {usual:.4g}, {cause}")
