"""Systems other than Linux: what lacks there is left out, and a line says so."""

import json

import pytest
from conftest import MICRO, micro_run, script


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_python_without_the_names_and_files_that_only_linux_has_does_it_all(ranks, tmp_path):
    run, data = tmp_path / "run", tmp_path / "data"
    commands = [
        [
            0,
            "train",
            *micro_run(data, run, "--data.drop_page_cache=true", "--train.max_samples=12", "--pictures.count=1"),
        ],
        [0, "eval", str(run), "--prompt=a red circle"],
        [0, "tools.prepare.__main__", "verify", str(data), f"--config={MICRO}"],
        [1, "tools.report.__main__", str(run)],  # one run is no score
    ]
    done = script("tests/helpers/bare_unix.py", json.dumps(commands), ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cannot drop the data set from its page cache" in done.stdout and "PASS" in done.stdout
    assert '"cache_clear"' not in (run / "result_0.txt").read_text()
