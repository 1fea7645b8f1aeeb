"""A process without its streams, its help, its descriptors or its memory still ends with one line and its exit code."""

import os
import subprocess
import sys

import pytest
from conftest import MICRO, ROOT, micro_run

REFUSED = f"train.py {MICRO} --nokey=1"
HELP = "Python's option -OO leaves the help out"
# What a shell runs: its exit code, and words of its stderr, or of its stdout where it has no stderr.
CASES = {
    f"{{python}} {REFUSED} 2>&-": (2, ""),
    f"{{python}} {REFUSED} 2>/dev/full": (2, ""),
    f"{{python}} {REFUSED} >&-": (2, "train.py: unknown key nokey"),
    "{python} -OO train.py --help": (0, HELP),
    "{python} -OO eval.py --help": (0, HELP),
    "set -o pipefail; {python} train.py --help | true": (0, ""),
}
LIMITS = {
    "ulimit -n 16": "Too many open files",
    "ulimit -v 4000000": "limits of files, threads or memory are too low|out of memory",
}


def shell(command: str) -> subprocess.CompletedProcess:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = command.replace("{python}", sys.executable)
    return subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_a_process_without_streams_or_help_keeps_its_exit_code():
    wrong = {}
    for command, (code, words) in CASES.items():
        ended = shell(command)
        said = ended.stdout + ended.stderr
        if ended.returncode != code or words not in said or "Traceback" in said:
            wrong[command] = (ended.returncode, said)
    assert wrong == {}


@pytest.mark.slow
def test_a_process_with_few_resources_ends_with_one_line(shapes_dir, tmp_path):
    wrong = {}
    for limit, words in LIMITS.items():
        run = " ".join(micro_run(shapes_dir, tmp_path / "run"))
        ended = shell(f"{limit}; {{python}} train.py {run}")
        if (
            ended.returncode != 3
            or not any(word in ended.stderr for word in words.split("|"))
            or "Traceback" in ended.stderr
        ):
            wrong[limit] = (ended.returncode, ended.stderr)
    assert wrong == {}
