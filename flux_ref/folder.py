"""Which run a folder holds, who may write into it, and from where a run in it goes on.

Rank 0 does all of this. A run without outcome.json is unfinished; the same command continues it from its last
checkpoint. Nothing is written before `begin`, so a start that is refused changes nothing. Nothing is deleted: a run
that does not go on, because it has no checkpoint or by run.overwrite=true, is renamed to NAME.1 (or .2, ...).
"""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path

from flux_ref import checkpoint, config, config_file, files, ranks, schedule
from flux_ref.checkpoint import Checkpoint
from flux_ref.config import KEYS, Config
from flux_ref.errors import Refusal
from flux_ref.ranks import World

CONFIG = "config.toml"
LOG = "result_0.txt"
OUTCOME = "outcome.json"
REACHED, ENDED = "target reached", "train.max_samples reached"  # how a run came to its end
REMEDY = "set run.dir to another folder, or run.overwrite=true to begin anew"
SWITCH = "precision.switch"  # its entries that begin after the checkpoint may change


@contextmanager
def held(cfg: Config, world: World, sizes: dict[str, int]) -> Iterator[Path | None]:
    """Holds the run's folder in this block. Gives the checkpoint from which its run goes on, None if it begins.

    Collective. sizes: {"train_samples", "val_samples"} of the data.
    Raises: Refusal if another job has the folder, or if its run cannot go on with this config and data.
    """
    # A job that torchrun starts again must not rename its own run. Only the node that failed counts its restarts.
    restarted = any(ranks.gather_objects(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"))
    folder = config.run_dir(cfg).resolve()  # names that link to it share its lock
    with ExitStack() as stack:
        saved = None
        with ranks.agreed():
            if world.rank == 0:
                folder.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(files.lock(folder.with_name(f".{folder.name}.lock"), str(folder)))
                if files.matching(folder, "[!.]*") and not (folder / CONFIG).exists():
                    raise Refusal(f"{folder} holds files but no run; set run.dir to another folder")
                if restarted or not cfg.run.overwrite:
                    saved = _checkpoint(cfg, folder, sizes)
        found = ranks.gather_objects(saved and str(saved))[0]
        yield Path(found) if found else None


def begin(cfg: Config, world: World, saved: Path | None) -> str:
    """Make the folder of a run that is about to train. Returns what became of an older run. Collective.

    saved: the checkpoint that `held` gave. Raises: Refusal.
    """
    renamed_run = ""
    with ranks.agreed():
        if world.rank == 0:
            folder = config.run_dir(cfg)
            if not saved and (folder / CONFIG).exists():
                aside = next(path for n in count(1) if not (path := Path(f"{folder}.{n}")).exists())
                folder.rename(aside)
                renamed_run = f"the run that was in {folder} lies in {aside}"
            folder.mkdir(exist_ok=True)
            own = config_file.replace(cfg, run__dir=str(folder), run__overwrite=False)
            files.write_whole(folder / CONFIG, config_file.dump(own))
            files.remove(folder / OUTCOME)  # of a run that is extended
            checkpoint.prune(folder, cfg.checkpoint.keep)
    return renamed_run


def _checkpoint(cfg: Config, folder: Path, sizes: dict[str, int]) -> Path | None:
    """The checkpoint from which the folder's run goes on; None if it has none. Raises: Refusal."""
    saved = next(reversed(checkpoint.list_checkpoints(folder)), None)
    if saved:
        info = Checkpoint(saved).info
        there = config_file.from_flat(info["name"], info["config"])
        ran = config.flat(there) | info | {SWITCH: _begun(there, info["step"])}
        given = config.flat(cfg) | sizes | {SWITCH: _begun(cfg, info["step"])}
        differ = [
            f"{key}={value!r}, there {ran[key]!r}"
            for key, value in given.items()
            if value != ran[key] and not (key in KEYS and KEYS[key].resume)
        ]
        if differ:
            raise Refusal(f"{folder} holds a run of another config or data: {'; '.join(differ)}; {REMEDY}")
    if (folder / OUTCOME).exists():
        end = {"val_loss": None} | files.read_json(folder / OUTCOME, "outcome")
        if not isinstance(end.get("samples"), int) or not isinstance(end["val_loss"], (float, type(None))):
            raise Refusal(f"{folder / OUTCOME}, line 1 lacks the numbers samples and val_loss; {REMEDY}")
        reached = end["val_loss"] is not None and end["val_loss"] <= cfg.eval.target
        if reached or end["samples"] >= cfg.train.max_samples:
            longer = "raise train.max_samples or lower eval.target to train it longer (at optim.lr / 10 after a decay)"
            raise Refusal(f"{folder} holds a finished run; {longer}, or {REMEDY}")
    return saved


def _begun(cfg: Config, step: int) -> tuple[tuple[int, str], ...]:
    """The entries of precision.switch that begin at a step or before. An evaluation at the step is in their preset."""
    batch = cfg.train.global_batch
    return tuple(entry for entry in cfg.precision.switch if schedule.steps_for(entry[0], batch) <= step)
