"""What rank_runs.py measures of checkpoints, and the states that test_checkpoint.py saves."""

import contextlib
import errno
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import rank_runs
import torch
import torch.distributed as dist
from conftest import MICRO
from lively_nets import lively
from rank_runs import of_all
from run_files import verify
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

from flux_ref import checkpoint, config_file, ranks, saver, sharding, tensors
from flux_ref.checkpoint import TensorSlice
from flux_ref.config import Config
from flux_ref.errors import Fault
from flux_ref.model import parameter_table
from flux_ref.ranks import World
from flux_ref.saver import Saver
from flux_ref.step_runner import State

FACTS = {"train_samples": 50, "val_samples": 45}
STEP, SAMPLES = 7, 84  # of the state that is written
BREAKS = {  # what fails, and on which rank; -1: the last
    "the folder": (saver, "require_space", 0),
    "writing": (tensors, "write", -1),
    "the manifest": (checkpoint, "publish", 0),
}
FULL = OSError(errno.ENOSPC, "No space left on device")


def narrow_config(run: Path, **values: object) -> Config:
    """Of a model so narrow that some ranks of three hold no rows of some tensors, with an average of the weights."""
    own = rank_runs.NARROW | {"run__dir": str(run), "optim__ema": 600}
    return config_file.replace(config_file.load(MICRO), **(own | values))


@functools.cache
def value(key: str, shape: tuple[int, ...]) -> Tensor:
    """What a tensor of the written state holds, by its key in a checkpoint."""
    tensor = lively(key, tuple(shape))
    return tensor.square() if key.endswith("_sq") else tensor


def keys(cfg: Config) -> dict[str, tuple[int, ...]]:
    """The keys that a checkpoint must have, and their shapes."""
    table = parameter_table(cfg.model)
    kinds = ("exp_avg", "exp_avg_sq", "ema")
    moments = {f"optimizer.state.{name}.{kind}": shape for kind in kinds for name, shape in table.items()}
    return {f"model.{name}": shape for name, shape in table.items()} | moments


def other_state(cfg: Config, world: World) -> State:
    """A state that holds other values."""
    net = sharding.build(cfg, world, seed=1)
    return State.of(net, cfg, world)


def wanted(key: str, rows: TensorSlice) -> Tensor:
    """What these rows of the written state hold."""
    return value(key, rows.shape)[rows.first : rows.first + len(rows.local)]


def lively_state(cfg: Config, world: World) -> State:
    """The state that is written."""
    state = other_state(cfg, world)
    for key, rows in saver.rows_of(state).items():
        rows.local.copy_(wanted(key, rows))
    state.opt.set_steps(STEP)
    state.step, state.samples = STEP, SAMPLES
    return state


def contents(state: State) -> dict[str, Tensor]:
    """A copy of the rows of every rank."""
    rows = {key: rows.local.clone() for key, rows in saver.rows_of(state).items()}
    return {f"{key} of rank {rank}": part for rank, parts in enumerate(of_all(rows)) for key, part in parts.items()}


def wrong(state: State) -> list[str]:
    """The keys under which any rank holds something else than the written state."""
    rows = saver.rows_of(state)
    own = [key for key in rows if not torch.equal(rows[key].local, wanted(key, rows[key]))]
    return sorted({key for keys in of_all(own) for key in keys})


def take_step(state: State, scale: float) -> None:
    """One step of AdamW on made-up gradients."""
    for name, p in sharding.named_parameters(state.net).items():
        gradient = lively(f"gradient {name}", tuple(p.shape)) * scale
        p.grad = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
    state.opt.lr.fill_(1e-2)
    state.opt.step()
    state.advance(12)


def after_steps(state: State) -> dict[str, Tensor]:
    """The state after two more steps, the first clipped."""
    for scale in (1.0, 1e-4):
        take_step(state, scale)
    return contents(state)


def restored(cfg: Config, world: World, folder: Path) -> State:
    """A state that goes on from a checkpoint."""
    state = other_state(cfg, world)
    saver.load(folder, state)
    return state


@contextlib.contextmanager
def recorded() -> Iterator[list[tuple[float, str, str]]]:
    """What this process puts on the disk and renames meanwhile: (time, "sync" or "rename", path)."""
    events, sync, rename = [], os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        sync(descriptor)
        events.append((time.monotonic(), "sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def renamed(path: Path, target: Path) -> Path:
        events.append((time.monotonic(), "rename", str(target)))
        return rename(path, target)

    with mock.patch.object(os, "fsync", synced), mock.patch.object(Path, "rename", renamed):
        yield events


def writing(cfg: Config, world: World) -> dict:
    """The written state's checkpoint, and in which order it came to the disk."""
    state, said = lively_state(cfg, world), []
    own = Saver(cfg, world, state, FACTS, said.append)
    with recorded() as events:
        for _ in range(2):  # the second finds it saved
            own.save(state)
        own.finish()
    rows = {key: len(row.local) for key, row in saver.rows_of(state).items()}
    return {"said": of_all(said), "events": of_all(events), "rows": of_all(rows)}


def reading(cfg: Config, world: World, folder: Path) -> dict:
    """What is read from a checkpoint of any world size."""
    state = restored(cfg, world, folder)
    found = {"wrong": wrong(state), "clock": (state.step, state.samples)}
    found["AdamW's steps"] = {float(one["step"]) for one in state.opt.adamw.state.values()}
    found["after steps"] = after_steps(state)
    return found


def attempts(own: Saver, state: State) -> dict:
    """A save at a step of its own: whether it failed, on every rank, and what is then there and left."""
    take_step(state, 1e-4)
    own.save(state)
    own.wait()
    folder = checkpoint.folder_of(own.run)
    dist.barrier()
    return {"failures": of_all(own.failure), "left": sorted(path.name for path in folder.iterdir())}


def finishing(own: Saver) -> list[str]:
    """What `finish` raises on every rank."""
    try:
        own.finish()
    except Fault as error:
        return of_all(str(error))
    return of_all("")


def breaking(cfg: Config, world: World) -> dict:
    """Saves that fail on one rank, each between two that do not."""
    state, said, found = other_state(cfg, world), [], {}
    own = Saver(cfg, world, state, FACTS, said.append)
    found["before"] = attempts(own, state)
    (before,) = checkpoint.list_checkpoints(own.run)
    for name, (owner, attribute, rank) in BREAKS.items():
        said.clear()
        here = world.rank == rank % world.size
        patch = mock.patch.object(owner, attribute, side_effect=FULL) if here else contextlib.nullcontext()
        with patch:
            found[name] = attempts(own, state) | {"faults": finishing(own), "said": of_all(said)}
    verify(before)
    said.clear()
    take_step(state, 1e-4)
    own.save(state)
    found["after"] = {"faults": finishing(own), "said": of_all(said), "step": state.step}
    found["finite"] = all(tensor.isfinite().all() for tensor in contents(state).values())
    return found


def measure(world: World, folder: Path) -> dict:
    """Checkpoints by these ranks and, of what fewer ranks have written beside the folder, also by those."""
    cfg = narrow_config(folder, parallel__replicate=world.replicas)
    found = {"writing": writing(cfg, world), "on": after_steps(lively_state(cfg, world))}
    if world.size > 1:
        aside = config_file.replace(cfg, run__dir=str(folder / "breaking"))
        with ranks.agreed():
            Path(aside.run.dir).mkdir(exist_ok=True)
        found["breaking"] = breaking(aside, world)
        runs = {size: folder.parent / f"{size}_ranks" for size in rank_runs.SIZES if size <= world.size}
        found["reading"] = {size: reading(cfg, world, rank_runs.checkpoint_of(run)) for size, run in runs.items()}
    return found
