"""The official checks of a system's logs, by mlperf-logging's own code: compliance, seeds, convergence.

These checkers write to the root logger, to stdout and to warnings, read folders of result_*.txt, and end with a
traceback at some damage. Here they get copies of the logs in a folder of their own, and their messages become lines.
"""

import contextlib
import io
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.package_checker.seed_checker import SeedChecker
from mlperf_logging.rcp_checker import rcp_checker

from flux_ref.benchmark import closed
from flux_ref.errors import Refusal
from flux_ref.formats.outside import read_json
from tools.report.result_log import ResultLog, number

BENCHMARK = "flux1"
LEAST_RUNS = 3  # a mean without the best and the worst needs as many
# The compliance checker builds the name of a rule file from these values, and runs the code in that file.
SAFE = {"submission_division": ("closed", "open"), "submission_benchmark": (BENCHMARK,)}


@dataclass
class Convergence:
    """The verdict of the convergence checker; passed is None if there are too few runs.

    factor multiplies the time; means are in samples, None if the checker gives none.
    """

    passed: bool | None
    message: str
    factor: float = 1.0
    reference_mean: float | None = None
    least_mean: float | None = None


@dataclass
class Verdicts:
    compliance: list[list[str]]  # complaints per log
    seeds: list[str] = field(default_factory=list)  # complaints
    convergence: Convergence | None = None  # None: the open division has no such check


def require_points(path: Path) -> None:
    """Raises: Refusal if a file holds no reference convergence points; OSError if it cannot be read."""
    points = read_json(path, "reference points").values()
    if not points or not all(isinstance(point, dict) and point.get("Benchmark") == BENCHMARK for point in points):
        raise Refusal(
            f"{path} is no file of reference convergence points for {BENCHMARK}; it wants mlperf-logging's format,"
            " see its rcp_checker/training_6.0.0/rcps_flux1.json"
        )


def check(logs: list[ResultLog], ruleset: str, points: Path | None = None) -> Verdicts:
    """Judge the logs of one system. points: a file of reference convergence points in place of the official ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = [folder / f"result_{i}.txt" for i in range(len(logs))]
        for path, log in zip(paths, logs):
            path.write_text("".join(log.lines.values()), encoding="latin-1", newline="")
        verdicts = Verdicts([_compliance(log, path, ruleset) for log, path in zip(logs, paths)])
        if any(log.value("submission_division") == "open" for log in logs):
            return verdicts
        if resumed := [log.name for log in logs if log.is_resumed]:
            verdicts.seeds = [
                f"{', '.join(resumed)}: a resumed run logs its seed at each start, so seeds are not judged"
            ]
        else:
            complaints = "\n".join(_seeds([str(path) for path in paths], ruleset))
            for path, log in zip(paths, logs):
                complaints = complaints.replace(str(path), log.name)
            verdicts.seeds = list(dict.fromkeys(line[:300] for line in complaints.splitlines()))
        if points or not any(log.value(closed.REHEARSED) for log in logs):
            verdicts.convergence = _convergence(folder, len(logs), ruleset, points)
        else:
            verdicts.convergence = Convergence(None, "the official points are not for a rehearsal; give --points")
        return verdicts


def _compliance(log: ResultLog, path: Path, ruleset: str) -> list[str]:
    for key, allowed in SAFE.items():
        for event in log.all(key):
            if event.value not in allowed:
                return [f"{key} is {str(event.value)[:60]!r}, not {' or '.join(allowed)}; not checked further"]
    checker = mlp_compliance.make_checker("training", ruleset, quiet=True, werror=False)
    mlp_compliance.enqueued_configs.clear()  # a check that stopped half way leaves configs behind
    with _captured():
        try:
            checker.check_file(str(path), f"training_{ruleset}/common.yaml")
        except Exception as error:  # the checker is not made for damaged logs
            return [_stopped("compliance", error)]
    return [_one_line(message, log) for message in (*checker.overwritable.values(), *checker.not_overwritable)]


def _one_line(message: str, log: ResultLog) -> str:
    """The first line of a complaint, the test that failed, and the value it failed for."""
    head = message.split("\n")[0].rstrip(" :")
    if head.startswith(("Failed checks for eval_accuracy", "Failed checks for averaged_validation_loss")):
        return "no evaluation reached the target: " + head.partition(" : ")[2]
    test = re.search(r"^failed test: (.*)$", message, re.M)
    at = re.fullmatch(r"CHECK for '(.*)' failed in line (\d+)", head)
    if not at or not test:
        return head + (f": {test[1].strip()}" if test else "")
    line = list(log.lines)[int(at[2])]
    value = next((event.value for event in log.events if event.line == line), None)
    return f"{at[1]}={str(value)[:40]} in line {line} fails the test {test[1].strip()}"


def _seeds(paths: list[str], ruleset: str) -> list[str]:
    with _captured() as records:
        try:
            passed = SeedChecker(ruleset).check_seeds(paths)
        except Exception as error:
            return [_stopped("seed", error)]
    if passed:
        return []
    text = "\n".join(record.getMessage() for record in records if record.levelno >= logging.ERROR)
    lines = text.partition("errors: ")[2].split("\n")
    found = [line for line in lines if line.startswith(("Result file", "Error found"))]
    return found or ["the official seed checker refuses the seeds and gives no reason"]


def _convergence(folder: Path, runs: int, ruleset: str, points: Path | None) -> Convergence:
    own_points = points.open(encoding="utf-8") if points else contextlib.nullcontext()
    with _captured() as records, own_points as file:
        try:  # with set_scaling=False the checker would remove scaling.json of the folder "", which is /
            passed, message, factor = rcp_checker.check_directory(
                str(folder), "training", ruleset, False, False, rcp_file=file, rcp_pass="pruned_rcps", set_scaling=True
            )
        except Exception as error:
            warned = [record.getMessage().strip() for record in records if record.levelno >= logging.WARNING]
            return Convergence(False, " ".join(warned) or _stopped("convergence", error))
    point = next((record.args for record in records if record.msg == " RCP Record: %s"), {})
    passed, message = (bool(passed), message) if runs >= LEAST_RUNS else (None, f"needs {LEAST_RUNS} runs")
    mean = point.get("RCP Mean")
    least = point.get("Min Epochs")
    return Convergence(passed, message, float(factor), number(mean and float(mean)), number(least and float(least)))


@contextlib.contextmanager
def _captured() -> Iterator[list[logging.LogRecord]]:
    """Collects what is logged in the block, and swallows what it prints and warns of."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    root = logging.getLogger()
    kept = root.handlers[:]
    level = root.level
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    sink = io.StringIO()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield records
    finally:
        root.handlers[:] = kept
        root.setLevel(level)


def _stopped(checker: str, error: Exception) -> str:
    why = str(error).splitlines()[0][:120] if str(error) else "no reason given"
    return f"the official {checker} checker stopped: {type(error).__name__}: {why}"
