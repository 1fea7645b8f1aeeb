"""The figures of benchmark runs, and the verdict on the system that ran them.

Source: MLPerf's training rules and mlperf-logging's result_summarizer.
"""

from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from statistics import fmean
from typing import Any

from flux_ref.cli import printable
from flux_ref.mlperf_closed import FIXED, OFFICIAL, REHEARSAL, REHEARSED, find_departures
from flux_ref.mlperf_log import RESUMED
from tools.figures import table
from tools.report import official
from tools.report.official import Convergence
from tools.report.result_log import ResultLog, home_of, number

RUNS = 10  # of a submission; the mean leaves out the best and the worst
INVALID = "not a valid result"
VALID = "valid result"
PASSING_REHEARSAL = f"passes the checks as a {REHEARSAL}"
SHARED = (  # settings that all runs of a system must share
    "submission_org",
    "submission_platform",
    "submission_division",
    "submission_benchmark",
    "global_batch_size",
    "opt_base_learning_rate",
    "opt_learning_rate_warmup_steps",
    "gradient_accumulation_steps",
)
SETTINGS = (*SHARED, "target_accuracy", "seed", REHEARSED)


@dataclass
class Run:
    """The figures of one log; a figure that the log does not give is NaN or empty."""

    name: str
    file: str
    settings: dict[str, Any]  # by key, those of SETTINGS that the log has
    faults: list[str]  # why the run does not count; empty if it counts
    val_curve: list[tuple[float, float]] = field(default_factory=list)  # (samples, loss)
    samples: float = nan  # at the last evaluation, as in the convergence checker
    minutes: float = nan  # from run_start to run_stop
    samples_per_s: float = nan  # with the time of evaluations


@dataclass
class System:
    """The runs of one system and the verdict. A figure that is not known is NaN."""

    name: str
    runs: list[Run]
    convergence: Convergence | None  # None: the open division has no such check
    reasons: list[str]  # why it is no valid result; empty for a valid one
    verdict: str = INVALID
    samples_to_converge: float = nan  # the olympic mean of ten runs; the plain mean of another number of runs
    samples_per_s: float = nan  # the mean over the runs that count
    olympic_mean_minutes: float = nan  # not normalised
    score_minutes: float = nan  # the official result: the olympic mean times the checker's factor

    def value(self, key: str) -> Any:
        """The first value that any run gives for one of SETTINGS."""
        return next((run.settings[key] for run in self.runs if key in run.settings), None)


def measure(log: ResultLog, complaints: list[str]) -> Run:
    """The figures of one log. complaints: of the compliance checker; what else contradicts a timed run is added."""
    start = log.first("run_start")
    stop = log.first("run_stop")  # other ranks may repeat it
    settings = {key: value for key in SETTINGS if (value := log.value(key)) is not None}
    run = Run(log.name, str(log.path), settings, [])
    if stop and (status := stop.metadata.get("status")) != "success":
        run.faults.append(f"run_stop has status {status!r}: {printable(stop.metadata.get('reason'))}"[:300])

    timed = log.events
    disqualified = dict.fromkeys(printable(event.value)[:200] for event in log.all("disqualified"))
    if not start or not stop:
        run.faults.append(f"{'run_stop' if start else 'run_start'} is missing: the run was cut off or still goes on")
    elif not any(text.startswith(RESUMED) for text in disqualified):  # the parts of a run have no common clock
        run.minutes = (stop.time_ms - start.time_ms) / 60 / 1000  # rounded as in the official summarizer
        timed = [event for event in timed if start.time_ms <= event.time_ms <= stop.time_ms]

    run.faults += [*disqualified, *complaints]
    if log.value("submission_division") == "closed":
        found = {key: log.value(OFFICIAL.get(key, key)) for key in FIXED}
        run.faults += find_departures(found, bool(log.value(REHEARSED)))

    losses = {}
    for event in timed:
        samples = number(event.metadata.get("samples_count"))
        if event.key == "eval_accuracy" and samples > 0 and number(event.value) > 0:
            losses[samples] = event.value  # several ranks may write it

    run.val_curve = sorted(losses.items())
    run.samples = max(losses, default=nan)
    if run.minutes > 0:
        run.samples_per_s = run.samples / (60 * run.minutes)
    if not run.samples_per_s > 0 and not run.faults:
        run.faults.append("no loss between run_start and run_stop; was the clock set?")
    return run


def olympic_mean(values: list[float]) -> float:
    """The mean of ten values without the best and the worst. With nine values, the tenth was the worst."""
    return fmean(sorted(values)[1 : RUNS - 1])


def judge(name: str, paths: list[Path], ruleset: str, points: Path | None = None) -> System:
    """All figures of one system, and the verdict by the rules and by mlperf-logging's checkers."""
    home = home_of(paths)
    logs = [ResultLog(path, home, ruleset) for path in paths]
    complaints, seeds, convergence = official.check(logs, ruleset, points)
    runs = [measure(log, faults) for log, faults in zip(logs, complaints)]
    system = System(name, runs, convergence, mixtures(runs))
    counted = [run for run in runs if not run.faults]  # all have a rate
    if counted and not system.reasons:
        is_whole = len(runs) == RUNS and len(counted) >= RUNS - 1
        mean = olympic_mean if is_whole else fmean
        system.samples_to_converge = mean([run.samples for run in counted])
        system.samples_per_s = fmean(run.samples_per_s for run in counted)
        if is_whole:
            system.olympic_mean_minutes = mean([run.minutes for run in counted])

    failed = [run for run in runs if run.faults]
    if len(runs) != RUNS:
        system.reasons.append(f"{len(runs)} of the {RUNS} runs that the rules ask for")
    if len(failed) > 1 or len(failed) == len(runs):
        system.reasons.append(f"{len(failed)} failed runs, at most 1 may; {failed[0].name}: {failed[0].faults[0]}")
    system.reasons += [f"seeds: {text}" for text in seeds]
    if convergence and convergence.passed is False:
        system.reasons.append(
            f"convergence: {convergence.message}; {text(system.samples_to_converge)} samples to the target,"
            f" accepted from {text(convergence.least_mean)}"
        )

    if not system.reasons:
        system.verdict = PASSING_REHEARSAL if system.value(REHEARSED) else VALID
    if system.verdict == VALID:
        system.score_minutes = system.olympic_mean_minutes * (convergence.factor if convergence else 1.0)
    return system


def text(value: Any, form: str = ",.0f") -> str:
    """A figure as text; "-" for an unknown one."""
    return "-" if value is None or value != value else format(value, form)


def mixtures(runs: list[Run]) -> list[str]:
    """Why runs do not belong together."""
    found = []
    for key in SHARED:
        values = sorted({str(run.settings[key])[:60] for run in runs if key in run.settings})
        if len(values) > 1:
            found.append(f"mixed {key}: {', '.join(values)}; give each system a folder of its own")
    return found


SHOWN_FAULTS = 3  # of a run


def describe(systems: list[System]) -> str:
    """Each system, and a table of all if there are several."""
    parts = [lines(system) for system in systems]
    if len(systems) > 1:
        rows = [
            (
                system.name,
                text(system.value("global_batch_size"), ""),
                str(len(system.runs)),
                text(system.olympic_mean_minutes, ",.2f"),
                text(system.score_minutes, ",.2f"),
                text(system.samples_per_s),
            )
            for system in systems
        ]
        parts.append(table(("system", "batch", "runs", "olympic min", "score min", "samples/s"), rows))
    return "\n\n".join("\n".join(map(printable, part)) for part in parts)


def lines(system: System) -> list[str]:
    """The verdict, what ran, a row for each run, their faults, the checks and the reasons."""
    keys = ("submission_org", "submission_platform", "global_batch_size", "opt_base_learning_rate")
    org, platform, batch, lr = (text(system.value(key), "") for key in keys)
    told = [
        f"{system.name}: {system.verdict}",
        f"org {org}, platform {platform}, global batch {batch}, lr {lr}",
    ]
    told += table(
        ("run", "minutes", "samples", "samples/s"),
        [(run.name, text(run.minutes, ",.2f"), text(run.samples), text(run.samples_per_s)) for run in system.runs],
    )
    for run in system.runs:
        told += [f"{run.name} failed: {fault}" for fault in run.faults[:SHOWN_FAULTS]]

    check = system.convergence
    if check:
        outcome = {True: "passed", False: "failed", None: "not judged"}[check.passed]
        told.append(
            f"convergence: {outcome} ({check.message}), reference {text(check.reference_mean)} samples,"
            f" accepted from {text(check.least_mean)}, here {text(system.samples_to_converge)}"
        )

    if system.olympic_mean_minutes > 0:
        told.append(
            f"olympic mean: {system.olympic_mean_minutes:,.2f} minutes;"
            f" normalised: {text(system.score_minutes, ',.2f')}"
        )
    return told + [f"not valid: {reason}" for reason in system.reasons]
