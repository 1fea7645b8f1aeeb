"""The figures of benchmark runs, and the verdict on the system that ran them.

Times are in seconds unless a name says minutes. Source: MLPerf's training rules and mlperf-logging's result_summarizer.
"""

import itertools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flux_ref.benchmark import closed
from flux_ref.benchmark.mllog import RESUMED
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
# The table of runs: (heading, width on a terminal, attribute of a run, format).
RUN_COLUMNS = (
    ("minutes", 9, "minutes", ",.2f"),
    ("samples", 12, "samples", ",.0f"),
    ("samples/s", 11, "samples_per_s", ",.1f"),
    ("training", 10, "samples_per_s_without_evaluation", ",.1f"),
    ("eval s", 8, "evaluation_s", ",.0f"),
    ("init s", 7, "init_s", ",.0f"),
)


@dataclass(eq=False)
class Run:
    """The figures of one log; a figure that the log does not give is None or empty."""

    log: ResultLog
    run_ms: float | None = None  # from run_start to run_stop
    init_s: float | None = None  # from the first init_start to init_stop
    evaluation_s: float | None = None  # within the run
    status: str = ""
    samples: float | None = None  # at run_stop
    target: float = math.nan
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
        return self.samples / (self.run_ms / 1000) if self.samples and self.run_ms else None

    @property
    def samples_per_s_without_evaluation(self) -> float | None:
        if not self.samples or not self.run_ms or self.evaluation_s is None:
            return None
        training_s = self.run_ms / 1000 - self.evaluation_s
        return self.samples / training_s if training_s > 0 else None


def measure(log: ResultLog) -> Run:
    """The figures of one log. Whatever contradicts a single timed run becomes a fault."""
    run = Run(log, faults=[*log.problems], target=number(log.value("target_accuracy")) or math.nan)
    if log.events:
        _clock(run)
        _curves(run)
        run.faults += dict.fromkeys(_departures(log))
    return run


def _departures(log: ResultLog) -> Iterator[str]:
    """What the log itself says against the run, and its values that the closed division forbids."""
    yield from (str(event.value)[:200] for event in log.all("disqualified"))
    if log.value("submission_division") == "closed":
        found = {key: log.value(closed.OFFICIAL.get(key, key)) for key in closed.FIXED}
        yield from closed.judge(found, bool(log.value(closed.REHEARSED)))


def _clock(run: Run) -> None:
    """The time from the last run_start before the first run_stop, as in mlperf-logging when several ranks write."""
    begun, ended = (next((event.time_ms for event in run.log.all(f"init_{at}")), math.nan) for at in ("start", "stop"))
    if ended >= begun:
        run.init_s = (ended - begun) / 1000
    all_starts = run.log.all("run_start")
    stop = _stop(run.log)
    starts = [event for event in all_starts if not stop or event.line < stop.line]
    if not starts:
        run.faults.append("run_start is missing" + (" before run_stop" if all_starts else ""))
    if not stop:
        run.faults.append("run_stop is missing: the run was cut off or still goes on")
        return
    run.samples = number(stop.metadata.get("samples_count"))
    run.status = str(stop.metadata.get("status", ""))
    if any(event.time_ms > stop.time_ms for event in all_starts):
        run.faults.append("run_start comes again after run_stop: two runs in one file")
    if run.status != "success":
        reason = str(stop.metadata.get("reason", ""))[:120]
        run.faults.append(f"run_stop has status {run.status!r}" + (f": {reason}" if reason else ""))
    span_ms = stop.time_ms - starts[-1].time_ms if starts and not _is_resumed(run.log) else math.nan
    if span_ms > 0:
        run.run_ms = span_ms
    elif span_ms <= 0:  # neither is true of NaN
        run.faults.append("run_stop is not later than run_start")


def _is_resumed(log: ResultLog) -> bool:
    """Whether the log holds several parts of one run, which have no common clock."""
    return any(str(event.value).startswith(RESUMED) for event in log.all("disqualified"))


def _stop(log: ResultLog) -> Event | None:
    """The run_stop that counts: the first, as other ranks may repeat it; of a resumed run the last."""
    stops = log.all("run_stop")
    return stops[-1 if _is_resumed(log) else 0] if stops else None


def _curves(run: Run) -> None:
    """Losses and the time of evaluations, from the entries between run_start and run_stop."""
    start = next((event.line for event in run.log.all("run_start")), 0)
    last = _stop(run.log)
    losses: dict[float, float] = {}
    opened = None
    spans_ms = []
    for event in run.log.events:
        if not start < event.line < (last.line if last else math.inf):
            continue
        samples = number(event.metadata.get("samples_count"))
        if event.key == "eval_start":
            opened = opened or event
        elif event.key == "eval_stop" and opened:
            spans_ms.append(event.time_ms - opened.time_ms)
            opened = None
        elif event.key == "eval_accuracy":
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
    place: int = 0  # among the systems of a report

    @property
    def verdict(self) -> str:
        if self.reasons:
            return "not a valid result"
        return PASSING_REHEARSAL if any(run.log.value(closed.REHEARSED) for run in self.runs) else VALID

    @property
    def counted(self) -> list[Run]:
        return [run for run in self.runs if not run.faults and run.minutes is not None]

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
        """What the logs say before run_start, apart from the seed: for each key the first value that any run gives."""
        settings: dict[str, object] = {}
        for run in self.runs:
            for event in itertools.takewhile(lambda event: event.key != "run_start", run.log.events):
                if isinstance(event.value, (str, int, float)) and event.key not in ("seed", "cache_clear"):
                    settings.setdefault(event.key, event.value)
        return settings

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
        yield f"{len(system.runs)} run{'s' * (len(system.runs) != 1)}; the rules ask for {RUNS}"
    if failed > 1 or failed == len(system.runs):
        bad = [run for run in system.runs if run.faults]
        names = ", ".join(run.name for run in bad[:3]) + (" ..." if bad[3:] else "")
        first = bad[0].faults[0]
        yield f"{failed} runs failed, at most 1 may: {names}; the first: {first}" if len(system.runs) > 1 else first
    for text in system.verdicts.seeds:
        yield f"seeds: {text}"
    convergence = system.verdicts.convergence
    if convergence and convergence.passed is False:
        yield f"convergence: {convergence.message}"


def _mixtures(runs: list[Run]) -> Iterator[str]:
    for key in SHARED:
        names: dict[str, list[str]] = {}
        for run in runs:
            if (value := run.log.value(key)) is not None:
                names.setdefault(str(value)[:60], []).append(run.name)
        if len(names) > 1:
            parts = (f"{value} in {files[0]}{' ...' * (len(files) > 1)}" for value, files in names.items())
            yield f"mixed {key}: {', '.join(parts)}; give each system a folder of its own"


def checks(system: System) -> list[str]:
    """The official checks and the score, in words."""
    verdicts = system.verdicts
    passed = sum(not complaints for complaints in verdicts.compliance)
    lines = [f"compliance: {passed} of {len(system.runs)} logs"]
    if check := verdicts.convergence:
        lines[0] += f"; seeds: {'refused' if verdicts.seeds else 'all different'}"
        outcome = {True: "passed", False: "failed", None: "not judged"}[check.passed]
        text = f"convergence: {outcome} ({check.message})"
        if check.reference_mean:
            text += f", reference {check.reference_mean:,.0f} samples, accepted from {check.least_mean:,.0f}"
            text += f", here {show(system.samples_to_converge, ',.0f')}"
        lines.append(text)
    else:
        lines[0] += "; open division: seeds and convergence are not checked"
    if system.olympic_mean_minutes is not None:
        lines.append(f"olympic mean: {system.olympic_mean_minutes:.2f} minutes")
        if system.score_minutes is not None:
            lines[-1] += f", normalised by {system.factor or 1:.4f}: {system.score_minutes:.2f} minutes"
    return lines


def show(value: float | None, form: str = ",.2f") -> str:
    """A figure as text; "-" for an unknown one."""
    return "-" if value is None else format(value, form)


def overview(system: System) -> dict[str, str]:
    """A row of the table of systems, by heading."""
    count = result_files.accelerators(system.machine)
    speed = system.mean("samples_per_s")
    return {
        "devices": show(count, ","),
        "batch": str(system.value("global_batch_size")),
        "runs": f"{len(system.counted)}/{len(system.runs)}",
        "olympic min": show(system.olympic_mean_minutes),
        "score min": show(system.score_minutes),
        "samples/s": show(speed, ",.0f"),
        "per device": show(speed / count if speed and count else None, ",.1f"),
    }
