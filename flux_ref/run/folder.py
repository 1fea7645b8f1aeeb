"""Claims a run's folder for one job, and picks the checkpoint from which a run goes on.

Rank 0 does all of this. A run without outcome.json is unfinished; the same command continues it. run.overwrite=true
moves the old run into overwritten_1 (or _2, ...) of the folder. The new run's first checkpoint or its end deletes it.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from flux_ref import config, config_file, ranks
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files, files, jsonl, outside
from flux_ref.formats.checkpoint_reader import Checkpoint
from flux_ref.formats.claim import hold
from flux_ref.ranks import World
from flux_ref.run import resuming

LOG = "result_0.txt"
RECORDS = ("metrics.jsonl", "eval.jsonl", LOG)  # of what has been trained
ENVIRONMENT = "environment.json"
# All that train.py and eval.py write into a run's folder, as patterns of names. Nothing else is moved.
WRITTEN = (
    *("config.toml", ENVIRONMENT, *RECORDS, "loss.png", "eval_all.png", "eval_all_ema.png", "outcome.json"),
    *("tensorboard/*", "samples/[0-9]*.png", "samples/strip.png", "samples/eval_*.png", "checkpoints/step_*"),
)
CLAIM = ".claim"
CLAIM_WAIT_S = 10.0  # ranks that have lost their launcher end within a few seconds


@dataclass(frozen=True)
class Start:
    """Where a run starts, the same on every rank."""

    is_new: bool  # nothing has been trained in this folder
    checkpoint: Path | None  # from which to go on
    identity: str  # of the run: drawn at its first start


@contextmanager
def claimed(cfg: Config, world: World) -> Iterator[Start]:
    """Holds the run's folder in this block. Collective.

    A run that is refused inside the block, before it has trained, leaves no trace.
    Raises: Refusal if another job has the folder, or if the folder's run cannot go on with cfg.
    """
    # Has torchrun started this job before? Only the node that failed counts its restarts, so all ranks are asked.
    restarted = any(ranks.gather_objects(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))
    with ExitStack() as stack:
        start = Start(False, None, "")
        with ranks.agreed():
            if world.rank == 0:
                start = stack.enter_context(claim(cfg, restarted))
        own = [start.is_new, start.checkpoint and str(start.checkpoint), start.identity]
        is_new, checkpoint, identity = ranks.gather_objects(own)[0]
        yield Start(is_new, checkpoint and Path(checkpoint), identity)


@contextmanager
def claim(cfg: Config, restarted: bool) -> Iterator[Start]:
    """`claimed` on rank 0. restarted: torchrun repeats its command after a failure."""
    folder = config.run_dir(cfg)
    is_new = False
    is_made = not folder.exists()
    aside = None
    with ExitStack() as stack:
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if is_made:
                stack.callback(_remove_if_empty, folder)
            remedy = "wait for it or set run.dir to another"
            stack.enter_context(hold(folder / CLAIM, f"{folder} is in use", remedy, CLAIM_WAIT_S))
        try:
            with _writing(folder):
                # A restarted job must not overwrite its own run.
                if cfg.run.overwrite and not restarted and (folder / "config.toml").exists():
                    aside = _set_aside(cfg, folder)
                checkpoint = None if aside else _checkpoint(cfg, folder, restarted)
                checkpoint_files.clean(folder)
                identity = _identity(folder, checkpoint)
                if checkpoint is None:
                    write_config(cfg)
            is_new = checkpoint is None and not any((folder / name).exists() for name in RECORDS)
            if not is_new:
                stack.enter_context(_kept_until_the_clock_starts(folder))
            yield Start(is_new, checkpoint, identity)
        except (Refusal, KeyboardInterrupt):
            if is_new and not (folder / "metrics.jsonl").exists():  # a run that has trained keeps its files
                for path in _written(folder):
                    files.remove(path)
                _remove_emptied(folder)
            if aside and not (folder / "config.toml").exists():
                _move(aside, folder)
                aside.rmdir()
            raise


@contextmanager
def _kept_until_the_clock_starts(folder: Path) -> Iterator[None]:
    """What a run has written, if a later start of it is refused or stopped in this block before it trains."""
    log = folder / LOG
    places = [path for path in (log, folder / ENVIRONMENT) if path.is_file() or not os.path.lexists(path)]
    before = {path: _content(path) for path in places}
    try:
        yield
    except (Refusal, KeyboardInterrupt):
        if b'"run_start"' not in _content(log)[len(before.get(log, b"")) :]:
            for path in places:
                _restore(path, before[path])
        raise


def _content(path: Path) -> bytes:
    """b"" if there is no file. Raises: Refusal."""
    return outside.read_bytes(path, "file of a run", outside.OWN_BYTES) if path.is_file() else b""


def _restore(path: Path, content: bytes) -> None:
    """content: b"" for no file."""
    if not content:
        files.remove(path)
    elif _content(path) != content:
        with files.whole(path) as partial:
            partial.write_bytes(content)


def _identity(folder: Path, checkpoint: Path | None) -> str:
    """The identity of a folder's run: of its file, else of its checkpoint, else a new one."""
    identity = None
    with suppress(Refusal):
        identity = jsonl.json_object(folder / ENVIRONMENT).get("run")
    with suppress(Refusal):
        if checkpoint and not identity:
            identity = Checkpoint(checkpoint).info.get("run")
    return str(identity or secrets.token_hex(8))


def write_config(cfg: Config) -> None:
    """Write what the run in a folder trains. A run that goes on has its old config until it trains."""
    folder = config.run_dir(cfg)
    own = config_file.replace(cfg, run__dir=str(folder), run__overwrite=False, run__resume="auto")
    files.write_whole(folder / "config.toml", config_file.dump(own))


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
    if not (folder / "config.toml").exists():
        if strange := [
            path.name for path in folder.iterdir() if not path.name.startswith((".", checkpoint_files.OVERWRITTEN))
        ]:
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


def _written(folder: Path) -> list[Path]:
    """What a run has written into its folder."""
    return [path for pattern in WRITTEN for path in folder.glob(pattern)]


def _set_aside(cfg: Config, folder: Path) -> Path:
    """Move the run of a folder into a new folder in it. Raises: Refusal if there is none, or if it is still needed."""
    config_file.require_run(folder)
    start = Path(cfg.init.weights).resolve()
    if cfg.init.weights and start.is_relative_to(folder.resolve()):
        rule = f"init.weights={cfg.init.weights} is of the run that run.overwrite=true replaces"
        raise Refusal(f"{rule}; set run.dir to another folder")
    names = (f"{checkpoint_files.OVERWRITTEN}{number}" for number in count(1))
    aside = next(folder / name for name in names if not (folder / name).exists())
    _move(folder, aside)
    return aside


def _move(source: Path, target: Path) -> None:
    """Move what a run has written from one folder into another."""
    for path in _written(source):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)
    _remove_emptied(source)


def _remove_emptied(folder: Path) -> None:
    for path in (checkpoint_files.folder_of(folder), folder / "samples"):
        _remove_if_empty(path)
