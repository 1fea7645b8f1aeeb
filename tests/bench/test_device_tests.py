"""Tests of a device and variants as bench/gpu.sh runs them: what hangs, dies, fails or is cut short."""

import json
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter

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


def test_every_test_gets_one_outcome_though_some_hang_and_one_dies(tmp_path):
    """An outcome is final: a call goes on with the test at which the one before was cut short."""
    (tmp_path / "test_some.py").write_text(textwrap.dedent(TESTS))
    (tmp_path / "conftest.py").write_text(SHORT)
    plugin = "-p bench.device_tests --outcomes=outcomes.jsonl -p no:faulthandler -p no:cacheprovider"
    command = [sys.executable, "-m", "pytest", "-x", *plugin.split(), "test_some.py"]
    code, said = 1, ""
    while code not in (0, 5):
        assert code not in (2, 3, 4), said
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
        said, code = said + ended.stderr, ended.returncode
    lines = map(json.loads, (tmp_path / "outcomes.jsonl").read_text().splitlines())
    found = {line["test"].partition("::test_")[2]: line for line in lines}  # the last of each
    assert {name: line["outcome"] for name, line in found.items()} == {
        **{"passes": "passed", "hangs": "begun", "is_skipped": "skipped", "dies": "begun"},
        **{"fails": "failed", "never_ends": "begun"},
    }
    ran = Counter((tmp_path / "ran").read_text().split())
    assert ran.pop("skipped") > 1 and ran == {"passes": 1, "hangs": 2, "dies": 2, "fails": 1, "never": 2}
    assert "assert (1 + 1) == 3" in found["fails"]["reason"]
    assert "needs something" in found["is_skipped"]["reason"] and "in test_hangs" in said


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
    """What failed runs once more after what is new, also in the same call. What has a result does not run again."""
    stub, out = tmp_path / "stub", tmp_path / "out"
    stub.write_text(f"#!{sys.executable}\n{textwrap.dedent(STUB)}")
    stub.chmod(0o700)
    out.mkdir()
    (out / "eager.ends").touch()
    environment = os.environ | {"OUT": str(out), "PYTHON": str(stub)}

    def call(*words):
        (out / "ran").write_text("")
        done = subprocess.run([ROOT / "bench/gpu.sh", *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return done.stdout, (out / "ran").read_text().split()

    said, ran = call("eager", "flash")
    assert ran == ["eager", "flash", "eager"] and "eager: exit code 1" in said and "out of memory" in said
    (out / "eager.ends").unlink()
    _, ran = call()
    assert (
        ran[:2] == ["fake_ranks", "ceiling"]
        and ran[-1] == "eager"
        and "flash" not in ran
        and len({*ran}) == len(ran) > 12
    )
    assert {path.stem for path in out.glob("*.json")} == {*ran, "flash", "tests_graphs", "tests_others"}
    assert call()[1] == []


def test_its_options_are_those_of_the_programs(tmp_path):
    """All variants on the micro model, but for the tests and what takes a compiler long."""
    names = ["ceiling", "eager", "race_eager"]
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([ROOT / "bench/gpu.sh", "--small", *names], env=environment, capture_output=True, text=True)
    assert {path.stem for path in tmp_path.glob("*.json")} == {*names}, done.stdout
