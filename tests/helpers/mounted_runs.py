"""Runs in a folder that is mounted under two names. Started by test_run_folder.py in a mount namespace of its own."""

import subprocess
from contextlib import ExitStack
from pathlib import Path

from conftest import called, micro_run
from run_files import left_in, require_equal_runs, saved_steps

from flux_ref import config_file, files, ranks, run_folder

COUNTS = {"train_samples": 50, "val_samples": 45}


def full(place, data, calm):
    """Disks that fill up at a write of a run, each at another one. Once there is room, the same command goes on."""
    stopped = set()
    for size in range(300, 2700, 240):
        mount(place, f"{size}k")
        argv = micro_run(
            data, place / "run", "--checkpoint.keep=1", "--checkpoint.every_samples=12", "--pictures.count=2"
        )
        code = called("train.py", *argv)
        stopped.add(code)
        mount(place, "9m", "remount,")
        assert code == 0 or called("train.py", *argv) == 0, size
        require_equal_runs(place / "run", calm)
        subprocess.run(["umount", str(place)], check=True)
    assert stopped == {0, 2, 3}


def mount(place, size, option=""):
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{option}size={size}", "tmpfs", str(place)], check=True)


def main(place, data, calm):
    first, second = (Path(place, name, "run") for name in ("a", "b"))
    with ExitStack() as stack:
        cfg = config_file.load("tests/micro.toml", [f"--run.dir={first}"])
        world = ranks.start(cfg.parallel)
        stack.enter_context(run_folder.held(cfg, world, COUNTS))
        ranks.stop()
        assert called("train.py", *micro_run(Path(data), second)) == 2, "in use by another job"

    assert called("train.py", *micro_run(Path(data), second)) == 0
    for number in (1, 2):
        assert called("train.py", *micro_run(Path(data), second), "--run.start_fresh=true") == 0
        assert saved_steps(second / f"older.{number}") == saved_steps(second) == [3, 5]
    for path in second.glob("checkpoints/*"):  # killed before its first checkpoint
        files.remove(path)
    (second / "outcome.json").unlink()
    assert called("train.py", *micro_run(Path(data), second)) == 0
    assert (second / "older.3" / "config.toml").exists() and saved_steps(second) == [3, 5] and not left_in(second)
    Path(place, "full").mkdir()
    full(Path(place, "full"), Path(data), Path(calm))
