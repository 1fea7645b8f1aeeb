"""The official checks of a system's logs, by mlperf-logging's own code: compliance, seeds, convergence.

The checkers talk through the root logger, read folders of result_*.txt, and end with a traceback at some damage. Here
they get links to the logs in a folder of their own, and what they say becomes lines.
"""

import io
import logging
import os
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from logging.handlers import BufferingHandler
from math import nan
from pathlib import Path
from typing import Any

from mlperf_logging.compliance_checker import mlp_compliance
from mlperf_logging.package_checker.seed_checker import SeedChecker
from mlperf_logging.rcp_checker import rcp_checker

from flux_ref import mlperf_closed
from tools.report.result_log import ResultLog

LEAST_RUNS = 3  # a mean without the best and the worst needs as many
# The compliance checker builds the name of a rule file from these values, and runs the code in that file.
SAFE = {"submission_division": ("closed", "open"), "submission_benchmark": ("flux1",)}


@dataclass
class Convergence:
    """The verdict of the convergence checker. passed: None if it did not judge; means in samples, NaN if unknown."""

    passed: bool | None
    message: str
    factor: float = 1.0  # of the time
    reference_mean: float = nan
    least_mean: float = nan


def check(
    logs: list[ResultLog], ruleset: str, points: Path | None = None
) -> tuple[list[list[str]], list[str], Convergence | None]:
    """Judge the logs of one system.

    points: a file of reference convergence points in place of the official ones.
    Returns: complaints about each log; in the closed division, complaints about the seeds, and the convergence.
    """
    file = io.StringIO(points.read_text()) if points else None
    with tempfile.TemporaryDirectory() as folder:
        links = {f"{folder}/result_{i}.txt": log for i, log in enumerate(logs)}
        for link, log in links.items():
            os.symlink(log.path, link)
        complaints = [_compliance(log, link, ruleset) for link, log in links.items()]
        if any(log.value("submission_division") == "open" for log in logs):
            return complaints, [], None
        with _asking("seed") as told:
            SeedChecker(ruleset).check_seeds(links)
        seeds = "\n".join(_lines(told, logging.ERROR)).rpartition("errors: ")[2]
        for link, log in links.items():
            seeds = seeds.replace(link, log.name)
        if len(logs) < LEAST_RUNS or (not points and any(log.value(mlperf_closed.REHEARSED) for log in logs)):
            convergence = Convergence(None, f"needs {LEAST_RUNS} runs; for a rehearsal also --points")
        else:
            convergence = _convergence(folder, ruleset, file)
        return complaints, seeds.splitlines(), convergence


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


def _convergence(folder: str, ruleset: str, points: io.StringIO | None) -> Convergence:
    answer = None
    with _asking("convergence") as told:
        answer = rcp_checker.check_directory(
            # with set_scaling=False the checker would remove scaling.json of the folder "", which is /
            folder,
            "training",
            ruleset,
            False,
            False,
            rcp_file=points,
            rcp_pass="pruned_rcps",
            set_scaling=True,
        )
    if answer is None:
        return Convergence(False, " ".join(_lines(told, logging.WARNING)))
    passed, message, factor = answer
    point: Any = next((record.args for record in told if record.msg == " RCP Record: %s"), {})
    return Convergence(passed, message, factor, point.get("RCP Mean", nan), point.get("Min Epochs", nan))


def _lines(told: list[logging.LogRecord], least: int) -> list[str]:
    return [record.getMessage().strip() for record in told if record.levelno >= least]


@contextmanager
def _asking(checker: str) -> Iterator[list[logging.LogRecord]]:
    """Collects what a checker logs in the block. An error ends the block and becomes a critical record."""
    handler = BufferingHandler(sys.maxsize)
    root = logging.getLogger()
    before = root.handlers, root.level
    root.handlers = [handler]
    root.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield handler.buffer
    except Exception as error:  # the checkers are not made for damaged logs
        why = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
        root.critical(f"the official {checker} checker stopped: {why}")
    finally:
        root.handlers, level = before
        root.setLevel(level)
