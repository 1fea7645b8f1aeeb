"""A plugin of pytest for tests marked gpu: where they run, and what stands in for a device.

pytest                       on a CPU, also where there is a device
pytest -m gpu                on a device
pytest -m gpu --stand-in     on a CPU; a test that is skipped fails the session
"""

import os

import pytest
import stand_in
import torch

from flux_ref import ranks
from flux_ref.config import ParallelConfig

NO_DEVICE = "no accelerator; --stand-in lets a CPU stand in for it"


def pytest_addoption(parser):
    parser.addoption("--stand-in", action="store_true", help="run tests marked gpu on a CPU")


def pytest_configure(config):
    if config.getoption("stand_in") or config.option.markexpr != "gpu":  # other tests compare bits of a CPU
        os.environ.update(dict.fromkeys(ranks.VISIBLE, ""))


def pytest_sessionfinish(session):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    # Files of tests that need an optional package are skipped as a whole; they hold no test of a device.
    if session.config.getoption("stand_in") and any(isinstance(one, pytest.TestReport) for one in skipped):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def device_or_stand_in(request, monkeypatch):
    """A test marked gpu gets a device or its stand-in, or is skipped."""
    if not request.node.get_closest_marker("gpu") or torch.accelerator.is_available():
        yield
        return
    if not request.config.getoption("stand_in"):
        pytest.skip(NO_DEVICE)
    stand_in.install(monkeypatch.setattr)
    yield


@pytest.fixture
def device(device_or_stand_in):
    """The first accelerator, or the CPU that stands in for it."""
    if not torch.accelerator.is_available():
        return stand_in.CPU
    return torch.device(torch.accelerator.current_accelerator().type, 0)


@pytest.fixture
def world():
    """One rank on that device. Afterwards the compiler is as it was before."""
    yield ranks.start(ParallelConfig())
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    ranks.stop()


@pytest.fixture
def on_both(device_or_stand_in, monkeypatch):
    """on_both(function): what a function of a world gives on that device, and then on the CPU."""

    def run(function):
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
def deterministic(monkeypatch):
    """Bit for bit needs kernels that add in a fixed order."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def train_py():
    """Skips a test that starts train.py where the package of the benchmark's log is missing."""
    pytest.importorskip("mlperf_logging", reason="needs mlperf-logging; pip install it")
