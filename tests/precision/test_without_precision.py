"""Two folders may be taken away: bf16 trains without precision/ and pictures/, and what asks for one is refused."""

import json
import os
import subprocess
import sys

from conftest import PYTHONPATH, ROOT, micro_run

# Runs scripts one after the other as if there were no such folders, and prints their exit codes.
BARE = """
import json, sys
from conftest import called
sys.modules["flux_ref.precision"] = sys.modules["flux_ref.pictures"] = None
print([called(*argv) for argv in json.loads(sys.argv[1])])
"""


def test_bf16_trains_and_is_evaluated_without_the_folders_and_what_asks_for_one_is_refused(shapes_dir, tmp_path):
    plain = ("--parallel.dtype=bf16", "--train.max_samples=24", "--sample.count=0")
    commands = [["train.py", *micro_run(shapes_dir, tmp_path / "run", *plain)], ["eval.py", str(tmp_path / "run")]]
    for key in ("precision.preset=fp8", "sample.count=1"):
        commands.append(["train.py", *micro_run(shapes_dir, tmp_path / "other", *plain, f"--{key}")])
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
    call = [sys.executable, "-c", BARE, json.dumps(commands)]
    done = subprocess.run(call, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1:] == ["[0, 0, 2, 2]"], done.stderr[-4000:]
    assert "compute bf16 in training and validation" in " ".join(done.stdout.split())
    for folder in ("precision", "pictures"):
        assert f"flux_ref.{folder}" in done.stderr, done.stderr
    assert (
        done.stderr.count("is not here; install it, or change the key or option") == 2
        and not (tmp_path / "other").exists()
    )
