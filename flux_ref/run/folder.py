"""Claims a run's folder for one job, and picks the checkpoint from which a run goes on.

Rank 0 does all of this. A run without outcome.json is unfinished; the same command continues it.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flux_ref import config, config_file, ranks
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files
from flux_ref.formats.claim import owner, take
from flux_ref.formats.files import write_whole
from flux_ref.ranks import World
from flux_ref.run import resuming

RECORDS = ("metrics.jsonl", "eval.jsonl", "result_0.txt")  # of what has been trained
RUN_FILES = ("config.toml", "environment.json", *RECORDS, "loss.png", "eval_all.png", "outcome.json")
CLAIM = ".claim"
CLAIM_WAIT_S = 10.0  # ranks that have lost their launcher end within a few seconds


@dataclass(frozen=True)
class Start:
    """Where a run starts, the same on every rank."""

    is_new: bool  # nothing has been trained in this folder
    checkpoint: Path | None  # from which to go on


@contextmanager
def claimed(cfg: Config, world: World) -> Iterator[Start]:
    """Holds the run's folder in this block. Collective.

    A run that is refused inside the block, before it has trained, leaves no trace.
    Raises: Refusal if another job has the folder, or if the folder's run cannot go on with cfg.
    """
    # Has torchrun started this job before? Only the node that failed counts its restarts, so all ranks are asked.
    restarted = any(ranks.gather_objects(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))
    with ExitStack() as stack:
        start = Start(False, None)
        with ranks.agreed():
            if world.rank == 0:
                start = stack.enter_context(claim(cfg, restarted))
        is_new, checkpoint = ranks.gather_objects([start.is_new, start.checkpoint and str(start.checkpoint)])[0]
        yield Start(is_new, checkpoint and Path(checkpoint))


@contextmanager
def claim(cfg: Config, restarted: bool) -> Iterator[Start]:
    """`claimed` on rank 0. restarted: torchrun repeats its command after a failure."""
    folder = config.run_dir(cfg)
    is_new = False
    is_made = not folder.exists()
    with ExitStack() as stack:
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if is_made:
                stack.callback(_remove_if_empty, folder)
            if not (own := take(folder / CLAIM, CLAIM_WAIT_S)):
                who = owner(folder / CLAIM)
                raise Refusal(f"{folder} is in use by another job ({who}); wait for it or set run.dir to another")
            stack.enter_context(own)
        try:
            with _writing(folder):
                checkpoint = _checkpoint(cfg, folder, restarted)
                checkpoint_files.clean(folder)
                if checkpoint is None:
                    write_config(cfg)
            is_new = checkpoint is None and not any((folder / name).exists() for name in RECORDS)
            yield Start(is_new, checkpoint)
        except (Refusal, KeyboardInterrupt):
            if is_new and not (folder / "metrics.jsonl").exists():  # a run that has trained keeps its files
                _remove(folder)
            raise


def write_config(cfg: Config) -> None:
    """Write what the run in a folder trains. A run that goes on has its old config until it trains."""
    folder = config.run_dir(cfg)
    own = config_file.replace(cfg, run__dir=str(folder), run__overwrite=False, run__resume="auto")
    write_whole(folder / "config.toml", config_file.dump(own))


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises: Refusal in place of an OSError of the block."""
    try:
        yield
    except OSError as error:
        raise Refusal(f"run.dir={folder} cannot be made or written: {error.strerror}; set run.dir to another") from None


def _checkpoint(cfg: Config, folder: Path, restarted: bool) -> Path | None:
    """The checkpoint from which this config goes on in the folder. None for a new run. Raises: Refusal."""
    if cfg.run.overwrite and not restarted:  # a restarted job must not delete its own run
        _remove(folder)
        return None
    if not (folder / "config.toml").exists():
        if strange := [path.name for path in folder.iterdir() if not path.name.startswith(".")]:
            raise Refusal(f"{folder} holds {strange[0]} but no run; set run.dir to another folder")
        if cfg.run.resume == "must":
            raise Refusal(f"{folder} holds no run to continue; set run.dir to one or run.resume=auto")
        return None
    if cfg.run.resume == "never" and not restarted:
        raise Refusal(f"{folder} already holds a run; set run.dir to another folder or run.overwrite=true")
    saved = checkpoint_files.list_checkpoints(folder)
    if cfg.run.resume == "must" and not saved:
        raise Refusal(f"{folder} holds no checkpoint to continue from; run.resume=auto begins again")
    resuming.require_continues(cfg, folder, saved)
    return saved[-1] if saved else None


def _remove(folder: Path) -> None:
    for path in (*(folder / name for name in RUN_FILES), *folder.glob("samples/*.png")):
        path.unlink(missing_ok=True)
    for derived in (checkpoint_files.folder_of(folder), folder / "tensorboard"):
        shutil.rmtree(derived, ignore_errors=True)
    _remove_if_empty(folder / "samples")
