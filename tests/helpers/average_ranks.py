"""What rank_runs.py saves for test_average.py: averages of weights that are given after each step.

So the weights are the same at any number of ranks. Each folder average_N holds steps that N ranks have begun.
"""

import functools
from pathlib import Path

import checkpoint_ranks
import rank_runs
import torch
from checkpoint_ranks import FACTS
from torch import Tensor

from flux_ref import checkpoint, sharding, weights
from flux_ref.model import parameter_table
from flux_ref.ranks import World
from flux_ref.saver import Saver
from flux_ref.step_runner import State

MIDDLE, END = 100, 200  # steps


def given(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """What a parameter holds after a step; the first step is 1. Before it: 0."""
    return torch.sin(step * checkpoint_ranks.value(f"model.{name}", tuple(shape)))


@functools.cache
def wanted(name: str, shape: tuple[int, ...], last: int) -> Tensor:
    """The average of a parameter after a step."""
    history = [given(name, shape, step) for step in range(last + 1)]
    return rank_runs.mean(history, checkpoint_ranks.narrow_config(Path("unused")))


def error(path: Path) -> float:
    """The largest error of any parameter of an average, as eval.py and `tools.export` read it."""
    model = checkpoint_ranks.narrow_config(path).model
    source = weights.open_source(path, model, averaged=True)
    errors = []
    for name, shape in parameter_table(model).items():
        found = source.read(name, 0, shape[0]).double()
        errors.append(float((found - wanted(name, shape, checkpoint.step_of(path))).abs().max()))
    return max(errors)


def go_on(folder: Path, world: World, start: Path | None, *stops: int) -> None:
    """Take steps from a checkpoint on, or from the first, and save at `stops`. AdamW's rate is 0: it moves nothing."""
    cfg = checkpoint_ranks.narrow_config(folder, parallel__replicate=world.replicas)
    state = checkpoint_ranks.restored(cfg, world, start) if start else checkpoint_ranks.other_state(cfg, world)
    Path(cfg.run.dir).mkdir(exist_ok=True)
    if not start:
        put(state, 0)
        state.opt.reset()
    saver = Saver(cfg, world, state, FACTS, print)
    for stop in stops:
        while state.step < stop:
            take_step(state)
            state.advance(cfg.train.global_batch)
        saver.save(state)
    saver.finish()


@torch.no_grad()
def put(state: State, step: int) -> None:
    """The given weights of a step, and some gradients."""
    for name, parameter in sharding.named_parameters(state.net).items():
        first, local = sharding.local_rows(parameter)
        local.copy_(given(name, parameter.shape, step)[first : first + len(local)])
        parameter.grad = torch.ones_like(parameter)


def take_step(state: State) -> None:
    """A step with given weights."""
    put(state, state.step + 1)
    state.opt.lr.fill_(0)
    state.opt.step()


def measure(world: World, folder: Path) -> None:
    """All steps by these ranks, and the second half of what fewer ranks have begun."""
    go_on(folder / f"average_{world.size}", world, None, MIDDLE, END)
    for size in rank_runs.SIZES:
        if size < world.size:
            begun = folder.parent / f"{size}_ranks" / f"average_{size}"
            go_on(folder / f"average_{size}", world, checkpoint.list_checkpoints(begun)[0], END)
