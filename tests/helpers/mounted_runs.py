"""Runs in a folder that is mounted under two names. Started by test_folder.py in a mount namespace of its own."""

from contextlib import ExitStack
from pathlib import Path

from conftest import called, micro_run
from run_files import left_in, saved_steps

from flux_ref import config_file, files, folder, ranks

COUNTS = {"train_samples": 50, "val_samples": 45}


def main(place: str, data: str) -> None:
    first, second = (Path(place, name, "run") for name in ("a", "b"))
    with ExitStack() as stack:
        cfg = config_file.load("tests/micro.toml", [f"--run.dir={first}"])
        world = ranks.start(cfg.parallel)
        stack.enter_context(folder.held(cfg, world, COUNTS))
        ranks.stop()
        assert called("train.py", *micro_run(Path(data), second)) == 2, "in use by another job"

    assert called("train.py", *micro_run(Path(data), second)) == 0
    for number in (1, 2):
        assert called("train.py", *micro_run(Path(data), second), "--run.overwrite=true") == 0
        assert saved_steps(second / f"older.{number}") == saved_steps(second) == [3, 5]
    for path in second.glob("checkpoints/*"):  # killed before its first checkpoint
        files.remove(path)
    (second / "outcome.json").unlink()
    assert called("train.py", *micro_run(Path(data), second)) == 0
    assert (second / "older.3" / "config.toml").exists() and saved_steps(second) == [3, 5] and not left_in(second)
