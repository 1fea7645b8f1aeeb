"""Which run a folder holds, who may write into it, and from where a run in it goes on.

Rank 0 does all of this. A run without outcome.json is unfinished; the same command continues it. Nothing is written
before `begin`, so a start that is refused changes nothing. run.overwrite=true renames the old folder to NAME.1 (or .2,
...): nothing is deleted.
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from flux_ref import checkpoint, config, config_file, files, ranks, schedule
from flux_ref.checkpoint import Checkpoint
from flux_ref.config import KEYS, Config
from flux_ref.errors import Refusal
from flux_ref.ranks import World

CONFIG = "config.toml"
LOG = "result_0.txt"
ENVIRONMENT = "environment.json"
OUTCOME = "outcome.json"
REACHED, ENDED = "target reached", "train.max_samples reached"  # how a run came to its end
REMEDY = "set run.dir to another folder, or run.overwrite=true"
SWITCH = "precision.switch"  # its entries that begin after the checkpoint may change


@dataclass(frozen=True)
class Start:
    """Where a run starts, the same on every rank."""

    resumes: bool  # the run of the folder, else a new one begins
    checkpoint: Path | None  # from which it goes on


@contextmanager
def held(cfg: Config, world: World, sizes: dict[str, int]) -> Iterator[Start]:
    """Holds the run's folder in this block. Collective. sizes: {"train_samples", "val_samples"} of the data.

    Raises: Refusal if another job has the folder, or if its run cannot go on with this config and data.
    """
    # A job that torchrun starts again must not rename its own run. Only the node that failed counts its restarts.
    restarted = any(ranks.gather_objects(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))
    folder = _place(cfg)
    with ExitStack() as stack:
        found: list = []
        with ranks.agreed():
            if world.rank == 0:
                folder.parent.mkdir(parents=True, exist_ok=True)
                lock = folder.with_name(f".{folder.name}.lock")
                stack.enter_context(files.lock(lock, str(folder)))
                names = [path.name for path in folder.glob("[!.]*")]
                if names and CONFIG not in names:
                    raise Refusal(f"{folder} holds {names[0]} but no run; set run.dir to another folder")
                resumes = CONFIG in names and (restarted or not cfg.run.overwrite)
                found = [resumes, str(_checkpoint(cfg, folder, sizes) or "") if resumes else ""]
        resumes, saved = ranks.gather_objects(found)[0]
        yield Start(resumes, Path(saved) if saved else None)


def begin(cfg: Config, world: World, start: Start) -> str:
    """Make the folder of a run that is about to train. Returns what became of an older run. Collective.

    Raises: Refusal.
    """
    told = ""
    with ranks.agreed():
        if world.rank == 0:
            folder = _place(cfg)
            if not start.resumes and (folder / CONFIG).exists():
                aside = next(path for n in count(1) if not (path := Path(f"{folder}.{n}")).exists())
                folder.rename(aside)
                told = f"the run that was in {folder} lies in {aside}"
            folder.mkdir(exist_ok=True)
            own = config_file.replace(cfg, run__dir=str(config.run_dir(cfg)), run__overwrite=False)
            files.write_whole(folder / CONFIG, config_file.dump(own))
            files.remove(folder / OUTCOME)  # of a run that is extended
            checkpoint.prune(folder, cfg.checkpoint.keep)
    return told


def _place(cfg: Config) -> Path:
    """The folder itself: names that link to it share its lock."""
    return config.run_dir(cfg).resolve()


def _checkpoint(cfg: Config, folder: Path, sizes: dict[str, int]) -> Path | None:
    """The checkpoint from which the folder's run goes on; None for its beginning. Raises: Refusal."""
    saved = next(reversed(checkpoint.list_checkpoints(folder)), None)
    if saved:
        info = Checkpoint(saved).info
        there = config_file.from_flat(info["name"], info["config"])
    else:
        info = {"step": 0} | sizes
        there = config_file.load(folder / CONFIG)
    ran = config.flat(there) | info | {SWITCH: _begun(there, info["step"])}
    given = config.flat(cfg) | sizes | {SWITCH: _begun(cfg, info["step"])}
    fixed = [key for key in given if not (key in KEYS and KEYS[key].resume)]
    differ = [f"{key}={given[key]!r}, there {ran[key]!r}" for key in fixed if given[key] != ran[key]]
    if differ:
        raise Refusal(
            f"{folder} holds a run of another config or data: {'; '.join(differ)}; give the same, or {REMEDY}"
        )
    if (folder / OUTCOME).exists():
        end = files.read_json(folder / OUTCOME, "outcome")
        samples = end["samples"]
        loss = end["val_loss"]
        if not saved or samples >= cfg.train.max_samples or (loss is not None and loss <= cfg.eval.target):
            longer = f"a checkpoint, train.max_samples above {samples} and eval.target below {loss}"
            raise Refusal(f"{folder} holds a finished run; to train longer it needs {longer}; or {REMEDY}")
    return saved


def _begun(cfg: Config, step: int) -> tuple[tuple[int, str], ...]:
    """The entries of precision.switch that begin at a step or before. An evaluation at the step is in their preset."""
    batch = cfg.train.global_batch
    return tuple(entry for entry in cfg.precision.switch if schedule.steps_for(entry[0], batch) <= step)
