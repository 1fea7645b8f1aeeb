"""A plugin of pytest that writes down each outcome as its test ends, so that a call that is cut short loses none.

    python -m pytest -m gpu -p bench.device_tests -x --outcomes FILE.jsonl tests/gpu/test_gpu_graph.py ...

FILE.jsonl gets a line as a test begins and a line as it ends. A test that passed or failed does not run again, nor does
one that began twice and never ended: it hangs or crashes. After LIMIT_S a test is ended with its process, and stderr
says where it was. -x begins a new process after a failure: a device may be of no use to the old one. So the command is
called until it returns 0 or 5, as bench/gpu.sh does.
"""

import faulthandler
import json
import os
from collections import Counter
from pathlib import Path

from flux_ref import files

BEGUN = "begun"
FINAL = ("passed", "failed")  # a skipped test may find its package next time
LIMIT_S = 150.0  # of a test
STDERR = os.dup(2)  # pytest puts another file in its place
TRACE = 4000  # characters


class Outcomes:
    """The file of outcomes, and the hooks of pytest that use it."""

    def __init__(self, path: Path):
        self.path = path
        self.reports: list = []  # of the test that runs

    def finished(self) -> set[str]:
        """The tests that do not run again."""
        found = set()
        begun: Counter[str] = Counter()
        for text in self.path.read_text().splitlines() if self.path.exists() else []:
            line = files.json_object_or_empty(text) or {
                "test": "",
                "outcome": "",
            }  # a killed process may leave half a line
            if line["outcome"] == BEGUN:
                begun[line["test"]] += 1
            else:
                del begun[line["test"]]
            if line["outcome"] in FINAL or begun[line["test"]] > 1:
                found.add(line["test"])
        return found

    def write(self, test: str, outcome: str, reason: str = "") -> None:
        files.append(self.path, json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")

    def pytest_collection_modifyitems(self, config, items) -> None:
        finished = self.finished()
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in finished])
        items[:] = [item for item in items if item.nodeid not in finished]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.reports = []
        self.write(nodeid, BEGUN)
        faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=STDERR)

    def pytest_runtest_logreport(self, report) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        worst = next((report for report in self.reports if not report.passed), self.reports[-1])
        printed = "".join(f"\n{text}" for _, text in worst.sections)
        self.write(nodeid, worst.outcome, "" if worst.passed else f"{worst.longrepr}{printed}"[-TRACE:])


def pytest_addoption(parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True)


def pytest_configure(config) -> None:
    config.pluginmanager.register(Outcomes(config.getoption("outcomes")))
