"""Early warnings, from what a run has written down: it will miss the target, or it has become slow.

Losses are compared with a band of runs that converged (convergence.py). A run is flagged only if it leaves the range of
all reference runs: far in one evaluation, clearly in two in a row, or, above the range, slightly in four in a row.
"""

import statistics
from collections import deque
from dataclasses import dataclass

from flux_ref.benchmark.convergence import CURVES, Band

# Too high: (loss - median) / width, FAR in one evaluation or CLEAR in two in a row. The width is the larger of the
# band's reach, which is highest loss - median, and twice its spread.
FAR = 6.0
CLEAR = 2.0
# Slightly too high: (loss - median) / reach, in four evaluations in a row.
SLIGHT = 1.25
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
    return [alarm for count in range(len(curve)) if (alarm := newest(curve[: count + 1], band))]


def newest(curve: list[tuple[int, float]], band: Band | None) -> Alarm | None:
    """The alarm that begins with the last evaluation of a curve."""
    alarm = _outside(curve, band)
    before = _outside(curve[:-1], band)
    return None if alarm and before and alarm.kind == before.kind else alarm


def _outside(curve: list[tuple[int, float]], band: Band | None) -> Alarm | None:
    """What the last evaluations of a curve say. A band says nothing beyond its ends."""
    if not curve or not band or not band.samples[0] <= curve[-1][0] <= band.samples[-1]:
        return None
    above = []  # of the last evaluations: (loss - median) / width
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
    if above[-1] > FAR or two_above > CLEAR or four_above > SLIGHT:
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
