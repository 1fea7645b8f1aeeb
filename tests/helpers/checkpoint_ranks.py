"""What rank_runs.py measures of checkpoints, and the states that test_checkpoint.py saves."""

import contextlib
import errno
import os
import time
from pathlib import Path
from unittest import mock

import rank_runs
import torch.distributed as dist
from conftest import micro_config
from lively_nets import lively, of_all
from torch.distributed.tensor import distribute_tensor

from flux_ref import checkpoint, config_file, ranks, safetensors_io, sharding
from flux_ref.checkpoint import Saver, rows_of
from flux_ref.cli import Fault
from flux_ref.model import parameter_table
from flux_ref.trainer import TrainState

FACTS = {"train_samples": 50, "val_samples": 45}
STEP, SAMPLES = 7, 84  # of the state that is written
BREAKS = {  # what fails, and on which rank; -1: the last
    "the folder": (checkpoint, "require_space", 0),
    "writing": (safetensors_io, "write", -1),
    "the manifest": (checkpoint.files, "write_whole", 0),
}
FILE_BYTES = 2**15  # of the written state, which is small
FULL = OSError(errno.ENOSPC, "No space left on device")


def narrow_config(run, **values):
    """Of a model so narrow that some ranks of three hold no rows of some tensors, with an average of the weights."""
    return micro_config(**rank_runs.NARROW, run__dir=str(run), optim__ema_half_life=600, **values)


def written_tensors(cfg):
    """The keys that a checkpoint must have, and what the written state holds under them."""
    found = {}
    for name, shape in parameter_table(cfg.model).items():
        moments = [f"optimizer.state.{name}.{kind}" for kind in ("exp_avg", "exp_avg_sq", "ema")]
        for key in (f"model.{name}", *moments):
            found[key] = lively(key, shape).abs() if key.endswith("_sq") else lively(key, shape)
    return found


def other_state(cfg, world):
    """A state that holds other values."""
    return TrainState(sharding.build(cfg, world, seed=1), cfg, world)


def lively_state(cfg, world):
    """The state that is written."""
    state = other_state(cfg, world)
    values = written_tensors(cfg)
    for key, rows in rows_of(state).items():
        rows.local.copy_(values[key][rows.first : rows.first + len(rows.local)])
    state.opt.set_steps(STEP)
    state.set_counters(STEP, SAMPLES)
    return state


def contents(state):
    """A copy of the rows of every rank."""
    rows = {key: rows.local.clone() for key, rows in rows_of(state).items()}
    return {f"{key} of rank {rank}": part for rank, parts in enumerate(of_all(rows)) for key, part in parts.items()}


def take_step(state, scale):
    """One step of AdamW on made-up gradients."""
    for name, p in sharding.named_parameters(state.net).items():
        gradient = lively(f"gradient {name}", tuple(p.shape)) * scale
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
    state.opt.lr.fill_(1e-2)
    state.opt.step()
    state.advance(12)


def after_steps(state):
    """The state after two more steps, the first clipped."""
    for scale in (1.0, 1e-4):
        take_step(state, scale)
    return contents(state)


def read(cfg, world, folder):
    """The clock of a state that goes on from a checkpoint of any world size, and what it is two steps later."""
    state = other_state(cfg, world)
    checkpoint.load(folder, state)
    return {"clock": (state.step, state.samples), "after steps": after_steps(state)}


@contextlib.contextmanager
def recorded():
    """What this process puts on the disk and renames meanwhile: (time, "sync" or "rename", path)."""
    events, sync, rename = [], os.fsync, Path.rename

    def synced(descriptor):
        sync(descriptor)
        events.append((time.monotonic(), "sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def renamed(path, target):
        events.append((time.monotonic(), "rename", str(target)))
        return rename(path, target)

    with mock.patch.object(os, "fsync", synced), mock.patch.object(Path, "rename", renamed):
        yield events


def write(cfg, world):
    """The written state's checkpoint, and in which order it came to the disk."""
    state, said = lively_state(cfg, world), []
    with mock.patch.object(checkpoint, "FILE_BYTES", FILE_BYTES):
        own = Saver(cfg, world, state, FACTS, said.append)
    with recorded() as events:
        for _ in range(2):  # the second finds it saved
            own.save(state)
        own.finish()
    return {"said": of_all(said), "events": of_all(events)}


def break_saves(cfg, world):
    """Between two saves that succeed, one for each of BREAKS: what is left, and what all ranks say and raise."""
    state, said, found = other_state(cfg, world), [], {}
    own = Saver(cfg, world, state, FACTS, said.append)
    for name in ("before", *BREAKS, "after"):
        said.clear()
        take_step(state, 1e-4)
        owner, attribute, rank = BREAKS.get(name, (None, "", world.size))
        is_here = world.rank == rank % world.size and owner
        with mock.patch.object(owner, attribute, side_effect=FULL) if is_here else contextlib.nullcontext():
            own.save(state)
            fault = ""
            try:
                own.finish()
            except Fault as error:
                fault = str(error)
        dist.barrier()
        left = sorted(path.name for path in checkpoint.folder_of(own.run).iterdir())
        found[name] = {"left": left, "faults": of_all(fault), "said": of_all(said)}
    return found


def measure(world, folder):
    """Checkpoints by these ranks and, of what fewer ranks have written beside the folder, also by those."""
    cfg = narrow_config(folder, parallel__replicate=world.replicas)
    found = {"writing": write(cfg, world), "on": after_steps(lively_state(cfg, world))}
    if world.size > 1:
        aside = config_file.replace(cfg, run__dir=str(folder / "breaking"))
        with ranks.agreed():
            Path(aside.run.dir).mkdir(exist_ok=True)
        found["breaking"] = break_saves(aside, world)
    runs = {size: folder.parent / f"{size}_ranks" for size in rank_runs.SIZES if size <= world.size}
    found["reading"] = {size: read(cfg, world, rank_runs.checkpoint_of(run)) for size, run in runs.items()}
    return found
