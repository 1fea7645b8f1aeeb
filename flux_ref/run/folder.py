"""Whose a run's folder is, and where a run that broke off goes on. All on rank 0.

The folder belongs to one job at a time, which holds a lock on it for as long as it lives. A run without
outcome.json is unfinished; the same command continues it.
"""

import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flux_ref import config, config_file
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files
from flux_ref.formats.files import write_whole

RUN_FILES = ("config.toml", "environment.json", "metrics.jsonl", "eval.jsonl", "result_0.txt", "loss.png")
RUN_FILES += ("outcome.json",)
RECORDS = ("metrics.jsonl", "eval.jsonl", "result_0.txt")  # of what has been trained
LOCK = ".lock"
LOCK_WAIT_S = 10.0  # ranks that have lost their launcher end within a few seconds


@dataclass
class Claim:
    """A folder that is ours. The lock goes with the process."""

    folder: Path
    made: bool  # by us
    lock: IO
    fresh: bool  # nothing has been trained here
    start: Path | None = None  # the checkpoint from which to go on


def claim(cfg: Config, restarted: bool) -> Claim:
    """Take the run's folder. restarted: torchrun has begun this job before, and repeats its command.

    Raises: Refusal if another job has it, or it holds a run that cannot go on with cfg.
    """
    folder = config.run_dir(cfg)
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            start = _start(cfg, folder, restarted)
        except Refusal:
            _leave(folder, made)
            raise
        checkpoint_files.clean(folder)
        own = config_file.replace(cfg, run__dir=str(folder), run__overwrite=False, run__resume="auto")
        write_whole(folder / "config.toml", config_file.dump(own))
    except OSError as error:
        raise Refusal(f"run.dir={folder} cannot be made or written: {error.strerror}; set run.dir to another") from None
    fresh = start is None and not any((folder / name).exists() for name in RECORDS)
    return Claim(folder, made, lock, fresh, start)


def _lock(folder: Path) -> IO:
    path = folder / LOCK
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.fstat(lock.fileno()).st_ino == path.stat().st_ino:  # else its owner removed it
                break
        except BlockingIOError:
            if time.monotonic() > deadline:
                lock.seek(0)
                raise Refusal(
                    f"{folder} is in use by another job ({lock.read().strip()}); wait for it or set run.dir to another"
                ) from None
            time.sleep(0.2)
        lock.close()
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    lock.flush()
    return lock


def _start(cfg: Config, folder: Path, restarted: bool) -> Path | None:
    """The checkpoint from which this config goes on in the folder; None to begin. Raises: Refusal."""
    if cfg.run.overwrite and not restarted:  # what it began itself is not to be overwritten
        _remove(folder)
        return None
    if not (folder / "config.toml").exists():
        strange = [path.name for path in folder.iterdir() if not path.name.startswith(".")]
        if strange:
            raise Refusal(f"{folder} holds {strange[0]} but no run; set run.dir to another folder")
        if cfg.run.resume == "must":
            raise Refusal(f"{folder} holds no run to continue; set run.dir to one or run.resume=auto")
        return None
    if cfg.run.resume == "never" and not restarted:
        raise Refusal(f"{folder} already holds a run; set run.dir to another folder or run.overwrite=true")
    if (folder / "outcome.json").exists():
        raise Refusal(f"{folder} already holds a finished run; set run.dir to another folder or run.overwrite=true")
    saved = checkpoint_files.found(folder)
    if cfg.run.resume == "must" and not saved:
        raise Refusal(f"{folder} holds no checkpoint to continue from; run.resume=auto begins again")
    _require_same(cfg, folder)
    return saved[-1] if saved else None


def _require_same(cfg: Config, folder: Path) -> None:
    """Raises: Refusal naming the keys that differ from the run's, except those that may."""
    own, ran = config.flat(cfg), config.flat(config_file.load(folder / "config.toml"))
    differ = [f"{key}={own[key]!r}, there {ran[key]!r}" for key in own if own[key] != ran[key]]
    differ = [text for text in differ if text.split("=")[0] not in config.MAY_DIFFER]
    if differ:
        raise Refusal(
            f"{folder} holds an unfinished run of another config: {'; '.join(differ)};"
            " give the same values, another run.dir or run.overwrite=true"
        )


def release(claimed: Claim) -> None:
    """Undo a claim, for a run that was refused before it trained; one that has trained is left alone."""
    if claimed.fresh and not (claimed.folder / "metrics.jsonl").exists():
        _remove(claimed.folder)
        _leave(claimed.folder, claimed.made)


def _leave(folder: Path, made: bool) -> None:
    """Remove our lock from a folder that holds nothing else, and the folder if we made it."""
    if [path.name for path in folder.iterdir()] == [LOCK]:
        (folder / LOCK).unlink()
        if made:
            folder.rmdir()


def _remove(folder: Path) -> None:
    for path in (*(folder / name for name in RUN_FILES), *folder.glob("samples/*.png")):
        path.unlink(missing_ok=True)
    shutil.rmtree(checkpoint_files.folder_of(folder), ignore_errors=True)
    if (folder / "samples").is_dir() and not any((folder / "samples").iterdir()):
        (folder / "samples").rmdir()
