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
from flux_ref.formats import outside
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
                resumes = _resumes(cfg, folder, restarted)
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
            (folder / OUTCOME).unlink(missing_ok=True)  # of a run that is extended
            for path in (*folder.glob(f".*{files.PARTIAL}"), *folder.glob(f"samples/.*{files.PARTIAL}")):
                files.remove(path)
            checkpoint.prune(folder, cfg.checkpoint.keep)
    return told


def outcome(run: Path) -> dict:
    """outcome.json of a run; {} if it has not ended or was cut off. Raises: Refusal."""
    path = run / OUTCOME
    if not path.exists():
        return {}
    end = outside.read_json(path, "outcome")
    figures = end.get("samples"), end.get("val_loss") or 0
    if end.get("outcome") not in (REACHED, ENDED) or not all(map(files.is_number, figures)):
        raise Refusal(f"{path} is damaged (no outcome, samples or val_loss of a run); mend it")
    return end


def _place(cfg: Config) -> Path:
    """The folder itself: names that link to it share its lock."""
    return config.run_dir(cfg).resolve()


def _resumes(cfg: Config, folder: Path, restarted: bool) -> bool:
    """Whether the folder's run goes on. restarted: torchrun repeats its command after a failure. Raises: Refusal."""
    names = [path.name for path in folder.iterdir() if not path.name.startswith(".")] if folder.exists() else []
    if names and CONFIG not in names:
        raise Refusal(f"{folder} holds {names[0]} but no run; {ANOTHER}")
    if not cfg.run.overwrite or restarted:  # a restarted job must not rename its own run
        return any(name in names for name in (*RECORDS, "checkpoints"))
    if cfg.init.weights and Path(cfg.init.weights).resolve().is_relative_to(folder):
        raise Refusal(f"init.weights={cfg.init.weights} is of the run that run.overwrite=true renames; {ANOTHER}")
    return False


def _checkpoint(cfg: Config, folder: Path, sizes: dict[str, int]) -> Path | None:
    """The checkpoint from which the folder's run goes on; None for its beginning. Raises: Refusal."""
    saved = next(reversed(checkpoint.list_checkpoints(folder)), None)
    info = Checkpoint(saved).info if saved else {"step": 0} | sizes
    there = config_file.from_flat(info["name"], info["config"]) if saved else config_file.load(folder / CONFIG)
    remedy = f"{ANOTHER}, or run.overwrite=true"
    if differ := _differences(cfg, there, info["step"]):
        raise Refusal(
            f"{folder} holds a run of another config: {'; '.join(differ)}; give the same values, or {remedy};"
            f" of {SWITCH} only what begins after {info['step'] * cfg.train.global_batch} samples may change"
        )
    for key, size in sizes.items():
        if info[key] != size:
            was = f"a data set of {info[key]} {key.replace('_', ' ')}, this one has {size}"
            raise Refusal(f"{folder} was trained on {was}: order and noise would change; {remedy}")
    _require_more(cfg, folder, info["step"], remedy)
    return saved


def _require_more(cfg: Config, folder: Path, step: int, remedy: str) -> None:
    """Raises: Refusal if nothing is left to train after a step."""
    batch = cfg.train.global_batch
    most = cfg.train.max_samples
    if step > schedule.steps_for(most, batch):
        raise Refusal(f"{folder} has trained on {step * batch} samples, train.max_samples={most} is less; {remedy}")
    if not (end := outcome(folder)):
        return
    wants = [] if step else ["a checkpoint, which it lacks"]
    if end["samples"] >= most:
        wants.append(f"train.max_samples above {end['samples']}")
    if end["val_loss"] is not None and end["val_loss"] <= cfg.eval.target:
        wants.append(f"eval.target below {end['val_loss']} or 0")
    if wants:
        raise Refusal(f"{folder} holds a finished run; to train longer give {' and '.join(wants)}; or {remedy}")


def _differences(cfg: Config, there: Config, step: int) -> list[str]:
    """The keys that may not change and have another value there, in words. step: from which the run goes on."""
    ran = config.flat(there)
    differ = []
    for key, value in config.flat(cfg).items():
        may_change = KEYS[key].resume or (key == SWITCH and _switched(cfg, step) == _switched(there, step))
        if value != ran[key] and not may_change:
            differ.append(f"{key}={value!r}, there {ran[key]!r}")
    return differ


def _switched(cfg: Config, step: int) -> list[tuple[int, str]]:
    """The entries of precision.switch that begin at a step or before. An evaluation at the step is in their preset."""
    batch = cfg.train.global_batch
    return [entry for entry in cfg.precision.switch if schedule.steps_for(entry[0], batch) <= step]
