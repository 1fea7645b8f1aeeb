"""Early warnings, from what a run has written down: it will miss the target, or it has become slow.

Losses are compared with a band of runs that converged (convergence.py). A run is flagged only if it leaves the range of
all reference runs: far in one evaluation, clearly in two in a row, or, above the range, slightly in four in a row.
"""

import statistics
from collections import deque
from dataclasses import dataclass

from flux_ref.benchmark.convergence import CURVES, Band

# Thresholds of loss - median, in the units of `_outside`: FAR in one evaluation, WIDE in two, ABOVE in four in a row.
FAR = 6.0
WIDE = 2.0
ABOVE = 1.25
CONSECUTIVE = 4
LEAST_REACH = 0.00075  # about the standard deviation of one evaluation's loss in the public runs
# Too low: below this share of the lowest run, in two evaluations in a row or in one.
BELOW = 0.9
FAR_BELOW = 0.75
# A rate has fallen if 9 of 10 logged steps are below RATE_DROP of the median of the 20 to 50 logged steps before them.
# Their own median must lie in the slowest tenth of the earlier steps: scatter is no fall.
RATE_DROP = 0.9
RATE_NOW = 10
RATE_BEFORE_MIN = 20
RATE_BEFORE = 50


@dataclass(frozen=True)
class Alarm:
    """Something that runs which converge do not do."""

    samples: int  # when it was noticed
    kind: str  # high, low, slow
    text: str

    @property
    def level(self) -> str:
        """What is slow may have causes outside the run."""
        return "note" if self.kind == "slow" else "warning"


def of_losses(curve: list[tuple[int, float]], band: Band | None) -> list[Alarm]:
    """The alarms that a validation curve of (training samples, loss) gives, each when it began."""
    alarms: list[Alarm] = []
    before = ""
    if band is None:
        return alarms
    for count in range(1, len(curve) + 1):
        alarm = _outside(curve[:count], band)
        if alarm and alarm.kind != before:
            alarms.append(alarm)
        before = alarm.kind if alarm else ""
    return alarms


def _outside(curve: list[tuple[int, float]], band: Band) -> Alarm | None:
    """What the last evaluations of a curve say."""
    if curve[-1][0] < band.samples[0]:
        return None
    above = []  # of the last evaluations: (loss - median) / the larger of the band's reach and twice its spread
    slightly_above = []  # (loss - median) / reach
    below = []  # loss / lowest loss
    for samples, loss in curve[-CONSECUTIVE:]:
        if samples >= band.samples[0]:
            low, median, high, spread = (band.at(samples, name) for name in CURVES)
            reach = max(high - median, LEAST_REACH)
            above.append((loss - median) / max(reach, 2 * spread))
            slightly_above.append((loss - median) / reach)
            below.append(loss / low)
    # With one evaluation alone, no rule of two or four applies.
    two_above = min(above[-2:]) if len(above) > 1 else 0.0
    two_below = max(below[-2:]) if len(below) > 1 else 1.0
    four_above = min(slightly_above) if len(slightly_above) == CONSECUTIVE else 0.0
    seen = f"validation loss {loss:.4f}; {band.source} had {low:.4f} to {high:.4f} here"
    if above[-1] > FAR or two_above > WIDE or four_above > ABOVE:
        return Alarm(samples, "high", f"{seen}: check learning rate, warm-up, data and their scale")
    if below[-1] < FAR_BELOW or two_below < BELOW:
        return Alarm(samples, "low", f"{seen}: check the latents' scale, the validation set and the learning rate")
    return None


class RateWatch:
    """Notices when the training rate falls and stays low; is given the records of metrics.jsonl one by one."""

    def __init__(self):
        self.records: deque[dict] = deque(maxlen=RATE_BEFORE + RATE_NOW)

    def add(self, record: dict) -> Alarm | None:
        """Take in the next record. Returns an alarm where a lasting fall was noticed."""
        self.records.append(record)
        before = list(self.records)[:-RATE_NOW]
        now = list(self.records)[-RATE_NOW:]
        if len(before) < RATE_BEFORE_MIN:
            return None
        usual = sorted(record["samples_per_s"] for record in before)
        last = sorted(record["samples_per_s"] for record in now)
        is_low = last[-2] < RATE_DROP * statistics.median(usual)
        if not is_low or statistics.median(last) >= usual[len(usual) // 10]:
            return None
        self.records.clear()  # the slow rate is the usual one from now on
        text = f"training is slower: {_described(now)}; before {_described(before)}; is there other load?"
        return Alarm(record["samples"], "slow", text)


def _described(records: list[dict]) -> str:
    rate = statistics.median(record["samples_per_s"] for record in records)
    waited = statistics.fmean(record["data_wait"] for record in records)
    return f"{rate:.4g} samples/s over {len(records)} logged steps, {waited:.0%} of the time waiting for data"


def of_rates(records: list[dict]) -> list[Alarm]:
    """The alarms that the records of metrics.jsonl give, each when it was noticed."""
    watch = RateWatch()
    return [alarm for record in records if (alarm := watch.add(record))]
