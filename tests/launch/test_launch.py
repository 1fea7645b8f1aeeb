"""The scripts and files in launch/: tuning a node, what shell and YAML say of them, and what its README promises."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import MICRO, ROOT, data_overrides

LAUNCH = ROOT / "launch"
README = (LAUNCH / "README.md").read_text()
TUNE = LAUNCH / "tune_node.sh"
SCRIPTS = [LAUNCH / "slurm.sbatch", LAUNCH / "one_node.sh", TUNE, *sorted((LAUNCH / "env").glob("*.sh"))]
CPU, VM, HUGE = "sys/devices/system/cpu", "proc/sys/vm/drop_caches", "sys/kernel/mm/transparent_hugepage/enabled"
KERNEL = "proc/sys/kernel"
SETTINGS = [  # path, before and after tuning
    (f"{CPU}/cpu0/cpufreq/scaling_governor", "powersave", "performance"),
    (f"{CPU}/cpu1/cpufreq/scaling_governor", "schedutil", "performance"),
    (f"{CPU}/cpu0/cpuidle/state1/disable", "0", "0"),
    (f"{CPU}/cpu0/cpuidle/state2/disable", "0", "1"),
    (f"{KERNEL}/numa_balancing", "1", "0"),
    (f"{KERNEL}/nmi_watchdog", "1", "0"),
    (f"{KERNEL}/randomize_va_space", "2", "0"),
    (HUGE, "always [madvise] never", "always"),
    (VM, "0", "3"),
]
OLD, NEW = ({path: values[i] for path, *values in SETTINGS} for i in range(2))


@pytest.fixture
def machine(tmp_path):
    """A folder with the files of a machine that has no setting for transparent_hugepage/defrag."""
    for name, text in OLD.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    return tmp_path


def tune(machine: Path, *args: str, code: int = 0) -> str:
    env = {"ROOT": str(machine), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([TUNE, *args], env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def contents(machine: Path) -> dict[str, str]:
    return {name: (machine / name).read_text().strip() for name in OLD}


def test_tuning_is_shown_applied_and_restored(machine):
    assert "--restore" in tune(machine, "--help", code=2) and contents(machine) == OLD
    said = tune(machine)
    assert contents(machine) == OLD and not (machine / "run").exists()
    assert re.search(r"scaling_governor: 1 x powersave, 1 x schedutil -> performance  \(.+\)", said)
    assert "defrag: not on this machine -> madvise" in said and len(said.splitlines()) == 8
    tune(machine, "--apply")
    assert contents(machine) == NEW
    assert "is tuned already" in tune(machine, "--apply", code=2)  # which would save the new values as the old
    tune(machine, "--restore")
    assert contents(machine) == OLD | {HUGE: "madvise", VM: "3"}  # the kernel itself adds the brackets
    assert "nothing was tuned" in tune(machine, "--restore", code=2)


@pytest.mark.skipif(os.geteuid() != 0, reason="writes to a setting of the kernel, which refuses the value")
def test_a_setting_that_the_kernel_refuses_is_said_and_the_others_are_set(machine):
    refused = machine / "proc/sys/kernel/numa_balancing"
    refused.unlink()
    refused.symlink_to("/proc/sys/net/ipv4/ip_default_ttl")  # 1 to 255
    said = tune(machine, "--apply", code=3)
    assert "numa_balancing does not take 0" in said
    assert (machine / "proc/sys/kernel/nmi_watchdog").read_text() == "0\n"


def test_bash_and_shellcheck_have_nothing_to_say():
    """Without shellcheck (apt-get install shellcheck) only bash reads the scripts."""
    commands = [["bash", "-n", path] for path in SCRIPTS]
    commands += [["shellcheck", "--shell=bash", *SCRIPTS]] if shutil.which("shellcheck") else []
    done = [subprocess.run(command, capture_output=True, text=True, timeout=60) for command in commands]
    assert [process.stdout + process.stderr for process in done if process.returncode] == []


def test_the_readme_names_every_variable_of_the_script():
    script = (LAUNCH / "slurm.sbatch").read_text()
    documented = set(re.findall(r"^#   ([A-Z_]+)=", script, re.M))
    used = set(re.findall(r"\$\{([A-Z_]+):[-?+]", script)) - {"SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT"}
    assert used - {"CONTAINER_MOUNTS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} == documented
    assert not [name for name in documented if f"`{name}" not in README]


def test_one_node_without_a_config_says_how_to_call_it(tmp_path):
    usage = "usage: NEXP=10 launch/one_node.sh CONFIG"
    cases = {(): usage, ("--help",): usage, ("configs/absent.toml",): "config configs/absent.toml is no file; give one"}
    env = os.environ | {"RESULTS": f"{tmp_path}/results"}
    for argv, says in cases.items():
        command = [LAUNCH / "one_node.sh", *argv]
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and done.stdout.startswith(says)
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_one_node_runs_what_is_left_and_scores(tmp_path, shapes_dir):
    results = tmp_path / "results"
    env = os.environ | {"NEXP": "2", "SEED": "7", "RESULTS": str(results), "PREFLIGHT": "off"}
    env["VERIFY"] = str(shapes_dir)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = [LAUNCH / "one_node.sh", str(MICRO), *data_overrides(shapes_dir), "--train.max_samples=24"]

    def run() -> str:
        done = subprocess.run(command, cwd=ROOT, env=env | {"PATH": path}, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    said = run()
    assert (results / "seeds.txt").read_text() == "7\n8\n" and "2 runs; the rules ask for 10" in said
    assert "train.seed = 8" in (results / "run_1" / "config.toml").read_text()
    assert (results / "result_1.txt").read_bytes() == (results / "run_1" / "result_0.txt").read_bytes()
    shutil.rmtree(results / "run_1")
    again = run()
    assert "run 0 of 2" not in again and "run 1 of 2, seed 8" in again
