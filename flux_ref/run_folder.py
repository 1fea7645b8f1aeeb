"""Which run a folder holds, who may write into it, and from where a run in it goes on. Rank 0 does all of this.

What a start of train.py does with the run's folder:

    the folder holds                            the same command                 with run.start_fresh=true
    nothing, or it is not there                 begins                           begins
    files, no config.toml and no checkpoint     refuses                          refuses
    a run without a checkpoint                  moves it aside, begins           the same
    a run with a checkpoint, not finished       goes on from the newest          moves it aside, begins
    a finished run                              refuses; goes on if extended     moves it aside, begins
    a run of another config or other data       refuses                          moves it aside, begins
    a newest checkpoint that is damaged, or of  refuses                          moves it aside, begins
      another format
    a run that another job writes               refuses                          refuses

A run without outcome.json is not finished. A greater train.max_samples or a lower eval.target extends a finished one.
Aside is NAME.1 (or .2, ...). Where the folder is a mount, or its parent may not be written, aside is NAME/older.1.
A restart by torchrun goes on with what its own job began, also with run.start_fresh=true. A config.toml in a run's
folder is a config for this folder only: a copy or a moved run must be given its --run.dir. Links count as what they
lead to.

Nothing but empty lock files is written before `begin`, so a start that is refused changes no run. Nothing is deleted.
"""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from flux_ref import checkpoint, config, config_file, files, ranks
from flux_ref.checkpoint import Checkpoint
from flux_ref.cli import Refusal
from flux_ref.config import KEYS, Config
from flux_ref.ranks import World

CONFIG = "config.toml"
LOG = "result_0.txt"
OUTCOME = "outcome.json"
LOCK = ".lock"
OLDER = "older."  # and a number: older runs inside a folder that cannot be renamed
REACHED = "target reached"  # how a run came to its end
ENDED = "train.max_samples reached"
REMEDY = "set run.dir to another folder, or run.start_fresh=true to begin anew"


def require_own(path: str, cfg: Config, overrides: list[str]) -> None:
    """Raises: Refusal for the config.toml of a run that names the folder of another run, as after a copy or a move."""
    folder = Path(path).parent
    is_of_run = Path(path).name == CONFIG and (folder / LOG).exists() and "run.dir" not in config_file.parsed(overrides)
    if is_of_run and config.run_dir(cfg).resolve() != folder.resolve():
        raise Refusal(f"{path} lies in a run's folder, but its run.dir is {cfg.run.dir}; give --run.dir={folder}")


@contextmanager
def held(cfg: Config, world: World, sizes: dict[str, int]) -> Iterator[Path | None]:
    """Holds the run's folder in this block. Gives the checkpoint from which its run goes on, None if it begins.

    Two locks: one beside the folder for its name, and one in it, as containers may mount it under several names.
    Collective. sizes: {"train_samples", "val_samples"} of the data.
    Raises: Refusal if another job has the folder, or if its run cannot go on with this config and data.
    """
    folder = config.run_dir(cfg).resolve()
    with ExitStack() as stack:
        saved = None
        with ranks.agreed():
            if world.rank == 0:
                folder.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(files.lock(folder.with_name(f".{folder.name}.lock"), str(folder)))
                if _content(folder) and not _holds_run(folder):
                    raise Refusal(f"{folder} holds files but no run; set run.dir to another folder")
                if folder.exists():
                    stack.enter_context(files.lock(folder / LOCK, str(folder)))
                if not cfg.run.start_fresh or world.store.check([_begun_by_job(folder)]):
                    saved = _checkpoint(cfg, folder, sizes)
        found = ranks.gather_objects(saved and str(saved))[0]
        yield Path(found) if found else None


def begin(cfg: Config, world: World, saved: Path | None, stack: ExitStack) -> str:
    """Make the folder of a run that is about to train. Returns what became of an older run. Collective.

    saved: the checkpoint that `held` gave. stack: holds the lock of a new folder. Raises: Refusal.
    """
    told = ""
    with ranks.agreed():
        if world.rank == 0:
            folder = config.run_dir(cfg).resolve()
            for place in (folder, folder / "samples", checkpoint.folder_of(folder)):  # also of a run that is moved
                files.remove_partial_files(place)
            if not saved and _holds_run(folder):
                reason = "" if cfg.run.start_fresh else " has no checkpoint to go on from, so this run begins anew; it"
                told = f"the run that was in {folder}{reason} lies in {_move_aside(folder)}"
            if not folder.exists():
                folder.mkdir()
                stack.enter_context(files.lock(folder / LOCK, str(folder)))
            own = config_file.replace(cfg, run__dir=str(config.run_dir(cfg)), run__start_fresh=False)
            files.write_whole(folder / CONFIG, config_file.dump(own))
            files.remove(folder / OUTCOME)  # of a run that is extended
            checkpoint.prune(folder, cfg.checkpoint.keep)
            world.store.set(_begun_by_job(folder), "")
    return told


def _begun_by_job(folder: Path) -> str:
    """A key of torchrun's store, which outlives restarts: this job has begun or continued the run in the folder."""
    return f"begun {folder}"


def _holds_run(folder: Path) -> bool:
    return (folder / CONFIG).exists() or bool(checkpoint.list_checkpoints(folder))


def _content(folder: Path) -> list[Path]:
    """What a user sees in a folder, without what a new file system has and without older runs."""
    return [path for path in files.matching(folder, "[!.]*") if not path.name.startswith((OLDER, "lost+found"))]


def _move_aside(folder: Path) -> Path:
    """Make place for a new run. Returns where the old one lies then."""
    aside = next(path for n in count(1) if not os.path.lexists(path := Path(f"{folder}.{n}")))
    try:
        folder.rename(aside)
    except OSError:  # a mount, or a parent that may not be written
        aside = next(path for n in count(1) if not ((path := folder / f"{OLDER}{n}") / CONFIG).exists())
        aside.mkdir(exist_ok=True)
        for path in sorted(_content(folder), key=lambda path: path.name == CONFIG):  # last: a killed move goes on
            path.rename(aside / path.name)
    return aside


def _checkpoint(cfg: Config, folder: Path, sizes: dict[str, int]) -> Path | None:
    """The checkpoint from which the folder's run goes on; None if it has none. Raises: Refusal."""
    saved = next(reversed(checkpoint.list_checkpoints(folder)), None)
    if saved:
        info = Checkpoint(saved).info
        ran = config.flat(config_file.from_flat(info["name"], info["config"])) | info
        given = config.flat(cfg) | sizes
        differ = [
            f"{key}={value!r}, there {ran[key]!r}"
            for key, value in given.items()
            if value != ran[key] and not (key in KEYS and KEYS[key].resume)
        ]
        if differ:
            raise Refusal(f"{folder} holds a run of another config or data: {'; '.join(differ)}; {REMEDY}")
    if (folder / OUTCOME).exists():
        try:
            end = json.loads((folder / OUTCOME).read_bytes())
        except ValueError as error:
            raise Refusal(f"{folder / OUTCOME} is damaged: {error}; mend it, or {REMEDY}") from None
        reached = end["val_loss"] is not None and end["val_loss"] <= cfg.eval.target
        if reached or end["samples"] >= cfg.train.max_samples:
            longer = "raise train.max_samples or lower eval.target to train it longer (at optim.lr / 10 after a decay)"
            raise Refusal(f"{folder} holds a finished run; {longer}, or {REMEDY}")
    return saved
