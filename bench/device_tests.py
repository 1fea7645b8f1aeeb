"""Tests marked gpu, whose outcomes are written down as they come. A call that is cut short loses none of them.

    python -m bench.device_tests [--outcomes FILE.jsonl] tests/speed/test_gpu_graph.py ...

A test that passed, failed or died does not run again, until a source or the machine changes. A test that takes more
than LIMIT_S is ended with its process: it has died, as one that crashes, and FILE.jsonl says where it was. Behind a
test that failed or died, a new process goes on. With --stand-in a CPU stands in for an accelerator.
Exit codes: 0 every test has an outcome, whatever it is; 2 refused; 3 the tests could not be collected.
"""

import argparse
import faulthandler
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from bench import common
from bench.sources import ROOT, TESTS, sources
from flux_ref.errors import Fault
from flux_ref.formats import files, jsonl
from flux_ref.run import cli
from flux_ref.run.options import Options
from tools.shared import json_option

BEGUN = "begun"  # the outcome of a test that has not come to its end
FINAL = ("passed", "failed", "died")  # a skipped test may find its package next time
PASSED, FAILED, NONE_LEFT = 0, 1, 5  # exit codes of pytest
STDERR = os.dup(2)  # pytest puts another file in its place
LIMIT_S = 150.0  # of a test
TRACE = 4000  # characters


class Outcomes:
    """The file of outcomes: an object a line, of a test or of the end of pytest; key: the sources and the machine."""

    def __init__(self, path: Path):
        self.path, self.key = path, f"{sources(TESTS)} {common.machine()}"

    def write(self, **record: object) -> None:
        files.append(self.path, json.dumps({"key": self.key} | record) + "\n")

    def lines(self) -> list[dict]:
        """What these sources have written on this machine, in order."""
        text = self.path.read_text() if self.path.exists() else ""
        records = [jsonl.parsed(line) or {} for line in text.splitlines()]
        return [record for record in records if record.get("key") == self.key]

    def tests(self) -> dict[str, dict]:
        """The last outcome of each test that has come to its end."""
        return {line["test"]: line for line in self.lines() if line.get("outcome", BEGUN) != BEGUN}


class Plugin:
    """Inside pytest: leaves out what has a final outcome, and writes down the rest."""

    def __init__(self, outcomes: Outcomes, limit_s: float):
        self.outcomes, self.limit_s = outcomes, limit_s
        self.reports, self.begin = [], 0.0

    def pytest_collection_modifyitems(self, config, items) -> None:
        final = {name for name, one in self.outcomes.tests().items() if one["outcome"] in FINAL}
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in final])
        items[:] = [item for item in items if item.nodeid not in final]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.reports, self.begin = [], time.monotonic()
        self.outcomes.write(test=nodeid, outcome=BEGUN)
        faulthandler.dump_traceback_later(self.limit_s, exit=True, file=STDERR)

    def pytest_runtest_logreport(self, report) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        worst = next((report for report in self.reports if not report.passed), self.reports[-1])
        seconds = round(time.monotonic() - self.begin, 2)
        self.outcomes.write(test=nodeid, outcome=worst.outcome, seconds=seconds, **reason_of(worst))

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.outcomes.write(ended=int(exitstatus))


def reason_of(report) -> dict[str, str]:
    """Why a test did not pass: a line, and of a failure the end of its traceback and of what it printed."""
    if report.passed:
        return {}
    if report.skipped:
        return {"reason": report.longrepr[2]}
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash else str(report.longrepr)
    printed = "\n".join(text for _, text in report.sections)
    return {"reason": message.strip().partition("\n")[0], "trace": f"{report.longrepr}\n{printed}"[-2 * TRACE :]}


def pytest_addoption(parser) -> None:
    parser.addoption("--outcomes", type=Path)
    parser.addoption("--limit", type=float)


def pytest_configure(config) -> None:
    config.pluginmanager.register(Plugin(Outcomes(config.getoption("outcomes")), config.getoption("limit")))


def run(tests: list[str], outcomes: Outcomes, stand_in: bool, limit_s: float = LIMIT_S) -> None:
    """Run pytest until every test has an outcome. Raises: Fault.

    After a failure or a death the tests behind it run in a new process: a device may be of no use to the old one.
    """
    own = ["-p", "bench.device_tests", f"--outcomes={outcomes.path.absolute()}", f"--limit={limit_s}"]
    own += ["-p", "no:faulthandler", "-x", "--tb=short", *["--stand-in"] * stand_in]  # its own handler ends our limit
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *own, *tests]
    while True:
        before = len(outcomes.lines())
        with tempfile.TemporaryFile("w+") as errors:  # what a test has started may hold a pipe open for ever
            code = subprocess.run(command, cwd=ROOT, stderr=errors, preexec_fn=common.end_with_parent).returncode
            errors.seek(0)
            said = errors.read()[-TRACE:]
        print(said, file=sys.stderr)
        new = outcomes.lines()[before:]
        last = new[-1] if new else {}
        if last.get("ended") in (PASSED, NONE_LEFT):
            return
        if last.get("outcome") == BEGUN:
            reason = f"exit code {code}; a test may take {limit_s:g} s"
            outcomes.write(test=last["test"], outcome="died", reason=reason, trace=said)
        elif last.get("ended") != FAILED or not any("test" in line for line in new):
            raise Fault(f"pytest ended with {code} and ran no test to its end; the lines above say why", alone=True)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options. Raises: Refusal."""
    parser = Options("python -m bench.device_tests", __doc__)
    json_option.json_option(parser)
    parser.add_argument("--outcomes", type=Path, default=ROOT / "bench" / "results" / "gpu_tests.jsonl")
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("tests", nargs="+")
    return parser.parse_args(argv), []


def main(argv: list[str]) -> int:
    args, _ = parse(argv)
    outcomes = Outcomes(args.outcomes)
    run(args.tests, outcomes, args.stand_in)
    device = torch.accelerator.current_accelerator(check_available=True)
    tests = {name: one for name, one in outcomes.tests().items() if name.startswith(tuple(args.tests))}
    figures = {"counts": Counter(one["outcome"] for one in tests.values()), "tests": tests}
    common.give(common.head("bench.device_tests", argv, device) | figures, args.json)
    return 0


if __name__ == "__main__":
    cli.leave(cli.run("bench.device_tests", __doc__, main, sys.argv[1:]))
