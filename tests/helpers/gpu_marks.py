"""A plugin of pytest for tests marked gpu: where they run, what they lack, and what stands in for a device.

pytest                       on a CPU, also where there is a device
pytest -m gpu                on a device; a package that is missing skips what needs it and says so
pytest -m gpu --stand-in     on a CPU; ends with a table of the tests and what stood in for a device
"""

import os
from collections.abc import Callable, Iterator

import pytest
import stand_in
import torch

from flux_ref import ranks, sharding
from flux_ref.config import ParallelConfig

NO_DEVICE = "no accelerator; --stand-in lets a CPU stand in for it"


def pytest_addoption(parser) -> None:
    parser.addoption("--stand-in", action="store_true", help="run tests marked gpu on a CPU")


def pytest_configure(config) -> None:
    if config.getoption("stand_in") or config.option.markexpr != "gpu":  # other tests compare bits of a CPU
        os.environ.update(dict.fromkeys(ranks.VISIBLE, ""))
    if config.getoption("stand_in"):
        config.pluginmanager.register(Table())


def how_to_bring(package: str) -> str:
    """Why a test is skipped without a package, and what brings the package to a machine without a registry."""
    return f"needs {package}; pip install --no-deps --target FOLDER {package}, then set PYTHONPATH=FOLDER"


class ModuleOfTests(pytest.Module):
    """A module whose missing package skips the module, where only tests marked gpu are asked for.

    A machine with a device may lack packages. CI has all of them and asks with --stand-in: there it is an error.
    """

    def collect(self):
        try:
            return super().collect()
        except self.CollectError as error:
            if self.config.getoption("stand_in") or not isinstance(error.__cause__, ModuleNotFoundError):
                raise
            missing = error.__cause__.name.partition(".")[0]
            pytest.skip(how_to_bring(missing.replace("_", "-")), allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if parent.config.option.markexpr == "gpu":
        return ModuleOfTests.from_parent(parent, path=module_path)
    return None


@pytest.fixture(autouse=True)
def device_or_stand_in(request, monkeypatch) -> Iterator[None]:
    """A test marked gpu gets a device or its stand-in, or is skipped."""
    if not request.node.get_closest_marker("gpu") or torch.accelerator.is_available():
        yield
        return
    if not request.config.getoption("stand_in"):
        pytest.skip(NO_DEVICE)
    stand_in.USED.clear()
    stand_in.install(monkeypatch.setattr)
    yield
    request.node.user_properties.append(("stand-ins", ", ".join(sorted(stand_in.USED))))


@pytest.fixture
def device(device_or_stand_in) -> torch.device:
    """The first accelerator, or the CPU that stands in for it."""
    if not torch.accelerator.is_available():
        return stand_in.CPU
    return torch.device(torch.accelerator.current_accelerator().type, 0)


@pytest.fixture
def world() -> Iterator[ranks.World]:
    """One rank on that device. Afterwards the compiler is as it was before."""
    yield ranks.start(ParallelConfig())
    sharding.permit_compilation()
    torch._dynamo.reset()
    ranks.stop()


@pytest.fixture
def on_both(device_or_stand_in, monkeypatch) -> Callable:
    """on_both(function): what a function of a world gives on that device, and then on the CPU."""

    def run(function: Callable) -> list:
        found = []
        for _ in range(2):
            try:
                found.append(function(ranks.start(ParallelConfig())))
            finally:
                ranks.stop()
            monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
            monkeypatch.setattr(ranks, "_device", lambda local_rank: torch.device("cpu"))
        return found

    return run


@pytest.fixture
def deterministic(monkeypatch) -> Iterator[None]:
    """Bit for bit needs kernels that add in a fixed order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def train_py() -> None:
    """Skips a test that starts train.py where the package of the benchmark's log is missing."""
    pytest.importorskip("mlperf_logging", reason=how_to_bring("mlperf-logging"))


class Table:
    """The stand-ins that each test used. A test that was skipped has not run, so it fails the session."""

    def __init__(self):
        self.rows: dict[str, str] = {}

    def pytest_runtest_logreport(self, report) -> None:
        if not report.passed:
            self.rows[report.nodeid] = f"{report.outcome} | -"
        elif report.when == "teardown":
            used = dict(report.user_properties).get("stand-ins")
            self.rows.setdefault(report.nodeid, f"whole | {used or '-'}")

    def pytest_sessionfinish(self, session) -> None:
        if any(row.startswith("skipped") for row in self.rows.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.write_line("| test | its body ran | what stood in |\n|---|---|---|")
        for name, row in sorted(self.rows.items()):
            terminalreporter.write_line(f"| {name} | {row} |")
