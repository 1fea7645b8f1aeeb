"""The official checks of a system's logs, by mlperf-logging's own code: compliance, seeds, convergence.

The checkers talk through the root logger, read folders of result_*.txt, and end with a traceback at some damage. Here
they get links to the logs in a folder of their own, and what they say becomes lines.
"""

import io
import logging
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.package_checker.seed_checker import SeedChecker
from mlperf_logging.rcp_checker import rcp_checker

from flux_ref.benchmark import closed
from flux_ref.errors import Refusal
from flux_ref.files import read_json
from tools.report.result_log import ResultLog, number

BENCHMARK = "flux1"
LEAST_RUNS = 3  # a mean without the best and the worst needs as many
# The compliance checker builds the name of a rule file from these values, and runs the code in that file.
SAFE = {"submission_division": ("closed", "open"), "submission_benchmark": (BENCHMARK,)}


@dataclass
class Convergence:
    """The verdict of the convergence checker. passed: None if it did not judge; means in samples, None if unknown."""

    passed: bool | None
    message: str
    factor: float = 1.0  # of the time
    reference_mean: float | None = None
    least_mean: float | None = None


def require_points(path: Path) -> None:
    """Raises: Refusal if a file holds no reference convergence points."""
    points = read_json(path, "reference points").values()
    if not points or not all(isinstance(point, dict) and point.get("Benchmark") == BENCHMARK for point in points):
        raise Refusal(
            f"{path} is no file of reference convergence points for {BENCHMARK}; it wants mlperf-logging's format,"
            " see its rcp_checker/training_6.0.0/rcps_flux1.json"
        )


def check(
    logs: list[ResultLog], ruleset: str, points: Path | None = None
) -> tuple[list[list[str]], list[str], Convergence | None]:
    """Judge the logs of one system.

    points: a file of reference convergence points in place of the official ones.
    Returns: complaints about each log; in the closed division, complaints about the seeds, and the convergence.
    """
    with tempfile.TemporaryDirectory() as folder:
        names = {}
        for i, log in enumerate(logs):
            link = Path(folder, f"result_{i}.txt")
            link.symlink_to(log.path.resolve())
            names[str(link)] = log.name
        complaints = [_compliance(log, path, ruleset) for log, path in zip(logs, names)]
        if any(log.value("submission_division") == "open" for log in logs):
            return complaints, [], None
        if any(log.value(closed.REHEARSED) for log in logs) and not points:
            convergence = Convergence(None, "the official points are not for a rehearsal; give --points")
        else:
            convergence = _convergence(folder, len(logs), ruleset, points)
        return complaints, _seeds(names, ruleset), convergence


def _compliance(log: ResultLog, path: str, ruleset: str) -> list[str]:
    for key, allowed in SAFE.items():
        for event in log.all(key):
            if event.value not in allowed:
                return [f"{key} is {str(event.value)[:60]!r}, not {' or '.join(allowed)}; not checked further"]
    checker = mlp_compliance.make_checker("training", ruleset, quiet=True, werror=False)
    mlp_compliance.enqueued_configs.clear()  # a check that stopped half way leaves configs behind
    with _asking("compliance") as told:
        checker.check_file(path, f"training_{ruleset}/common.yaml")
    complaints = [*_lines(told, logging.CRITICAL), *checker.overwritable.values(), *checker.not_overwritable]
    return [textwrap.shorten(text.partition("\ncurrent ")[0], 300) for text in complaints]


def _seeds(names: dict[str, str], ruleset: str) -> list[str]:
    """names: of the logs by their paths."""
    with _asking("seed") as told:
        SeedChecker(ruleset).check_seeds(list(names))
    text = "\n".join(line.rpartition("errors: ")[2] for line in _lines(told, logging.ERROR))
    for path, name in names.items():
        text = text.replace(path, name)
    return [line[:300] for line in text.splitlines()]


def _convergence(folder: str, runs: int, ruleset: str, points: Path | None) -> Convergence:
    file = io.StringIO(points.read_text()) if points else None
    answer = None
    with _asking("convergence") as told:
        answer = rcp_checker.check_directory(
            # with set_scaling=False the checker would remove scaling.json of the folder "", which is /
            folder,
            "training",
            ruleset,
            False,
            False,
            rcp_file=file,
            rcp_pass="pruned_rcps",
            set_scaling=True,
        )
    if answer is None:
        return Convergence(False, " ".join(_lines(told, logging.WARNING)))
    passed, message, factor = answer
    if runs < LEAST_RUNS:
        passed, message = None, f"needs {LEAST_RUNS} runs"
    point = next((record.args for record in told if record.msg == " RCP Record: %s"), {})
    return Convergence(
        passed, message, float(factor), *(number(point.get(name)) for name in ("RCP Mean", "Min Epochs"))
    )


def _lines(told: list[logging.LogRecord], least: int) -> list[str]:
    return [record.getMessage().strip() for record in told if record.levelno >= least]


@contextmanager
def _asking(checker: str) -> Iterator[list[logging.LogRecord]]:
    """Collects what a checker logs in the block. An error ends the block and becomes a critical record."""
    told: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = told.append
    root = logging.getLogger()
    before = root.handlers, root.level
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield told
    except Exception as error:  # the checkers are not made for damaged logs
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        root.critical(f"the official {checker} checker stopped: {why}")
    finally:
        root.handlers = before[0]
        root.setLevel(before[1])
