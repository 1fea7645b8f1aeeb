"""Two folders may be taken away: bf16 trains without precision/ and pictures/, and what asks for one is refused."""

import os
import re
import subprocess
import sys

from conftest import ROOT, micro_run, the_line

# Runs a script as if there were no such folders.
BARE = """
import runpy, sys
sys.modules["flux_ref.precision"] = sys.modules["flux_ref.pictures"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def bare(script: str, *args: object) -> subprocess.CompletedProcess:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BARE, str(ROOT / script), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


def test_bf16_trains_and_is_evaluated_without_the_folders_and_what_asks_for_one_is_refused(shapes_dir, tmp_path):
    plain = ("--parallel.dtype=bf16", "--train.max_samples=24", "--sample.count=0")
    trained = bare("train.py", *micro_run(shapes_dir, tmp_path / "run", *plain))
    assert trained.returncode == 0, trained.stderr[-4000:]
    assert "compute bf16 in training and validation" in trained.stdout
    assert bare("eval.py", tmp_path / "run").returncode == 0
    for key, folder in (("precision.preset=fp8", "precision"), ("sample.count=1", "pictures")):
        refused = bare("train.py", *micro_run(shapes_dir, tmp_path / "other", *plain, f"--{key}"))
        words = rf"flux_ref\.{folder}.* is not here; install it, or change the key"
        assert refused.returncode == 2 and re.search(words, the_line(refused.stderr)), refused.stderr
        assert not (tmp_path / "other").exists()
