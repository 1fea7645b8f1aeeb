"""Tests of a device as bench/gpu.sh runs them: those that hang, die, fail or are cut short, and what runs again."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

from bench import device_tests, sweep
from bench.device_tests import Outcomes
from flux_ref.errors import Fault

CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--stand-in", action="store_true")

def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs an accelerator")
"""
TESTS = """
import os, pathlib, time, pytest
pytestmark = pytest.mark.gpu

def ran(name):
    with open("ran", "a") as file:
        file.write(name + " ")

def test_passes(): ran("passes")
def test_hangs(): ran("hangs"); time.sleep(60)
def test_is_skipped(): ran("skipped"); pytest.skip("needs something")
def test_dies(): ran("dies"); os._exit(9)
def test_fails(): ran("fails"); assert 1 + 1 == 3
def test_waits(): ran("waits"); time.sleep(float(os.environ.get("WAIT_S", "0")))
def test_comes_last(): ran("last")
"""
HANGING_END = """
@pytest.fixture
def hanging():
    yield
    time.sleep(60)

def test_fails_and_hangs(hanging): assert False
"""
BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"mlperf_logging", "webdataset", "diffusers", "torchao", "datasets"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""
TRAINS = "tests/speed/test_gpu_graph.py::test_a_run_that_breaks_amid_training_ends_soon"
pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A folder with a few tests marked gpu."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)
    monkeypatch.setattr(device_tests, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def found(outcomes: Outcomes) -> dict[str, str]:
    return {name.rpartition("_")[2]: one["outcome"] for name, one in outcomes.tests().items()}


@pytest.fixture
def without_packages(tmp_path, monkeypatch) -> None:
    """Programs that a test starts lack what a machine with a device may lack."""
    (tmp_path / "sitecustomize.py").write_text(BLOCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def test_without_packages_all_tests_of_a_device_are_collected(without_packages):
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line} == {
        f"tests/speed/{file}.py" for files in sweep.TESTS_OF.values() for file in files
    }


def test_a_test_that_starts_train_py_names_the_package_that_it_lacks(without_packages, tmp_path):
    outcomes = Outcomes(tmp_path / "outcomes.jsonl")
    device_tests.run([TRAINS], outcomes, stand_in=True)
    assert outcomes.tests()[TRAINS]["outcome"] == "skipped"
    assert "needs mlperf-logging; pip install --no-deps --target" in outcomes.tests()[TRAINS]["reason"]
    program = "from bench import sweep; print(*sweep.missing_packages(), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.partition(" ")[0] for line in done.stdout.splitlines()] == ["mlperf-logging", "diffusers"]


def test_every_test_gets_one_outcome_though_one_hangs_and_one_dies(project):
    outcomes = Outcomes(project / "outcomes.jsonl")
    for _ in range(2):
        device_tests.run(["test_some.py"], outcomes, stand_in=True, limit_s=4)
        assert found(outcomes) == {
            **{"passes": "passed", "hangs": "died", "skipped": "skipped", "dies": "died"},
            **{"fails": "failed", "waits": "passed", "last": "passed"},
        }
    ran = Counter((project / "ran").read_text().split())
    assert ran.pop("skipped") > 1 and set(ran.values()) == {1}, "but for one that was skipped, an outcome is final"
    told = {name.rpartition("_")[2]: one for name, one in outcomes.tests().items()}
    assert "needs something" in told["skipped"]["reason"] and "exit code 9" in told["dies"]["reason"]
    assert "1 + 1" in told["fails"]["reason"] and "test_some.py" in told["fails"]["trace"]
    assert "in test_hangs" in told["hangs"]["trace"]


def test_a_limit_holds_also_in_the_end_of_a_test_that_has_failed(project):
    """As where a process group waits for a captured graph."""
    (project / "test_some.py").write_text(TESTS + HANGING_END)
    outcomes = Outcomes(project / "outcomes.jsonl")
    device_tests.run(["test_some.py::test_fails_and_hangs"], outcomes, stand_in=True, limit_s=4)
    assert found(outcomes) == {"hangs": "died"}


def test_tests_that_cannot_be_collected_are_not_taken_for_done(project):
    outcomes = Outcomes(project / "outcomes.jsonl")
    (project / "test_other.py").write_text("import no_such_module")
    with pytest.raises(Fault, match="pytest ended with 2 and ran no test"):
        device_tests.run(["test_some.py", "test_other.py"], outcomes, stand_in=True, limit_s=4)
    assert found(outcomes) == {}
    (project / "test_other.py").unlink()
    (project / "conftest.py").write_text("import no_such_module")
    with pytest.raises(Fault, match="pytest ended with 4 and ran no test"):
        device_tests.run(["test_some.py"], outcomes, stand_in=True, limit_s=4)


def test_a_call_that_is_cut_short_goes_on_with_the_test_that_it_was_at(project, monkeypatch):
    """And with all tests when a source has changed."""
    (project / "test_some.py").write_text(TESTS.replace("time.sleep(60)", "").replace("os._exit(9)", ""))
    outcomes = Outcomes(project / "outcomes.jsonl")
    program = (
        "from pathlib import Path; from bench import device_tests; device_tests.ROOT = Path('.');"
        "device_tests.run(['test_some.py'], device_tests.Outcomes(Path('outcomes.jsonl')), True, 50)"
    )
    environment = {**os.environ, "WAIT_S": "60"}
    cut = subprocess.Popen([sys.executable, "-c", program], cwd=project, env=environment, start_new_session=True)
    deadline = time.monotonic() + 60
    while not (project / "ran").exists() or "waits" not in (project / "ran").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(cut.pid, signal.SIGKILL)
    cut.wait()
    assert "waits" not in found(outcomes) and len(found(outcomes)) == 5
    device_tests.run(["test_some.py"], outcomes, stand_in=True, limit_s=50)
    ran = Counter((project / "ran").read_text().split())
    assert ran.pop("waits") == 2 and ran.pop("skipped") > 1 and set(ran.values()) == {1}
    assert len(found(outcomes)) == 7
    monkeypatch.setattr(device_tests, "sources", lambda places: "others")
    assert found(Outcomes(outcomes.path)) == {}
