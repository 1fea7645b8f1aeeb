"""The figures of benchmark runs, and the verdict on the system that ran them.

Source: MLPerf's training rules and mlperf-logging's result_summarizer.
"""

import statistics
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flux_ref.benchmark import closed
from flux_ref.benchmark.mllog import RESUMED
from tools.report import official, result_log
from tools.report.official import Convergence
from tools.report.result_log import ResultLog, number

RUNS = 10  # of a submission; the mean leaves out the best and the worst
INVALID, VALID, PASSING_REHEARSAL = "not a valid result", "valid result", f"passes the checks as a {closed.REHEARSAL}"
# Settings that all runs of a system must share.
SHARED = (
    *("submission_org", "submission_platform", "submission_division", "submission_benchmark", "global_batch_size"),
    *("opt_base_learning_rate", "opt_learning_rate_warmup_steps", "gradient_accumulation_steps"),
)
SETTINGS = (*SHARED, "target_accuracy", "seed", closed.REHEARSED)


@dataclass
class Run:
    """The figures of one log; a figure that the log does not give is None or empty."""

    name: str
    file: str
    settings: dict[str, object]  # by key, those of SETTINGS that the log has
    faults: list[str]  # why the run does not count; empty if it counts
    val_curve: list[tuple[float, float]] = field(default_factory=list)  # (samples, loss)
    samples: float | None = None  # at the last evaluation, as in the convergence checker
    minutes: float | None = None  # from run_start to run_stop
    samples_per_s: float | None = None
    training_samples_per_s: float | None = None  # without the time of evaluations


@dataclass
class System:
    """The runs of one system and the verdict. A figure that is not known is None."""

    name: str
    runs: list[Run]
    devices: int | None
    device: str  # their model
    seeds: list[str]  # complaints
    convergence: Convergence | None  # None: the open division has no such check
    verdict: str = INVALID
    reasons: list[str] = field(default_factory=list)  # why it is no valid result; empty for a valid one
    samples_to_converge: float | None = None  # the olympic mean of ten runs; the plain mean of another number of runs
    samples_per_s: float | None = None  # the mean over the runs that count
    olympic_mean_minutes: float | None = None  # not normalised
    score_minutes: float | None = None  # the official result: the olympic mean times the checker's factor

    def value(self, key: str) -> object:
        """The first value that any run gives for one of SETTINGS."""
        return next((run.settings[key] for run in self.runs if key in run.settings), None)


def measure(log: ResultLog, complaints: list[str]) -> Run:
    """The figures of one log. complaints: of the compliance checker; what else contradicts a timed run is added."""
    settings = {key: value for key in SETTINGS if (value := log.value(key)) is not None}
    run = Run(log.name, str(log.path), settings, [*_departures(log), *complaints])
    stop = next(iter(log.all("run_stop")), None)  # other ranks may repeat it
    starts = [event for event in log.all("run_start") if not stop or event.place < stop.place]
    inside = log.events
    if not starts or not stop:
        missing = "run_stop" if starts else "run_start"
        run.faults.insert(0, f"{missing} is missing: the run was cut off or still goes on")
    elif not any(str(event.value).startswith(RESUMED) for event in log.all("disqualified")):
        inside = log.events[starts[-1].place : stop.place]
        run.minutes = (stop.time_ms - starts[-1].time_ms) / 60 / 1000  # rounded as in the official summarizer
        if run.minutes <= 0 or log.all("run_start")[-1].time_ms > stop.time_ms:
            run.faults.append("run_stop is not later than run_start: two runs in one file, or a clock that was set")
    if stop and stop.metadata.get("status") != "success":
        reason = textwrap.shorten(str(stop.metadata.get("reason", "")), 300)
        run.faults.insert(0, f"run_stop has status {stop.metadata.get('status')!r}: {reason}")
    losses: dict[float, float] = {}
    for event in inside:
        samples = number(event.metadata.get("samples_count"))
        loss = number(event.value)
        if event.key == "eval_accuracy" and samples is not None and loss is not None:
            losses[samples] = loss  # several ranks may write it
    run.val_curve = sorted(losses.items())
    if losses:
        run.samples = max(losses)
    if run.samples and run.minutes:
        begins, ends = ([event.time_ms for event in inside if event.key == key] for key in ("eval_start", "eval_stop"))
        evaluation_s = sum(end - begin for begin, end in zip(begins, ends)) / 1000
        run.samples_per_s = run.samples / (60 * run.minutes)
        run.training_samples_per_s = run.samples / (60 * run.minutes - evaluation_s)
    return run


def _departures(log: ResultLog) -> Iterator[str]:
    """What the log itself says against the run, and its values that the closed division forbids."""
    yield from dict.fromkeys(str(event.value)[:200] for event in log.all("disqualified"))
    if log.value("submission_division") == "closed":
        found = {key: log.value(closed.OFFICIAL.get(key, key)) for key in closed.FIXED}
        yield from closed.judge(found, bool(log.value(closed.REHEARSED)))


def olympic_mean(values: list[float]) -> float:
    """The mean of ten values without the best and the worst. With nine values, the tenth was the worst."""
    return statistics.fmean(sorted(values)[1 : RUNS - 1])


def judge(name: str, paths: list[Path], ruleset: str, points: Path | None = None) -> System:
    """All figures of one system, and the verdict by the rules and by mlperf-logging's checkers."""
    logs = result_log.read(paths, ruleset)
    complaints, seeds, convergence = official.check(logs, ruleset, points)
    runs = [measure(log, faults) for log, faults in zip(logs, complaints)]
    system = System(name, runs, *result_log.machine(paths[0]), seeds, convergence)
    counted = [run for run in runs if run.samples and run.minutes and run.samples_per_s and not run.faults]
    mixtures = list(_mixtures(runs))
    if counted and not mixtures:
        is_whole = len(runs) == RUNS and len(counted) >= RUNS - 1
        mean = olympic_mean if is_whole else statistics.fmean
        system.samples_to_converge = mean([run.samples for run in counted])
        system.samples_per_s = statistics.fmean(run.samples_per_s for run in counted)
        system.olympic_mean_minutes = mean([run.minutes for run in counted]) if is_whole else None
    system.reasons = [*mixtures, *_reasons(system)]
    if not system.reasons:
        system.verdict = PASSING_REHEARSAL if system.value(closed.REHEARSED) else VALID
    if system.verdict == VALID and system.olympic_mean_minutes:
        system.score_minutes = system.olympic_mean_minutes * (convergence.factor if convergence else 1.0)
    return system


def _reasons(system: System) -> Iterator[str]:
    """Why a system is no valid result, apart from mixtures; the gravest first."""
    failed = [run for run in system.runs if run.faults]
    if (count := len(system.runs)) != RUNS:
        yield f"{count} run{'s' if count > 1 else ''}; the rules ask for {RUNS}"
    if len(failed) > 1 or len(failed) == count:
        yield f"{len(failed)} failed runs, at most 1 may; {failed[0].name}: {failed[0].faults[0]}"
    for text in system.seeds:
        yield f"seeds: {text}"
    if (check := system.convergence) and check.passed is False:
        here, least = system.samples_to_converge, check.least_mean
        numbers = f"; {here:,.0f} samples to the target, accepted from {least:,.0f}" if here and least else ""
        yield f"convergence: {check.message}{numbers}"


def _mixtures(runs: list[Run]) -> Iterator[str]:
    for key in SHARED:
        values = sorted({str(run.settings[key])[:60] for run in runs if key in run.settings})
        if len(values) > 1:
            yield f"mixed {key}: {', '.join(values)}; give each system a folder of its own"
