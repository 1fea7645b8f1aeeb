"""The folder precision/ may be taken away: bf16 trains without it, and what asks for it is refused in one line."""

import os
import subprocess
import sys

from conftest import ROOT, micro_run, the_line

# Runs a script as if there were no folder.
BARE = """
import runpy, sys
sys.modules["flux_ref.precision"] = None
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def bare(script: str, *args: object) -> subprocess.CompletedProcess:
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", BARE, str(ROOT / script), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)


def test_bf16_trains_and_is_evaluated_without_the_folder_and_fp8_is_refused(shapes_dir, tmp_path):
    run = micro_run(shapes_dir, tmp_path / "run", "--parallel.dtype=bf16", "--train.max_samples=24")
    trained = bare("train.py", *run)
    assert trained.returncode == 0, trained.stderr[-4000:]
    assert "compute bf16 in training and validation" in trained.stdout
    assert bare("eval.py", tmp_path / "run").returncode == 0
    other = micro_run(shapes_dir, tmp_path / "other", "--parallel.dtype=bf16", "--precision.preset=fp8")
    refused = bare("train.py", *other)
    words = "precision.preset=fp8 needs the folder flux_ref/precision, which is not here"
    assert refused.returncode == 2 and words in the_line(refused.stderr) and not (tmp_path / "other").exists()
