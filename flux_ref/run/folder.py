"""Locks a run's folder for one job, and picks the checkpoint from which an unfinished run goes on.

Rank 0 does all of this. The lock lasts as long as the process. A run without outcome.json is unfinished; the same
command continues it.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from flux_ref import config, config_file, ranks
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files
from flux_ref.formats.files import locked, write_whole
from flux_ref.ranks import World

RUN_FILES = ("config.toml", "environment.json", "metrics.jsonl", "eval.jsonl", "result_0.txt", "loss.png")
RUN_FILES += ("outcome.json",)
RECORDS = ("metrics.jsonl", "eval.jsonl", "result_0.txt")  # of what has been trained
LOCK = ".lock"
LOCK_WAIT_S = 10.0  # ranks that have lost their launcher end within a few seconds


@dataclass(frozen=True)
class Start:
    """Where a run starts, the same on every rank."""

    is_new: bool  # nothing has been trained in this folder
    checkpoint: Path | None  # from which to go on


@dataclass(frozen=True)
class Claim:
    """A locked folder. The lock lasts until the file is closed."""

    folder: Path
    is_made: bool  # by this process
    lock: IO
    start: Start


def result_file(cfg: Config, world: World) -> Path | None:
    """Where rank 0 writes the benchmark's log. None on other ranks."""
    return config.run_dir(cfg) / "result_0.txt" if world.rank == 0 else None


@contextmanager
def claimed(cfg: Config, world: World) -> Iterator[Start]:
    """Holds the run's folder in this block. Collective.

    A run that is refused inside the block, before it has trained, leaves no trace.
    Raises: Refusal if another job has the folder, or if the folder's run cannot go on with cfg.
    """
    restarted = _is_restarted()
    own = None
    with ranks.agreed():
        if world.rank == 0:
            own = claim(cfg, restarted)
    try:
        yield ranks.gather_objects(own and own.start)[0]
    except Refusal:
        if own:
            _release(own)
        raise


def _is_restarted() -> bool:
    """Whether torchrun has started this job before. Collective.

    Only the node that failed counts its restarts, so all ranks are asked.
    """
    return any(ranks.gather_objects(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))


def claim(cfg: Config, restarted: bool) -> Claim:
    """Lock the run's folder. restarted: torchrun repeats its command after a failure.

    Raises: Refusal as `claimed`.
    """
    folder = config.run_dir(cfg)
    is_made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            checkpoint = _checkpoint(cfg, folder, restarted)
        except Refusal:
            _leave(folder, is_made)
            lock.close()
            raise
        checkpoint_files.clean(folder)
        own = config_file.replace(cfg, run__dir=str(folder), run__overwrite=False, run__resume="auto")
        write_whole(folder / "config.toml", config_file.dump(own))
    except OSError as error:
        raise Refusal(f"run.dir={folder} cannot be made or written: {error.strerror}; set run.dir to another") from None
    is_new = checkpoint is None and not any((folder / name).exists() for name in RECORDS)
    return Claim(folder, is_made, lock, Start(is_new, checkpoint))


def _lock(folder: Path) -> IO:
    path = folder / LOCK
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        lock = locked(path)
        if lock and path.exists() and os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
            break
        if lock:  # the job before has removed this file meanwhile
            lock.close()
            continue
        if time.monotonic() > deadline:
            owner = path.read_text(encoding="utf-8").strip()
            raise Refusal(f"{folder} is in use by another job ({owner}); wait for it or set run.dir to another")
        time.sleep(0.2)
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    lock.flush()
    return lock


def _checkpoint(cfg: Config, folder: Path, restarted: bool) -> Path | None:
    """The checkpoint from which this config goes on in the folder. None for a new run. Raises: Refusal."""
    if cfg.run.overwrite and not restarted:  # a restarted job must not delete its own run
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
    """Raises: Refusal that names the keys with other values than the run's. config.MAY_DIFFER lists the exceptions."""
    own, ran = config.flat(cfg), config.flat(config_file.load(folder / "config.toml"))
    differ = [f"{key}={own[key]!r}, there {ran[key]!r}" for key in own if own[key] != ran[key]]
    differ = [text for text in differ if text.split("=")[0] not in config.MAY_DIFFER]
    if differ:
        raise Refusal(
            f"{folder} holds an unfinished run of another config: {'; '.join(differ)};"
            " give the same values, another run.dir or run.overwrite=true"
        )


def _release(own: Claim) -> None:
    """Undo a claim of a run that was refused before it trained. A run that has trained keeps its files."""
    if own.start.is_new and not (own.folder / "metrics.jsonl").exists():
        _remove(own.folder)
        _leave(own.folder, own.is_made)


def _leave(folder: Path, is_made: bool) -> None:
    """Remove the lock from a folder that holds nothing else. is_made: remove the folder, too."""
    if [path.name for path in folder.iterdir()] == [LOCK]:
        (folder / LOCK).unlink()
        if is_made:
            folder.rmdir()


def _remove(folder: Path) -> None:
    for path in (*(folder / name for name in RUN_FILES), *folder.glob("samples/*.png")):
        path.unlink(missing_ok=True)
    shutil.rmtree(checkpoint_files.folder_of(folder), ignore_errors=True)
    if (folder / "samples").is_dir() and not any((folder / "samples").iterdir()):
        (folder / "samples").rmdir()


def config_of(path: Path, given: str | None) -> Config:
    """The config of weights at a path that weight_files.find returned. Raises: Refusal.

    given: a config file. None: a checkpoint's own config, and FLUX.1-schnell's for other weights.
    """
    if given is None and checkpoint_files.is_checkpoint(path):
        info = checkpoint_files.Checkpoint(path).info
        return config_file.from_flat(info["name"], info["config"])
    return config_file.load(given) if given else Config(name="schnell")
