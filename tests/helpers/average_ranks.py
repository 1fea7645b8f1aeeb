"""What rank_runs.py measures of the average of the weights: how far it lies from a plain weighted mean in fp64.

Here the weights after each step are given, so they are the same at any number of ranks.
"""

from pathlib import Path

import checkpoint_ranks
import rank_runs
import torch
from checkpoint_ranks import FACTS
from rank_runs import average_error, mean
from torch import Tensor

from flux_ref import checkpoint, sharding
from flux_ref.checkpoint import Saver
from flux_ref.config import Config
from flux_ref.formats import checkpoint_files
from flux_ref.model import parameter_table
from flux_ref.ranks import World
from flux_ref.run import weight_files
from flux_ref.step import State

SAVED, STEPS = 100, 200


def given(name: str, shape: tuple[int, ...], step: int, first: int, count: int) -> Tensor:
    """What rows of a parameter hold after a step; the first step is 1."""
    return torch.sin(step * checkpoint_ranks.value(f"model.{name}", tuple(shape))[first : first + count])


def errors(state: State, cfg: Config) -> float:
    """The largest error of any parameter."""
    all_rows = checkpoint.rows_of(state)
    found = []
    for name, parameter in sharding.named_parameters(state.net).items():
        rows = all_rows[f"optimizer.state.{name}.ema"]
        own = (rows.first, len(rows.local))
        history = [given(name, parameter.shape, step, *own) for step in range(1, state.step + 1)]
        found.append(average_error(rows.local, history, cfg, state.samples))
    return max(found)


def errors_of_file(path: Path, cfg: Config, step: int) -> float:
    """The largest error of the average as eval.py and `tools.weights export` read it from a checkpoint."""
    source = weight_files.open_source(path, cfg.model, averaged=True)
    found = []
    for name, shape in parameter_table(cfg.model).items():
        history = [given(name, shape, number, 0, shape[0]) for number in range(1, step + 1)]
        found.append(float((source.read(name, 0, shape[0]).double() - mean(history, cfg)).abs().max()))
    return max(found)


def go_on(state: State, last: int, cfg: Config) -> None:
    """Take steps up to `last`. AdamW's rate is 0, so it leaves the weights as they are given."""
    state.opt.lr.fill_(0)
    parameters = sharding.named_parameters(state.net)
    gradients = {name: torch.ones_like(parameter) for name, parameter in parameters.items()}  # any will do
    rows = {name: sharding.local_rows(parameter) for name, parameter in parameters.items()}
    while state.step < last:
        for name, parameter in parameters.items():
            first, local = rows[name]
            with torch.no_grad():
                local.copy_(given(name, parameter.shape, state.step + 1, first, len(local)))
            parameter.grad = gradients[name]
        state.opt.step()
        state.advance(cfg.train.global_batch)


def saved(runs: Path, size: int) -> Path:
    """The checkpoint in the middle, by so many ranks. runs: the folder of what all numbers of ranks have written."""
    (path,) = checkpoint_files.list_checkpoints(runs / f"{size}_ranks" / "average")
    return path


def measure(world: World, folder: Path) -> dict[int, float]:
    """The error after STEPS steps, by the number of ranks that took the first SAVED of them."""
    cfg = checkpoint_ranks.narrow_config(folder / "average", parallel__replicate=world.replicas)
    state = checkpoint_ranks.other_state(cfg, world)
    go_on(state, SAVED, cfg)
    saver = Saver(cfg, world, FACTS, print)
    saver.save(state, {})
    saver.finish()
    go_on(state, STEPS, cfg)
    found = {world.size: errors(state, cfg)}
    for size in rank_runs.SIZES:
        if size < world.size:
            found[size] = resumed(cfg, world, saved(folder.parent, size))
    return found


def resumed(cfg: Config, world: World, path: Path) -> float:
    """The error after STEPS steps, from a checkpoint on."""
    state = checkpoint_ranks.restored(cfg, world, path)
    go_on(state, STEPS, cfg)
    return errors(state, cfg)
