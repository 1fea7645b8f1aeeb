"""The figures of benchmark runs, and the verdict on the system that ran them.

Times are in seconds unless a name says minutes. Source: MLPerf's training rules and mlperf-logging's result_summarizer.
"""

import math
import statistics
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from flux_ref.benchmark import closed
from flux_ref.formats.outside import printable
from tools.report import official, result_files
from tools.report.result_log import Event, ResultLog, number

RUNS = 10  # of a submission; the mean leaves out the best and the worst
VALID, PASSING_REHEARSAL = "valid result", f"passes the checks as a {closed.REHEARSAL}"  # verdicts
# Settings that all runs of a system must share.
SHARED = (
    *("submission_org", "submission_platform", "submission_division", "submission_benchmark", "global_batch_size"),
    *("opt_base_learning_rate", "opt_learning_rate_warmup_steps", "gradient_accumulation_steps"),
)


@dataclass(eq=False)
class Run:
    """The figures of one log; a figure that the log does not give is None or empty."""

    log: ResultLog
    run_ms: float | None = None  # from run_start to run_stop
    evaluation_s: float | None = None  # within the run
    status: str = ""
    samples: float | None = None  # at run_stop
    target: float = 0.0
    val_curve: list[tuple[float, float]] = field(default_factory=list)  # (samples, loss)
    faults: list[str] = field(default_factory=list)  # why the run does not count; empty if it counts

    @property
    def name(self) -> str:
        return self.log.name

    @property
    def minutes(self) -> float | None:
        return None if self.run_ms is None else self.run_ms / 60 / 1000

    @property
    def samples_to_converge(self) -> float | None:
        """Samples at the last evaluation, as in the convergence checker; None for a run that does not count."""
        return self.val_curve[-1][0] if self.val_curve and not self.faults else None

    @property
    def samples_per_s(self) -> float | None:
        return self._rate(without_s=0.0)

    @property
    def samples_per_s_without_evaluation(self) -> float | None:
        return self._rate(without_s=self.evaluation_s)

    def _rate(self, without_s: float | None) -> float | None:
        if not self.samples or not self.run_ms or without_s is None:
            return None
        seconds = self.run_ms / 1000 - without_s
        return self.samples / seconds if seconds > 0 else None


def measure(log: ResultLog) -> Run:
    """The figures of one log. Whatever contradicts a single timed run becomes a fault."""
    run = Run(log, faults=[*log.problems], target=number(log.value("target_accuracy")) or 0.0)
    if not log.events:
        return run
    # A resumed run has several parts, which have no common clock. Of other runs the first run_stop counts, as other
    # ranks may repeat it.
    starts = log.all("run_start")
    stops = log.all("run_stop")
    stop = stops[-1 if log.is_resumed else 0] if stops else None
    _clock(run, starts, stop, log.is_resumed)
    _evaluations(run, starts[0].line if starts else 0, stop.line if stop else math.inf)
    run.faults += dict.fromkeys(_departures(log))
    return run


def _departures(log: ResultLog) -> Iterator[str]:
    """What the log itself says against the run, and its values that the closed division forbids."""
    yield from (str(event.value)[:200] for event in log.all("disqualified"))
    if log.value("submission_division") == "closed":
        found = {key: log.value(closed.OFFICIAL.get(key, key)) for key in closed.FIXED}
        yield from closed.judge(found, bool(log.value(closed.REHEARSED)))


def _clock(run: Run, starts: list[Event], stop: Event | None, is_resumed: bool) -> None:
    """The time from the last run_start before the run_stop that counts, as in mlperf-logging."""
    before = [event for event in starts if not stop or event.line < stop.line]
    if not before:
        run.faults.append("run_start is missing" + (" before run_stop" if starts else ""))
    if not stop:
        run.faults.append("run_stop is missing: the run was cut off or still goes on")
        return
    run.samples = number(stop.metadata.get("samples_count"))
    run.status = str(stop.metadata.get("status", ""))
    if any(event.time_ms > stop.time_ms for event in starts):
        run.faults.append("run_start comes again after run_stop: two runs in one file")
    if run.status != "success":
        reason = textwrap.shorten(str(stop.metadata.get("reason", "")), 300, placeholder=" ...")
        run.faults.append(f"run_stop has status {run.status!r}" + (f": {reason}" if reason else ""))
    if before and not is_resumed:
        span_ms = stop.time_ms - before[-1].time_ms
        if span_ms > 0:
            run.run_ms = span_ms
        elif span_ms <= 0:  # neither is true of NaN
            run.faults.append("run_stop is not later than run_start")


def _evaluations(run: Run, first: float, last: float) -> None:
    """Losses and the time of evaluations, from the entries between two lines."""
    losses: dict[float, float] = {}
    opened = None
    spans_ms = []
    for event in run.log.events:
        if not first < event.line < last:
            continue
        if event.key == "eval_start":
            opened = opened or event
        elif event.key == "eval_stop" and opened:
            spans_ms.append(event.time_ms - opened.time_ms)
            opened = None
        elif event.key == "eval_accuracy":
            samples = number(event.metadata.get("samples_count"))
            loss = number(event.value)
            if samples is not None and loss is not None:
                losses.setdefault(samples, loss)  # several ranks may write it
            elif not any(fault.startswith(event.key) for fault in run.faults):
                what = "no samples_count" if loss is not None else f"the value {str(event.value)[:20]}"
                run.faults.append(f"eval_accuracy in line {event.line} has {what}")
    run.val_curve = sorted(losses.items())
    if run.val_curve and run.run_ms is not None:
        run.samples = max(run.samples or 0, run.val_curve[-1][0])
    if spans_ms and all(span >= 0 for span in spans_ms):
        run.evaluation_s = sum(spans_ms) / 1000


@dataclass(eq=False)
class System:
    """The runs of one system and the verdict. reasons: why it is no valid result; empty for a valid one.

    mixtures: settings that differ between its runs but must not. If there are any, no mean is computed.
    """

    name: str
    runs: list[Run]
    verdicts: official.Verdicts
    mixtures: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    olympic_mean_minutes: float | None = None  # not normalised
    score_minutes: float | None = None  # the official result: the olympic mean times the factor, if the result is valid

    @property
    def verdict(self) -> str:
        if self.reasons:
            return "not a valid result"
        return PASSING_REHEARSAL if any(run.log.value(closed.REHEARSED) for run in self.runs) else VALID

    @property
    def counted(self) -> list[Run]:
        return [run for run in self.runs if not run.faults and run.minutes is not None]

    @property
    def compliant_logs(self) -> int:
        return sum(not complaints for complaints in self.verdicts.compliance)

    @property
    def factor(self) -> float | None:
        """Factor that lengthens the score of runs that converged faster than the reference; None without a pass."""
        check = self.verdicts.convergence
        return check.factor if check and check.passed and not self.mixtures else None

    @property
    def samples_to_converge(self) -> float | None:
        """The olympic mean of ten runs; the plain mean of another number of runs."""
        samples = [run.samples_to_converge for run in self.counted]
        if self.mixtures or not samples or None in samples:
            return None
        return olympic_mean(samples, RUNS - len(samples)) if self.olympic_mean_minutes else statistics.fmean(samples)

    @property
    def settings(self) -> dict[str, object]:
        """What the first log says before run_start, apart from the seed."""
        before = takewhile(lambda event: event.key != "run_start", self.runs[0].log.events)
        known = {event.key: event.value for event in before if event.key not in ("seed", "cache_clear")}
        return {key: value for key, value in known.items() if isinstance(value, (str, int, float))}

    @property
    def machine(self) -> dict[str, str]:
        return result_files.machine(self.runs[0].log.path, self.runs[0].log.system)

    def value(self, key: str) -> object:
        """The first value that any log gives for a key."""
        return next((value for run in self.runs if (value := run.log.value(key)) is not None), None)

    def mean(self, figure: str) -> float | None:
        """The mean of an attribute over all runs that have it, also those that do not count."""
        values = [value for run in self.runs if (value := getattr(run, figure)) is not None]
        return statistics.fmean(values) if values and not self.mixtures else None


def olympic_mean(values: list[float], dropped: int = 0) -> float:
    """Mean without the best and the worst. dropped: 1 if the worst is not among the values, else 0."""
    return statistics.fmean(sorted(values)[1 : len(values) - (1 - dropped)])


def judge(name: str, logs: list[ResultLog], ruleset: str, points: Path | None = None) -> System:
    """All figures of one system, and the verdict by the rules and by mlperf-logging's checkers."""
    if len({log.name for log in logs}) < len(logs):  # runs of ours: each is result_0.txt in its own folder
        for log in logs:
            log.name = printable(f"{log.path.parent.name}/{log.path.name}")
    verdicts = official.check(logs, ruleset, points)
    runs = [measure(log) for log in logs]
    for run, complaints in zip(runs, verdicts.compliance):
        if run.log.events:
            run.faults += complaints
    system = System(name, runs, verdicts, list(_mixtures(runs)))
    failed = len(runs) - len(system.counted)
    if len(runs) == RUNS and failed <= 1 and not system.mixtures:
        system.olympic_mean_minutes = olympic_mean([run.minutes for run in system.counted], failed)
    system.reasons = list(_reasons(system, failed))
    if system.olympic_mean_minutes is not None and system.verdict == VALID:
        system.score_minutes = system.olympic_mean_minutes * (system.factor or 1.0)
    if failed == 1 and len(runs) > 1:
        run = next(run for run in runs if run.faults or run.minutes is None)
        system.notes.append(f"{run.name} counts as the worst of the runs: {run.faults[0]}")
    return system


def _reasons(system: System, failed: int) -> Iterator[str]:
    """Why a system is no valid result, the gravest first."""
    yield from system.mixtures
    if len(system.runs) != RUNS:
        plural = "s" if len(system.runs) > 1 else ""
        yield f"{len(system.runs)} run{plural}; the rules ask for {RUNS}"
    if failed > 1 or failed == len(system.runs):
        bad = [run for run in system.runs if run.faults]
        names = ", ".join(run.name for run in bad)
        yield f"failed runs, at most 1 may: {names}; the first: {bad[0].faults[0]}"
    for text in system.verdicts.seeds:
        yield f"seeds: {text}"
    convergence = system.verdicts.convergence
    if convergence and convergence.passed is False:
        yield f"convergence: {convergence.message}"


def _mixtures(runs: list[Run]) -> Iterator[str]:
    for key in SHARED:
        values = {}  # each with the first run that has it
        for run in runs:
            if (value := run.log.value(key)) is not None:
                values.setdefault(str(value)[:60], run.name)
        if len(values) > 1:
            parts = [f"{value} in {name}" for value, name in values.items()]
            yield f"mixed {key}: {', '.join(parts)}; give each system a folder of its own"
