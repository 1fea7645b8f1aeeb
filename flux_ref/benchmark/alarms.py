"""Early warnings, from what a run has written down: it will miss the target, or it has become slow.

Losses are compared with a band of runs that converged (convergence.py). A run is flagged only if it leaves the range of
all reference runs: slightly in four evaluations in a row, clearly in two, or extremely in one.
"""

import statistics
from collections import deque
from dataclasses import dataclass

from flux_ref.benchmark.convergence import CURVES, Band

# Thresholds in units of (highest run - median): FAR in one, WIDE in two, ABOVE in four consecutive evaluations.
FAR = 6.0
WIDE = 2.0
ABOVE = 1.25
CONFIRM = 2
LASTS = 4
LEAST_REACH = 0.00075  # about the standard deviation of one evaluation's loss in the public runs
BELOW, FAR_BELOW = 0.9, 0.75  # too low: below this share of the lowest run, in two evaluations in a row or in one
RISE = 1.03  # of the best loss so far
# A rate has fallen if 9 of 10 logged steps are below RATE_DROP of the median of the 20 to 50 logged steps before them.
RATE_DROP = 0.9
RATE_NOW = 10
RATE_STRAYS = 1
RATE_BEFORE_MIN = 20
RATE_BEFORE = 50
LOW_SHARE = 0.1  # of the steps before may be as slow as the median step now: scatter is no fall


@dataclass(frozen=True)
class Alarm:
    """Something that runs which converge do not do."""

    samples: int  # when it was noticed
    kind: str  # high, low, rising, late, slow, shared
    text: str

    @property
    def level(self) -> str:
        return "note" if self.kind in ("late", "shared") else "warning"


def of_losses(curve: list[tuple[int, float]], band: Band | None) -> list[Alarm]:
    """The alarms that a validation curve of (training samples, loss) gives, each when it began."""
    alarms: list[Alarm] = []
    before: set[str] = set()
    for n in range(1, len(curve) + 1):
        now = [alarm for check in (_outside, _rising_or_late) if (alarm := check(curve[:n], band))]
        repeated_notes = {alarm.kind for alarm in alarms if alarm.level == "note"}
        alarms += [alarm for alarm in now if alarm.kind not in before | repeated_notes]
        before = {alarm.kind for alarm in now}
    return alarms


def _outside(curve: list[tuple[int, float]], band: Band | None) -> Alarm | None:
    recent = [(samples, loss) for samples, loss in curve[-LASTS:] if band and samples >= band.samples[0]]
    if not recent or recent[-1] != curve[-1]:
        return None
    above, slightly_above, below = [], [], []  # of the last evaluations, in units of the band's reach or lowest loss
    for samples, loss in recent:
        low, median, high, spread = (band.at(samples, name) for name in CURVES)
        reach = max(high - median, LEAST_REACH)
        above.append((loss - median) / max(reach, 2 * spread))
        slightly_above.append((loss - median) / reach)
        below.append(loss / low)
    confirmed = len(recent) >= CONFIRM
    seen = f"validation loss {loss:.4f}; {band.source} had {low:.4f} to {high:.4f} here"
    if (
        above[-1] > FAR
        or (confirmed and min(above[-CONFIRM:]) > WIDE)
        or (len(recent) == LASTS and min(slightly_above) > ABOVE)
    ):
        return Alarm(samples, "high", f"{seen}: check learning rate, warm-up, data and their scale")
    if below[-1] < FAR_BELOW or (confirmed and max(below[-CONFIRM:]) < BELOW):
        return Alarm(samples, "low", f"{seen}: check the latents' scale, the validation set and the learning rate")
    return None


def _rising_or_late(curve: list[tuple[int, float]], band: Band | None) -> Alarm | None:
    """A band tells a rise from bad luck, so that a rise is looked for without a band only."""
    samples, newest = curve[-1]
    if band is None:
        best = min(loss for _, loss in curve)
        if len(curve) > CONFIRM and min(loss for _, loss in curve[-CONFIRM:]) > RISE * best:
            return Alarm(samples, "rising", f"validation loss {newest:.4f} after {best:.4f}: training diverges")
    elif samples > band.samples[-1]:
        end = f"the slowest of {band.source} ended at {band.samples[-1]:,} samples, with {band.median[-1]:.4f}"
        return Alarm(samples, "late", end)
    return None


class RateWatch:
    """Notices when the training rate falls and stays low; is given the records of metrics.jsonl one by one.

    shared_cpu: the run trains on the CPUs of one node. Other programs slow such a run, so that it gets one note.
    """

    def __init__(self, shared_cpu: bool):
        self.shared_cpu = shared_cpu
        self.records: deque[dict] = deque(maxlen=RATE_BEFORE + RATE_NOW)
        self.is_slow = self.has_noted = False

    def add(self, record: dict) -> Alarm | None:
        """Take in the next record; returns an alarm where a lasting fall was noticed."""
        self.records.append(record)
        before = list(self.records)[:-RATE_NOW]
        now = list(self.records)[-RATE_NOW:]
        if len(before) < RATE_BEFORE_MIN:
            return None
        usual, last = (sorted(record["samples_per_s"] for record in part) for part in (before, now))
        floor = RATE_DROP * statistics.median(usual)
        was_slow = self.is_slow
        if was_slow:  # until half of the last steps are quick again, or the slow ones have become the usual ones
            self.is_slow = statistics.median(last) < floor
        else:
            scatter = usual[int(LOW_SHARE * len(usual))]
            self.is_slow = last[-1 - RATE_STRAYS] < floor and statistics.median(last) < scatter
        if was_slow or not self.is_slow or (self.shared_cpu and self.has_noted):
            return None
        self.has_noted = True
        kind, what = ("shared", "other load on this machine?") if self.shared_cpu else ("slow", "training is slower:")
        return Alarm(record["samples"], kind, f"{what} {_described(now)}; before {_described(before)}")


def _described(records: list[dict]) -> str:
    rate = statistics.median(record["samples_per_s"] for record in records)
    waited = statistics.fmean(record["data_wait"] for record in records)
    return f"{rate:.4g} samples/s over {len(records)} logged steps, {waited:.0%} of the time waiting for data"


def of_rates(records: list[dict], shared_cpu: bool) -> list[Alarm]:
    """The alarms that the records of metrics.jsonl give, each when it began; shared_cpu as for RateWatch."""
    watch = RateWatch(shared_cpu)
    return [alarm for record in records if (alarm := watch.add(record))]
