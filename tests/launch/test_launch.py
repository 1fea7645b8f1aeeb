"""The scripts in launch/: tuning a node, one machine, what bash and shellcheck say, and what the README promises."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MICRO, ROOT, data_overrides

LAUNCH = ROOT / "launch"
CPU, HUGE, KERNEL = "sys/devices/system/cpu", "sys/kernel/mm/transparent_hugepage", "proc/sys/kernel"
SETTINGS = {  # before and after tuning
    f"{CPU}/cpu0/cpufreq/scaling_governor": ("powersave", "performance"),
    f"{CPU}/cpu11/cpufreq/scaling_governor": ("schedutil", "performance"),
    f"{CPU}/cpu0/cpuidle/state1/disable": ("0", "0"),
    f"{CPU}/cpu0/cpuidle/state2/disable": ("0", "1"),
    f"{KERNEL}/numa_balancing": ("1", "0"),
    f"{KERNEL}/nmi_watchdog": ("1", "0"),
    f"{HUGE}/enabled": ("always [madvise] never", "always"),
    f"{HUGE}/defrag": ("madvise", "always"),
    "proc/sys/vm/drop_caches": ("0", "3"),
}


def test_tuning_sets_what_can_be_set_and_names_the_rest(tmp_path):
    for name, (before, _) in SETTINGS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(before)
    env = os.environ | {"ROOT": str(tmp_path)}
    done = subprocess.run([LAUNCH / "tune_node.sh"], env=env, capture_output=True, text=True, timeout=30)
    said = "tune_node.sh: /proc/sys/kernel/randomize_va_space does not take 0\n"
    assert (done.returncode, done.stderr) == (3, said)
    assert {name: (tmp_path / name).read_text().strip() for name in SETTINGS} == {
        name: after for name, (_, after) in SETTINGS.items()
    }


def test_bash_and_shellcheck_have_nothing_to_say():
    """Without shellcheck (apt-get install shellcheck) only bash reads the scripts."""
    scripts = [LAUNCH / "slurm.sbatch", *sorted(LAUNCH.rglob("*.sh"))]
    commands = [["bash", "-n", path] for path in scripts]
    commands += [["shellcheck", "--shell=bash", *scripts]] if shutil.which("shellcheck") else []
    done = [subprocess.run(command, capture_output=True, text=True, timeout=60) for command in commands]
    assert [process.stdout + process.stderr for process in done if process.returncode] == []


def test_the_readme_names_every_variable_of_the_script():
    script, readme = ((LAUNCH / name).read_text() for name in ("slurm.sbatch", "README.md"))
    used = set(re.findall(r"\$\{([A-Z_]+):[-?+]", script)) - {"SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT"}
    assert [name for name in used if f"`{name}" not in readme] == []


def one_node(*argv, **env):
    command = [LAUNCH / "one_node.sh", *map(str, argv)]
    return subprocess.run(command, cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=300)


def test_one_node_says_how_to_call_it_and_what_is_missing(tmp_path):
    """Without torchrun it once said `run 0 failed: ,`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("env", "bash", "basename"):
        (programs / name).symlink_to(shutil.which(name))
    usage = "usage: NEXP=10 launch/one_node.sh CONFIG"
    for argv, path, code, says in (
        ([], "", 2, usage),
        (["--help"], "", 2, usage),
        (["configs/absent.toml"], "", 2, "config configs/absent.toml is no file; give one"),
        ([MICRO], "", 1, "python is not in PATH; activate"),
        ([MICRO], "python", 1, "torchrun is not in PATH; activate"),
    ):
        if path:
            (programs / path).symlink_to(sys.executable)
        done = one_node(*argv, RESULTS=f"{tmp_path}/results", PATH=str(programs))
        assert done.returncode == code and says in done.stdout, (argv, done)
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_one_node_runs_what_is_left_and_scores(tmp_path, shapes_dir):
    results = tmp_path / "results"
    env = {"NEXP": "2", "SEED": "7", "RESULTS": str(results), "PREFLIGHT": "off", "VERIFY": str(shapes_dir)}
    env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    argv = (MICRO, *data_overrides(shapes_dir), "--train.max_samples=24")
    done = one_node(*argv, **env)
    assert done.returncode == 0 and "2 runs; the rules ask for 10" in done.stdout, done.stdout + done.stderr
    assert (results / "seeds.txt").read_text() == "7\n8\n"
    assert "train.seed = 8" in (results / "run_1" / "config.toml").read_text()
    assert (results / "result_1.txt").read_bytes() == (results / "run_1" / "result_0.txt").read_bytes()
    shutil.rmtree(results / "run_1")
    again = one_node(*argv, **env).stdout
    assert "run 0 of 2" not in again and "run 1 of 2, seed 8" in again
