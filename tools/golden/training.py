"""The golden values of training and validation: initial weights, steps, micro-batches, ranks."""

from collections.abc import Iterable, Iterator
from contextlib import closing, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flux_ref import config_file, data, evaluate, flow, schedule, sharding, step, step_runner
from flux_ref.config import Config
from flux_ref.formats import shards
from flux_ref.ranks import World
from flux_ref.run import weight_files
from flux_ref.step import Health, State
from tools.golden import places
from tools.golden.hooks import recording, wrapped

CPU = torch.device("cpu")
STEPS = 6  # the learning rate leaves its warm-up after the second, and epochs begin in the third and the sixth
ROWS = 4  # of an initial weight
INITIAL = places.TABLES["parameters"]["initial"]
WHOLE = places.TABLES["parameters"]["whole"]
BATCH = (*shards.MEMBERS, "t", "latent_eps", "noise")
PARTS = {"train__global_batch": 4, "train__micro_batch": 1}  # of the run on two ranks
RANKS, RANKS_STEP = 2, 1  # step 1 has the positions 4 to 7: the first epoch ends inside of rank 0
OF_RANK_1 = ("img_in.weight", "vector_in.in_layer.weight")  # one parameter of each kind of draw

Values = dict[str, np.ndarray | Tensor]


def schedules(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """Learning rates and clip coefficients on both sides of their corners."""
    of_rate = places.inputs_of("schedule.lr")
    rates = [schedule.lr(number, of_rate["peak"], of_rate["warmup_steps"]) for number in of_rate["steps"]]
    values["schedule.lr"] = np.array(rates, np.float32)
    state = initial_state(config_file.replace(cfg, optim__clip_norm=1.0), world, given)
    opt = state.opt
    set_gradients(state, local(state.net).values())
    opt.step()
    moments = dict(zip(opt.names, opt.moments()["exp_avg"]))
    values["clip.clipped"] = moments["single_blocks.1.norm.query_norm.scale"].clone()
    coefficients = []
    for norm in given["clip.norms"].tolist():
        grads = [torch.zeros_like(shard) for shard in opt.shards]
        grads[0].view(-1)[0] = norm
        set_gradients(state, grads)
        opt.step()
        coefficients.append(1 / opt.adamw.grad_scale)
    values["clip.coefficient"] = torch.stack(coefficients)


def init(values: Values, cfg: Config, world: World) -> None:
    """The weights from which a real run of this config starts. With them, most values and gradients would be 0."""
    initial = local(sharding.build(cfg, world, cfg.train.seed))
    for name in INITIAL:
        values[f"init.{name}"] = initial[name][:ROWS]
    values["init.norms"] = norms(initial)


def initial_state(cfg: Config, world: World, given: dict[str, np.ndarray]) -> State:
    """The state of a run that starts from the given weights."""

    def read(name: str, first: int, count: int) -> Tensor:
        return torch.from_numpy(given[f"weights.{name}"][first : first + count])

    net = sharding.build(cfg, world, None)
    weight_files.load(net, SimpleNamespace(read=read))
    return State.of(net, cfg, world)


def local(net: nn.Module) -> dict[str, Tensor]:
    """The parameters, which share memory with the net."""
    return {name: parameter.detach().to_local() for name, parameter in sharding.named_parameters(net).items()}


def norms(tensors: dict[str, Tensor]) -> Tensor:
    """The Euclidean norm of each, in order."""
    return torch.stack([tensor.norm() for tensor in tensors.values()])


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """The gradients. A parameter that takes no part gets zeros, in the net too."""
    found = {}
    for name, parameter in sharding.named_parameters(net).items():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found[name] = parameter.grad.to_local()
    return found


def set_gradients(state: State, grads: Iterable[Tensor]) -> None:
    """Give the optimizer these gradients, in the order of its parameters."""
    for own, grad in zip(gradients(state.net).values(), grads):
        own.copy_(grad)


class Taken(NamedTuple):
    """What a step gave. losses: of each row. gradients: as the optimizer was given them."""

    loss: Tensor
    norm: Tensor
    losses: Tensor
    gradients: dict[str, Tensor]


def take_step(state: State, batch: data.Batch, cfg: Config) -> Taken:
    """A step of training by the product's own code."""
    losses = []
    grads = {}

    def note_losses(result: Tensor, *_: object) -> None:
        losses.append(result.detach().flatten())

    def note_gradients(*_: object) -> None:
        grads.update({name: grad.clone() for name, grad in gradients(state.net).items()})

    # A step asks for the magnitudes after its last backward, before the optimizer clears the gradients.
    with wrapped(flow, "losses", note_losses), wrapped(state.precision, "remember_magnitudes", note_gradients):
        loss, norm = step.train_step(state, batch, Health(CPU), cfg)
    return Taken(loss, norm, torch.cat(losses), grads)


def batches(cfg: Config, rank: int, size: int, first: int) -> Iterator[tuple[Values, data.Batch]]:
    """What a rank takes in the steps from `first` on: positions, epochs, samples, drops and times; and the batch.

    Steps count from 0. The batch is filled anew for each step.
    """
    train_set = data.TrainSet(cfg, rank, size, pin=False)
    train_set.open()
    batch = data.allocate(cfg.model, cfg.train.global_batch // size)
    with closing(train_set.feed(first * cfg.train.global_batch)) as feed:
        for number in count(first):
            feed.copy_into(batch)
            pairs = next(train_set._plan(number))
            drops = [train_set.draw(*pair).drop_caption for pair in pairs]
            epochs, samples = np.array(pairs, np.int64).T
            positions = np.array(data.rank_slice(cfg, number, rank, size))
            rows = {"position": positions, "epoch": epochs, "sample": samples, "drop": np.array(drops)}
            yield rows | {"t": batch["t"].clone()}, batch


def training(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """Some optimizer steps. All values of the first one are recorded."""
    state = initial_state(cfg, world, given)
    start = {name: tensor.clone() for name, tensor in local(state.net).items()}
    for number, (rows, batch) in zip(range(1, STEPS + 1), batches(cfg, 0, 1, 0)):
        is_first = number == 1
        state.opt.lr.fill_(schedule.lr(number - 1, cfg.optim.lr, cfg.optim.warmup_steps))
        values |= {f"step{number}.{name}": row for name, row in rows.items()}
        if is_first:
            values |= {f"batch.{name}": batch[name].clone() for name in BATCH}
        with recording(values, state.net) if is_first else nullcontext():
            taken = take_step(state, batch, cfg)
        if is_first:
            values["loss"] = taken.losses.mean()
            values |= {f"grad.{name}": taken.gradients[name] for name in reversed(WHOLE)}
            values["grad.norms"] = norms(taken.gradients)
        else:
            values[f"step{number}.losses"] = taken.losses
        after_step(values, number, state, taken, start)


def after_step(values: Values, number: int, state: State, taken: Taken, start: dict[str, Tensor]) -> None:
    """What the optimizer made. Moments and weights are recorded of the first and of the last step only."""
    place = f"step{number}"
    values[f"{place}.loss"] = taken.loss.clone()
    values[f"{place}.grad_norm"] = taken.norm.clone()
    values[f"{place}.clip_coefficient"] = 1 / state.opt.adamw.grad_scale
    values[f"{place}.lr"] = state.opt.lr.clone()
    if number not in (1, STEPS):
        return
    for moment, tensors in state.opt.moments().items():
        by_name = dict(zip(start, tensors))
        if number == 1:
            values |= {f"{place}.{moment}.{name}": by_name[name].clone() for name in WHOLE}
        values[f"{place}.{moment}.norms"] = norms(by_name)
    weights = local(state.net)
    values |= {f"{place}.weights.{name}": weights[name].clone() for name in WHOLE}
    values[f"{place}.update_norms"] = norms({name: weights[name] - start[name] for name in start})


def on_two_ranks(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """One step on two ranks with two micro-batches each, from the given weights.

    One process plays both ranks, one after the other. Each has its own batch, its own accumulation and its own
    gradients, by the product's own code. The mean over the ranks, which FSDP2 takes, is taken here.
    tests/golden/test_golden.py compares two real ranks with these values. ranks.init.* are the first rows of rank 1's
    shard; tests/core/test_sharding.py proves that a shard is filled as the whole is.
    """
    cfg = config_file.replace(cfg, **PARTS)
    initial = local(sharding.build(cfg, world, cfg.train.seed))
    for name in OF_RANK_1:
        first = -(-len(initial[name]) // RANKS)
        values[f"ranks.init.{name}"] = initial[name][first : first + ROWS]
    rows = []
    taken = []
    for rank in range(RANKS):
        of_rank, batch = next(batches(cfg, rank, RANKS, RANKS_STEP))
        rows.append(of_rank)
        state = initial_state(cfg, world, given)
        taken.append(take_step(state, batch, cfg))
    for name in rows[0]:
        values[f"ranks.{name}"] = np.stack([row[name] for row in rows])
    values["ranks.losses"] = torch.stack([one.losses for one in taken])
    values["ranks.loss"] = torch.stack([one.loss for one in taken])
    values["ranks.grad_norm_of_rank"] = torch.stack([norms(one.gradients).norm() for one in taken])
    values["ranks.mean_loss"] = values["ranks.loss"].mean()
    mean = {name: sum(one.gradients[name] for one in taken) / RANKS for name in taken[0].gradients}
    values["ranks.grad.norms"] = norms(mean)
    set_gradients(state, mean.values())
    values["ranks.grad_norm"] = state.opt.step()


def validation(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """The validation loss of the given weights. The last batch holds one sample; its other rows are padding."""
    parts = {"t": [], "latent_eps": [], "noise": [], "losses": []}
    counts = []
    state = initial_state(cfg, world, given)
    val_set = data.ValSet(cfg, 0, 1, pin=False)
    val_set.open()

    def note_losses(losses: Tensor, net: nn.Module, batch: data.Batch, dtype: torch.dtype) -> None:
        for name, noted in parts.items():
            noted.append((batch | {"losses": losses})[name].clone())

    def note_counts(result: evaluate.Validation, sums: list[list[float]], samples: int) -> None:
        counts.extend(sums[0])

    with wrapped(flow, "losses", note_losses), wrapped(evaluate, "summarise", note_counts):
        result = evaluate.validation_loss(step_runner.StepRunner(state, cfg, world), val_set, samples=0)
    for name, noted in parts.items():
        values[f"val.{name}"] = torch.cat(noted)[: cfg.data.val_count]
    values["val.count"] = np.float32(counts)
    values["val.loss_per_timestep"] = np.float32(result.losses)
    values["val.loss"] = np.array(result.loss, np.float32)
