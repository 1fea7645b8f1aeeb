"""Tests of a device and variants as bench/gpu.sh runs them: what hangs, dies, fails or is cut short."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT

TESTS = """
    import os, time, pytest

    def ran(name):
        with open("ran", "a") as file:
            file.write(name + " ")

    def test_passes(): ran("passes")
    def test_hangs(): ran("hangs"); time.sleep(60)
    def test_is_skipped(): ran("skipped"); pytest.skip("needs something")
    def test_dies(): ran("dies"); os._exit(9)
    def test_fails(): ran("fails"); assert 1 + 1 == 3
    def test_waits(): ran("waits"); time.sleep(float(os.environ.get("WAIT_S", "0")))
    @pytest.fixture
    def slow_end():
        yield
        time.sleep(60)
    def test_never_ends(slow_end): ran("never"); assert False
    """
SHORT = "import bench.device_tests as own; own.LIMIT_S = 3.0"  # a conftest
BLOCK = """
    import sys

    class Block:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in {"mlperf_logging", "webdataset", "diffusers", "torchao", "datasets"}:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Block())
    """
STUB = """
    import pathlib, sys

    # In the place of python: a module that writes its report, unless a file says how else it ends.
    if "--json" in sys.argv[-1]:
        out = pathlib.Path(sys.argv[-1].partition("=")[2])
        with open(out.parent / "ran", "a") as file:
            file.write(out.stem + " ")
        if (out.parent / f"{out.stem}.ends").exists():
            sys.exit("out of memory")
        out.write_text("{}")
    elif "-m" in sys.argv:
        name = pathlib.Path(sys.argv[sys.argv.index("--outcomes") + 1])
        with open(name, "a") as file:
            file.write("{}")
        sys.exit(1 if name.stat().st_size < 5 else 0)
    """
pytestmark = pytest.mark.slow


@pytest.fixture
def project(tmp_path) -> Path:
    (tmp_path / "test_some.py").write_text(textwrap.dedent(TESTS))
    (tmp_path / "conftest.py").write_text(SHORT)
    return tmp_path


def start(project: Path, **environment: str) -> subprocess.Popen:
    plugin = [
        "-p",
        "bench.device_tests",
        "--outcomes=outcomes.jsonl",
        "-p",
        "no:faulthandler",
        "-p",
        "no:cacheprovider",
    ]
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", *plugin, "test_some.py"],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def found(project: Path) -> dict[str, dict]:
    """The last line of each test."""
    lines = map(json.loads, (project / "outcomes.jsonl").read_text().splitlines())
    return {line["test"].partition("test_")[2].partition("::test_")[2]: line for line in lines}


def test_every_test_gets_one_outcome_though_some_hang_and_one_dies(project):
    code, said = 1, ""
    while code not in (0, 5):
        assert code not in (2, 3, 4), said
        ended = start(project)
        _, more = ended.communicate(timeout=100)
        said, code = said + more, ended.returncode
    assert {name: line["outcome"] for name, line in found(project).items()} == {
        **{"passes": "passed", "hangs": "begun", "is_skipped": "skipped", "dies": "begun"},
        **{"fails": "failed", "waits": "passed", "never_ends": "begun"},
    }
    ran = Counter((project / "ran").read_text().split())
    assert ran.pop("skipped") > 1
    assert ran == {"passes": 1, "hangs": 2, "dies": 2, "fails": 1, "waits": 1, "never": 2}, "an outcome is final"
    assert "assert (1 + 1) == 3" in found(project)["fails"]["reason"]
    assert "needs something" in found(project)["is_skipped"]["reason"] and "in test_hangs" in said


def test_a_call_that_is_cut_short_goes_on_with_the_test_that_it_was_at(project):
    (project / "test_some.py").write_text(textwrap.dedent(TESTS.replace("60", "0").replace("os._exit(9)", "pass")))
    cut = start(project, WAIT_S="60")
    cut.wait()  # -x ends it behind test_fails
    cut = start(project, WAIT_S="60")
    deadline = time.monotonic() + 60
    while "waits" not in (project / "ran").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(cut.pid, signal.SIGKILL)
    cut.communicate()
    assert found(project)["waits"]["outcome"] == "begun"
    start(project).communicate()
    assert found(project)["waits"]["outcome"] == "passed"
    ran = Counter((project / "ran").read_text().split())
    assert ran.pop("waits") == 2 and ran.pop("skipped") > 1 and set(ran.values()) == {1}


def test_without_packages_all_tests_of_a_device_are_collected(tmp_path):
    """A machine with a device may lack them."""
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(BLOCK))
    pattern = re.search(r"grep -rlE '(.*?)'", (ROOT / "bench/gpu.sh").read_text())[1]
    names = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(f"(?m){pattern}", path.read_text())]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-m", "gpu", *map(str, names)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    marked = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert marked == {str(path.relative_to(ROOT)) for path in names}


def test_variants_run_until_each_has_a_result(tmp_path):
    """What failed runs again after what is new, and what has a result does not."""
    stub, out = tmp_path / "stub", tmp_path / "out"
    stub.write_text(f"#!{sys.executable}\n{textwrap.dedent(STUB)}")
    stub.chmod(0o700)
    out.mkdir()
    (out / "eager.ends").touch()
    environment = os.environ | {"OUT": str(out), "PYTHON": str(stub)}

    def call(*words: str) -> tuple[str, list[str]]:
        (out / "ran").write_text("")
        done = subprocess.run([ROOT / "bench/gpu.sh", *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return done.stdout, (out / "ran").read_text().split()

    said, ran = call("eager", "flash")
    assert ran == ["eager", "flash"] and "eager: exit code 1" in said and "out of memory" in said
    (out / "eager.ends").unlink()
    _, ran = call()
    assert ran[0] == "ceiling" and ran[-1] == "eager" and "flash" not in ran and len({*ran}) == len(ran) > 12
    assert {path.stem for path in out.glob("*.json")} == {*ran, "flash", "tests_graphs", "tests_others"}
    assert call()[1] == []


def test_its_options_are_those_of_the_programs(tmp_path):
    """All variants on the micro model, but for the tests and what takes a compiler long."""
    names = ["ceiling", "eager", "race_eager"]
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([ROOT / "bench/gpu.sh", "--small", *names], env=environment, capture_output=True, text=True)
    assert {path.stem for path in tmp_path.glob("*.json")} == {*names}, done.stdout
