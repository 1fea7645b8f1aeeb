"""The golden values of training and validation: initial weights, steps, micro-batches, ranks."""

from contextlib import ExitStack, closing
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from flux_ref import config_file, data, evaluate, flow, rng, schedule, sharding, step, step_runner
from flux_ref.config import Config
from flux_ref.formats import shards
from flux_ref.ranks import World
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
    given_rates = places.inputs_of("schedule.lr")
    rates = [schedule.lr(step, given_rates["peak"], given_rates["warmup_steps"]) for step in given_rates["steps"]]
    values["schedule.lr"] = np.array(rates, np.float32)
    state = initial_state(config_file.replace(cfg, optim__clip_norm=1.0), world, given)
    for parameter in state.opt.parameters:
        parameter.grad = parameter.detach().clone()
    state.opt.step()
    moments = dict(zip(state.opt.names, state.opt.moments()["exp_avg"]))
    values["clip.clipped"] = moments["single_blocks.1.norm.query_norm.scale"].clone()
    coefficients = []
    for norm in given["clip.norms"].tolist():
        for number, parameter in enumerate(state.opt.parameters):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad.to_local().view(-1)[0] = norm if number == 0 else 0.0
        state.opt.step()
        coefficients.append(1 / state.opt.adamw.grad_scale)
    values["clip.coefficient"] = torch.stack(coefficients)


def init(values: Values, cfg: Config, world: World) -> None:
    """The weights from which a real run of this config starts. With them, most values and gradients would be 0."""
    initial = local(sharding.build(cfg, world, cfg.train.seed))
    for name in INITIAL:
        values[f"init.{name}"] = initial[name][:ROWS]
    values["init.norms"] = norms(initial)


def initial_state(cfg: Config, world: World, given: dict[str, np.ndarray]) -> State:
    """The state of a run that starts from the given weights."""
    net = sharding.build(cfg, world, None)
    with torch.no_grad():
        for name, parameter in sharding.named_parameters(net).items():
            first, rows = sharding.local_rows(parameter)
            rows.copy_(torch.from_numpy(given[f"weights.{name}"][first : first + len(rows)]))
    return State.of(net, cfg, world)


def local(net: nn.Module) -> dict[str, Tensor]:
    """The parameters, which share memory with the net."""
    return {name: parameter.detach().to_local() for name, parameter in sharding.named_parameters(net).items()}


def norms(tensors: dict[str, Tensor]) -> Tensor:
    """The Euclidean norm of each, in order."""
    return torch.stack([tensor.norm() for tensor in tensors.values()])


def gradients(net: nn.Module) -> dict[str, Tensor]:
    """The gradients. A parameter that takes no part gets zeros, in the net too."""
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    return {name: parameter.grad.to_local() for name, parameter in sharding.named_parameters(net).items()}


def rows_of(train_set: data.TrainSet, number: int) -> dict[str, np.ndarray]:
    """Which positions, epochs and samples a rank takes in a step, and the captions that it drops. number: from 0."""
    cfg = train_set.cfg
    positions = data.rank_slice(cfg, number, train_set.rank, train_set.size)
    pairs = next(train_set._plan(number))
    drawn = [rng.train_draw(cfg.train.seed, *pair, cfg.model.latent_shape, cfg.train.caption_drop) for pair in pairs]
    rows = {"position": positions, "epoch": [epoch for epoch, _ in pairs], "sample": [sample for _, sample in pairs]}
    whole = {name: np.array(row, np.int64) for name, row in rows.items()}
    return whole | {"drop": np.array([draw.drop_caption for draw in drawn])}


def training(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """Some optimizer steps. All values of the first one are recorded."""
    state = initial_state(cfg, world, given)
    health = Health(CPU)
    start = {name: tensor.clone() for name, tensor in local(state.net).items()}
    train_set = data.TrainSet(cfg, 0, 1, pin=False)
    train_set.open()
    batch = data.allocate(cfg.model, cfg.train.global_batch)

    def record_gradients(*_: object) -> None:
        values["loss"] = values["losses"].mean()
        grads = gradients(state.net)
        values.update({f"grad.{name}": grads[name].clone() for name in reversed(WHOLE)})
        values["grad.norms"] = norms(grads)

    def record_losses(losses: Tensor, *_: object) -> None:
        if number > 1:  # those of the first step have names of their own
            values[f"step{number}.losses"] = losses.detach().clone()

    with closing(train_set.feed(0)) as feed, wrapped(flow, "losses", after=record_losses):
        for number in range(1, STEPS + 1):
            feed.copy_into(batch)
            state.opt.lr.fill_(schedule.lr(number - 1, cfg.optim.lr, cfg.optim.warmup_steps))
            rows = rows_of(train_set, number - 1) | {"t": batch["t"].clone()}
            values |= {f"step{number}.{name}": row for name, row in rows.items()}
            with ExitStack() as stack:
                if number == 1:
                    values |= {f"batch.{name}": batch[name].clone() for name in BATCH}
                    stack.enter_context(recording(values, state.net))
                filled = record_gradients if number == 1 else lambda *_: gradients(state.net)
                stack.enter_context(wrapped(state.opt, "step", before=filled))
                loss, norm = step.train_step(state, batch, health, cfg)
            after_step(values, number, state, loss, norm, start)


def after_step(values: Values, number: int, state: State, loss: Tensor, norm: Tensor, start: dict) -> None:
    result = {"loss": loss, "grad_norm": norm, "clip_coefficient": 1 / state.opt.adamw.grad_scale, "lr": state.opt.lr}
    if number in (1, STEPS):
        for moment, tensors in state.opt.moments().items():
            by_name = dict(zip(start, tensors))
            result |= {f"{moment}.{parameter}": by_name[parameter] for parameter in WHOLE if number == 1}
            result[f"{moment}.norms"] = norms(by_name)
        weights = local(state.net)
        result |= {f"weights.{parameter}": weights[parameter] for parameter in WHOLE}
        result["update_norms"] = norms({parameter: weights[parameter] - start[parameter] for parameter in start})
    values.update({f"step{number}.{place}": value.clone() for place, value in result.items()})


def init_of_rank(values: Values, cfg: Config, world: World) -> None:
    """The first rows of rank 1's shard. For this, materialise is told that the local rows are those of that rank."""

    def rows_of_rank(parameter: nn.Parameter) -> tuple[int, Tensor]:
        first = -(-parameter.shape[0] // RANKS)
        return first, parameter.to_local()[first:]

    with patch.object(sharding, "local_rows", rows_of_rank):
        initial = local(sharding.build(cfg, world, cfg.train.seed))
    values |= {f"ranks.init.{name}": initial[name][-(-len(initial[name]) // RANKS) :][:ROWS] for name in OF_RANK_1}


def on_two_ranks(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """One step on two ranks with two micro-batches each, from the given weights.

    One process plays both ranks, one after the other. Each has its own batch, its own accumulation and its own
    gradients, by the product's own code. The mean over the ranks, which FSDP2 takes, is taken here.
    tests/golden/test_golden.py compares two real ranks with these values.
    """
    cfg = config_file.replace(cfg, **PARTS)
    init_of_rank(values, cfg, world)
    losses = []
    fed_times = []
    rank_losses = []
    rank_norms = []
    mean = {}
    for rank in range(RANKS):
        train_set = data.TrainSet(cfg, rank, RANKS, pin=False)
        state = initial_state(cfg, world, given)
        train_set.open()
        for name, row in rows_of(train_set, RANKS_STEP).items():
            values.setdefault(f"ranks.{name}", []).append(row)
        batch = data.allocate(cfg.model, cfg.train.global_batch // RANKS)
        with closing(train_set.feed(RANKS_STEP * cfg.train.global_batch)) as feed:
            feed.copy_into(batch)

        def add(*_: object, state: State = state) -> None:
            grads = gradients(state.net)
            rank_norms.append(torch.stack([grad.norm() for grad in grads.values()]).norm())
            mean.update({name: mean.get(name, 0) + grad / RANKS for name, grad in grads.items()})

        def note(result: Tensor, net: nn.Module, part: data.Batch, dtype: torch.dtype) -> None:
            losses.append(result.detach())
            fed_times.append(part["t"].clone())

        with wrapped(flow, "losses", after=note), wrapped(state.opt, "step", before=add):
            rank_losses.append(step.train_step(state, batch, Health(CPU), cfg)[0])
    for parameter, grad in zip(state.opt.parameters, mean.values()):
        parameter.grad = torch.zeros_like(parameter)
        parameter.grad.to_local().copy_(grad)
    values |= {name: np.stack(rows) for name, rows in values.items() if isinstance(rows, list)}
    values["ranks.t"], values["ranks.losses"] = (torch.stack(parts).view(RANKS, -1) for parts in (fed_times, losses))
    values["ranks.loss"], values["ranks.grad_norm_of_rank"] = torch.stack(rank_losses), torch.stack(rank_norms)
    values["ranks.mean_loss"], values["ranks.grad.norms"] = values["ranks.loss"].mean(), norms(mean)
    values["ranks.grad_norm"] = state.opt.step()


def validation(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """The validation loss of the given weights. The last batch holds one sample; its other rows are padding."""
    parts = {}
    state = initial_state(cfg, world, given)
    val_set = data.ValSet(cfg, 0, 1, pin=False)
    val_set.open()

    def record_losses(losses: Tensor, net: nn.Module, batch: data.Batch, dtype: torch.dtype) -> None:
        for name in ("t", "latent_eps", "noise", "losses"):
            parts.setdefault(name, []).append((batch | {"losses": losses})[name].clone())
            values[f"val.{name}"] = torch.cat(parts[name])[: cfg.data.val_count]

    counted = wrapped(evaluate, "summarise", before=lambda sums, _: values.update({"val.count": np.float32(sums[0])}))
    with wrapped(flow, "losses", after=record_losses), counted:
        result = evaluate.validation_loss(step_runner.StepRunner(state, cfg, world), val_set, samples=0)
    values["val.loss_per_timestep"], values["val.loss"] = np.float32(result.losses), np.array(result.loss, np.float32)
