"""The scripts in launch/: tuning a node, staging, one machine, and what bash and shellcheck say."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MICRO, ROOT, data_overrides
from run_files import contents

LAUNCH = ROOT / "launch"
HAS_RSYNC = pytest.mark.skipif(not shutil.which("rsync"), reason="no rsync: apt-get install rsync")


def ran(script, *argv, **env):
    """The exit code of a script and what it prints."""
    command = [LAUNCH / script, *map(str, argv)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


def test_tuning_sets_what_can_be_set_and_names_the_rest(tmp_path):
    cpu, kernel = "sys/devices/system/cpu", "proc/sys/kernel"
    settings = {  # before and after
        f"{cpu}/cpu11/cpufreq/scaling_governor": ("schedutil", "performance"),
        f"{cpu}/cpu0/cpuidle/state1/disable": ("0", "0"),
        f"{cpu}/cpu0/cpuidle/state2/disable": ("0", "1"),
        f"{kernel}/numa_balancing": ("1", "0"),
    }
    for name, (before, _) in settings.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(before)
    code, said = ran("tune_node.sh", ROOT=str(tmp_path))
    assert code == 3 and "tune_node.sh: /proc/sys/kernel/randomize_va_space does not take 0\n" in said
    assert "numa" not in said and "cpu" not in said
    assert {name: (tmp_path / name).read_text().strip() for name in settings} == {
        name: after for name, (_, after) in settings.items()
    }


def test_bash_and_shellcheck_have_nothing_to_say():
    """Without shellcheck (apt-get install shellcheck) only bash reads the scripts."""
    scripts = [LAUNCH / "slurm.sbatch", *sorted(LAUNCH.rglob("*.sh"))]
    commands = [["bash", "-n", path] for path in scripts]
    commands += [["shellcheck", "--shell=bash", *scripts]] if shutil.which("shellcheck") else []
    done = [subprocess.run(command, capture_output=True, text=True, timeout=60) for command in commands]
    assert [process.stdout + process.stderr for process in done if process.returncode] == []


@HAS_RSYNC
def test_a_staged_copy_is_whole_goes_on_and_is_checked_and_nothing_else_is_overwritten(tmp_path):
    src, dst = tmp_path / "src", tmp_path / "local" / "set"
    partial, shard = tmp_path / "local" / "set.partial", "train/a b.tar"
    for name, size in ((shard, 3_000_000), ("val/c.tar", 700), ("train/.nv-meta/index", 0)):
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_bytes(os.urandom(size))
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in contents(src).items()]
    (src / "manifest.sha256").write_text("".join(lines))
    code, said = ran("stage.sh", src, dst)
    assert code == 0 and "is whole" in said and contents(dst) == contents(src)
    inode = (dst / "val/c.tar").stat().st_ino
    dst.rename(partial)  # as after a stop, with half a file
    (partial / shard).write_bytes(b"half")
    assert ran("stage.sh", src, dst)[0] == 0 and contents(dst) == contents(src) and not partial.exists()
    assert (dst / "val/c.tar").stat().st_ino == inode, "what is there is not copied again"
    times = (dst / shard).stat()
    (dst / shard).write_bytes(bytes(3_000_000))  # damage that neither size nor time shows
    os.utime(dst / shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    code, said = ran("stage.sh", src, dst)
    assert code == 1 and f"{shard}: FAILED" in said and not dst.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "old.tar").write_text("mine")
    for argv, words in (
        ((src, tmp_path / "mine"), "old.tar is not in"),
        ((src, src / "below"), "lie inside each other"),
        ((tmp_path / "none", dst), "give SRC"),
    ):
        code, said = ran("stage.sh", *argv)
        assert code == 2 and words in said
    assert (tmp_path / "mine" / "old.tar").read_text() == "mine"


def test_one_node_says_how_to_call_it_and_what_is_missing(tmp_path):
    for name in ("env", "bash", "basename"):
        (tmp_path / name).symlink_to(shutil.which(name))
    (tmp_path / "python").symlink_to(sys.executable)
    for argv, code, words in (
        ([], 2, "usage: NEXP=10 launch/one_node.sh CONFIG"),
        (["configs/absent.toml"], 2, "config configs/absent.toml is no file; give one"),
        ([MICRO], 1, "torchrun is not in PATH; activate"),
    ):
        found, said = ran("one_node.sh", *argv, PATH=str(tmp_path), RESULTS=f"{tmp_path}/results")
        assert found == code and words in said
    assert not (tmp_path / "results").exists()
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/bash\necho unknown option\nexit 7")
    torchrun.chmod(0o700)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RESULTS": f"{tmp_path}/results", "PREFLIGHT": "off"}
    env["GPUS_PER_NODE"] = "1"
    assert "run 0 failed with exit code 7: unknown option, see " in ran("one_node.sh", MICRO, **env)[1]


@pytest.mark.nightly
def test_one_node_runs_what_is_left_and_scores(tmp_path, shapes_dir):
    results = tmp_path / "results"
    env = {"NEXP": "2", "SEED": "7", "RESULTS": str(results), "PREFLIGHT": "off", "VERIFY": str(shapes_dir)}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    argv = (MICRO, *data_overrides(shapes_dir), "--train.max_samples=24")
    code, said = ran("one_node.sh", *argv, **env)
    assert code == 0 and "2 of the 10 runs that the rules ask for" in said, said
    assert (results / "seeds.txt").read_text() == "7\n8\n"
    assert "train.seed = 8" in (results / "run_1" / "config.toml").read_text()
    assert (results / "result_1.txt").read_bytes() == (results / "run_1" / "result_0.txt").read_bytes()
    shutil.rmtree(results / "run_1")
    _, said = ran("one_node.sh", *argv, **env)
    assert "run 0 of 2" not in said and "run 1 of 2, seed 8" in said
