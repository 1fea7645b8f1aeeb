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
RECORDS = ("metrics.jsonl", "eval.jsonl", LOG)  # of what has been trained
ENVIRONMENT = "environment.json"
OUTCOME = "outcome.json"
LOCK_WAIT_S = 10.0  # ranks that have lost their launcher end within a few seconds
REACHED, ENDED = "target reached", "train.max_samples reached"  # how a run came to its end
ANOTHER = "set run.dir to another folder"

SWITCH = "precision.switch"  # its entries that begin after the checkpoint may change


@dataclass(frozen=True)
class Start:
    """Where a run starts, the same on every rank."""

    resumes: bool  # the run of the folder, else a new one begins
    checkpoint: Path | None = None  # from which it goes on
    unlocked: str = ""  # why the folder has no lock, for the user


@contextmanager
def held(cfg: Config, world: World, sizes: dict[str, int]) -> Iterator[Start]:
    """Holds the run's folder in this block. Collective. sizes: {"train_samples", "val_samples"} of the data.

    Raises: Refusal if another job has the folder, or if its run cannot go on with this config and data.
    """
    # Has torchrun started this job before? Only the node that failed counts its restarts, so all ranks are asked.
    restarted = any(ranks.gather_objects(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))
    folder = _place(cfg)
    with ExitStack() as stack:
        found: list = []
        with ranks.agreed():
            if world.rank == 0:
                folder.parent.mkdir(parents=True, exist_ok=True)
                lock = folder.with_name(f".{folder.name}.lock")
                remedy = "wait for it or set run.dir to another"
                unlocked = stack.enter_context(files.lock(lock, f"{folder} is in use", remedy, LOCK_WAIT_S))
                names = [path.name for path in folder.glob("*") if not path.name.startswith(".")]
                if names and CONFIG not in names:
                    raise Refusal(f"{folder} holds {names[0]} but no run; {ANOTHER}")
                # A restarted job must not rename its own run.
                resumes = not {*RECORDS, "checkpoints"}.isdisjoint(names) and (restarted or not cfg.run.overwrite)
                found = [resumes, str(_checkpoint(cfg, folder, sizes) or "") if resumes else "", unlocked]
        resumes, saved, unlocked = ranks.gather_objects(found)[0]
        yield Start(resumes, Path(saved) if saved else None, unlocked)


def begin(cfg: Config, world: World, start: Start) -> str:
    """Make the folder of a run that is about to train. Returns what became of an older run. Collective.

    Raises: Refusal.
    """
    told = ""
    with ranks.agreed():
        if world.rank == 0:
            folder = _place(cfg)
            if cfg.run.overwrite and not start.resumes and (folder / CONFIG).exists():
                aside = next(path for n in count(1) if not (path := Path(f"{folder}.{n}")).exists())
                folder.rename(aside)
                told = f"the run that was in {folder} lies in {aside}"
            folder.mkdir(exist_ok=True)
            own = config_file.replace(cfg, run__dir=str(config.run_dir(cfg)), run__overwrite=False)
            files.write_whole(folder / CONFIG, config_file.dump(own))
            files.remove(folder / OUTCOME)  # of a run that is extended
            for path in folder.rglob(f".*{files.PARTIAL}"):
                files.remove(path)
            checkpoint.prune(folder, cfg.checkpoint.keep)
    return told


def _place(cfg: Config) -> Path:
    """The folder itself: names that link to it share its lock."""
    return config.run_dir(cfg).resolve()


def _checkpoint(cfg: Config, folder: Path, sizes: dict[str, int]) -> Path | None:
    """The checkpoint from which the folder's run goes on; None for its beginning. Raises: Refusal."""
    saved = next(reversed(checkpoint.list_checkpoints(folder)), None)
    info = Checkpoint(saved).info if saved else {"step": 0} | sizes
    there = config_file.from_flat(info["name"], info["config"]) if saved else config_file.load(folder / CONFIG)
    remedy = f"{ANOTHER}, or run.overwrite=true"
    ran = config.flat(there) | info
    differ = []
    for key, value in (config.flat(cfg) | sizes).items():
        may_change = key in KEYS and KEYS[key].resume
        may_change |= key == SWITCH and _switched(cfg, info["step"]) == _switched(there, info["step"])
        if value != ran[key] and not may_change:
            differ.append(f"{key}={value!r}, there {ran[key]!r}")
    if differ:
        raise Refusal(
            f"{folder} holds a run of another config or data: {'; '.join(differ)}; give the same, or {remedy};"
            f" of {SWITCH} only what begins after {info['step'] * cfg.train.global_batch} samples may change"
        )
    if (folder / OUTCOME).exists():
        end = files.json_object((folder / OUTCOME).read_bytes())
        samples, loss = end.get("samples"), end.get("val_loss")
        is_short = files.is_number(samples) and samples < cfg.train.max_samples
        is_above = loss is None or (files.is_number(loss) and loss > cfg.eval.target)
        if not (saved and is_short and is_above):
            longer = f"a checkpoint, train.max_samples above {samples} and eval.target below {loss}"
            raise Refusal(f"{folder} holds a finished run; to train longer it needs {longer}; or {remedy}")
    return saved


def _switched(cfg: Config, step: int) -> list[tuple[int, str]]:
    """The entries of precision.switch that begin at a step or before. An evaluation at the step is in their preset."""
    batch = cfg.train.global_batch
    return [entry for entry in cfg.precision.switch if schedule.steps_for(entry[0], batch) <= step]
