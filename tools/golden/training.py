"""The golden values of training and validation: initial weights, clipping, steps, two ranks, evaluation."""

from collections.abc import Iterable
from functools import cache, partial
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional as F

from flux_ref import config_file, dataloader, dataset, evaluate, flow, model, optim, rng, schedule, sharding
from flux_ref.config import Config, ModelConfig, TrainConfig
from flux_ref.dataloader import Batch
from flux_ref.ranks import World
from flux_ref.sharding import ShardedFlux, named_parameters
from flux_ref.trainer import Health, TrainState, Validator, train_step
from tools.golden.files import TABLES, Values, inputs_of

# B batch  S tokens of a sequence, text first  H heads  K head dim  D hidden
Tensors = dict[str, Tensor]
Recorded = dict[str, Any]  # tensors, and arrays of numpy
WHOLE = TABLES["parameters"]["whole"]  # the parameters whose gradients, moments and weights are recorded whole


class Replay(NamedTuple):
    """What golden values are computed from: the config, this process's world and the given values."""

    cfg: Config
    world: World
    given: Values

    def replaced(self, **keys: Any) -> "Replay":
        """The same with other keys of the config, written as section__key."""
        return self._replace(cfg=config_file.replace(self.cfg, **keys))

    def tensors(self, prefix: str) -> Tensors:
        """The given values of a prefix, by the rest of their names."""
        found = {name: torch.from_numpy(array) for name, array in self.given.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): tensor for name, tensor in found.items()}

    def weights(self) -> Tensors:
        return self.tensors("weights.")

    def start(self) -> TrainState:
        """The state of a run that starts from the given weights. Collective."""
        net = sharding.build(self.cfg, self.world, None)
        weights = self.weights()
        with torch.no_grad():
            for name, parameter in named_parameters(net).items():
                parameter.copy_(distribute_tensor(weights[name], parameter.device_mesh, parameter.placements))
        return TrainState(net, self.cfg, self.world)


def plain(cfg: ModelConfig, weights: Tensors, dtype: torch.dtype = torch.float32) -> model.Flux:
    """A net in this process with given weights, which computes in a dtype. RoPE stays fp32."""
    net = model.Flux(cfg)
    net.load_state_dict(weights)
    net.to(dtype)
    net.rope = net.make_rope()
    return net


def named(prefix: str, values: dict) -> dict:
    """The values under names with a prefix."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def norms(tensors: Tensors) -> Tensor:
    """The Euclidean norm of each, in order, fp32."""
    return torch.stack([tensor.float().norm() for tensor in tensors.values()])


def gradients(net: nn.Module) -> Tensors:
    """The gradients of a plain net, by name."""
    return {name: weight.grad for name, weight in net.named_parameters() if weight.grad is not None}


def passed(run: Replay, batch: Batch, dtype: torch.dtype) -> Tensors:
    """What one pass of the given weights over a batch computes, in order, and the gradients of the mean loss."""
    net = plain(run.cfg.model, run.weights(), dtype)
    values: dict[str, Any] = {"rope": net.rope}
    calls: list[tuple[Tensor, ...]] = []  # of attention, block by block: operands and result
    attention = model.attention
    linear = F.linear
    names = {weight: name.removesuffix(".weight") for name, weight in net.named_parameters()}

    def attend(*operands_BSHK: Tensor) -> Tensor:
        result_BSD = attention(*operands_BSHK)
        calls.append((*operands_BSHK, result_BSD))
        return result_BSD

    def multiply(x: Tensor, weight: nn.Parameter, bias: Tensor) -> Tensor:
        # Linears are noted here: the linears of single blocks work in parts, some of them without a call of hooks.
        values[f"{names[weight]}.input"] = x
        result = values[names[weight]] = linear(x, weight, bias)
        return result

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...], result: Any) -> None:
        values.setdefault(f"{name}.input", args[0])
        values[name] = result.transpose(1, 2) if isinstance(module, model.RMSNorm) else result

    for name, module in net.named_modules():
        module.register_forward_hook(partial(note, name))

    with patch.object(model, "attention", attend), patch.object(F, "linear", multiply):
        losses = flow.losses(net, batch, dtype)
    losses.mean().backward()
    latent = flow.sample_latent(batch["mean"], batch["logvar"], batch["latent_eps"])

    values |= {
        "latent": latent,
        "x_t": flow.interpolate(latent, batch["noise"], batch["t"]),
        "target": flow.pack(batch["noise"] - latent),
        "img": values["img_in.input"],
        "timestep_embedding": model.timestep_embedding(batch["t"]),
        "vec": values["double_blocks.0.img_mod.input"],
        "prediction": values["final_layer.linear"],
        "losses": losses,
        "loss": losses.mean(),
    }
    for i in range(net.cfg.double_blocks):
        values[f"double_blocks.{i}.img"], values[f"double_blocks.{i}.txt"] = values[f"double_blocks.{i}"]

    for name, call in (("double_blocks.0", calls[0]), ("single_blocks.0", calls[net.cfg.double_blocks])):
        for part, operand_BSHK in zip("qkv", call):
            values[f"{name}.attention.{part}"] = operand_BSHK.transpose(1, 2)
        values[f"{name}.attention"] = call[-1]

    grads = gradients(net)
    whole = {name: grads[name] for name in reversed(WHOLE)}
    kept = {name: values[name] for name in TABLES["recorded"]["forward"]}
    return kept | named("grad", whole | {"norms": norms(grads)})


CPU = torch.device("cpu")
STEPS = 6  # the learning rate leaves its warm-up after the second, and epochs begin in the third and the sixth
ROWS = 4  # of an initial weight
BATCH = (*dataset.MEMBERS, "t", "latent_eps", "noise")
PARTS = {"train__global_batch": 4, "train__micro_batch": 1}  # of the run on two ranks
RANKS = 2
RANKS_STEP = 1  # has the positions 4 to 7: the first epoch ends inside of rank 0
FAR_STEP = inputs_of("far.t")["positions"][0] // 2  # one caption is just dropped, the other one just kept
WEIGHT = "final_layer.linear.weight"


def local(net: ShardedFlux) -> Tensors:
    """This rank's shards of the weights, which share memory with the net."""
    return {name: parameter.to_local().detach() for name, parameter in named_parameters(net).items()}


def clipping(run: Replay) -> Tensors:
    """The first moment of a clipped gradient. Here the weights serve as gradients."""
    state = run.replaced(optim__clip_norm=1.0).start()
    for parameter in named_parameters(state.net).values():
        parameter.grad = parameter.detach().clone()
    state.opt.step()
    return {"clip.clipped": moments(state)["exp_avg"]["single_blocks.1.norm.query_norm.scale"]}


def moments(state: TrainState) -> dict[str, Tensors]:
    """The moments by kind and name."""
    return {kind: dict(zip(state.opt.names, tensors)) for kind, tensors in state.opt.states().items()}


def init(run: Replay) -> Tensors:
    """The weights from which a real run of this config starts. With them, most values and gradients would be 0."""
    initial = local(sharding.build(run.cfg, run.world, run.cfg.train.seed))
    values = {name: initial[name][:ROWS] for name in TABLES["parameters"]["initial"]}
    return named("init", values | {"norms": norms(initial)})


def drawn_at(positions: Iterable[int], count: int, train: TrainConfig) -> Values:
    """Epoch, sample, whether its caption is dropped, and t, at positions of a run on so many samples."""
    order = cache(rng.order)
    rows = []
    for position in positions:
        epoch, i = divmod(position, count)
        sample = int(order(train.seed, epoch, count)[i])
        draw = rng.train_draw(train, epoch, sample, (2,))
        rows.append((epoch, sample, draw.drop_caption, np.float32(draw.t)))
    return {name: np.array(column) for name, column in zip(("epoch", "sample", "drop", "t"), zip(*rows))}


def batch_of(cfg: Config, step: int = 0, rank: int = 0, size: int = 1) -> tuple[Recorded, Batch]:
    """What a rank takes in a step, as a run that goes on there: epoch, sample, drop and time of each row; the batch.

    Steps count from 0.
    """
    train_set = dataloader.TrainSet(cfg, rank, size, pin=False)
    train_set.open()
    batch = next(train_set.feed(step * cfg.train.global_batch)).tensors
    positions = dataloader.rank_slice(cfg, step, rank, size)
    return drawn_at(positions, cfg.data.expected_train_samples, cfg.train) | {"t": batch["t"]}, batch


def losses_of(cfg: Config, weights: Tensors, batch: Batch) -> Tensor:
    """The loss of each row, without gradients."""
    with torch.no_grad():
        return flow.losses(plain(cfg.model, weights), batch, torch.float32)


def training(run: Replay) -> Recorded:
    """Some optimizer steps. All values of the first one are recorded."""
    values: Recorded = {}
    cfg = run.cfg
    state = run.start()
    initial = run.weights()
    for step in range(STEPS):
        place = f"step{step + 1}"
        rows, batch = batch_of(cfg, step)
        values |= named(place, rows)
        if step == 0:
            values |= named("batch", {name: batch[name] for name in BATCH}) | passed(run, batch, torch.float32)
        else:
            values[f"{place}.losses"] = losses_of(cfg, local(state.net), batch)

        state.opt.lr.fill_(schedule.lr(step, cfg.optim))
        loss, norm = train_step(state.net, state.opt, batch, Health(CPU), cfg)

        coefficient = (cfg.optim.clip_norm / (norm + optim.CLIP_EPS)).clamp(max=1.0)
        done = {"loss": loss, "grad_norm": norm, "clip_coefficient": coefficient, "lr": state.opt.lr.clone()}
        values |= named(place, done)
        if step == 0:
            values |= named(place, after_step(state, initial, moments_of=WHOLE))
    return values | named(f"step{STEPS}", after_step(state, initial, moments_of=[]))


def after_step(state: TrainState, initial: Tensors, moments_of: list[str]) -> Tensors:
    """Moments of some parameters, norms of all; some weights, and how far all have moved."""
    values: Tensors = {}
    for kind, tensors in moments(state).items():
        values |= named(kind, {name: tensors[name].clone() for name in moments_of} | {"norms": norms(tensors)})

    weights = local(state.net)
    values |= named("weights", {name: weights[name].clone() for name in WHOLE})
    return values | {"update_norms": norms({name: weights[name] - initial[name] for name in initial})}


def on_two_ranks(run: Replay) -> Recorded:
    """One step on two ranks with two micro-batches each, from the given weights.

    One process plays both ranks in turn. Each takes its own train_step; losses of rows and the gradient of the mean
    are computed beside. tests/golden/test_golden.py compares two real ranks with these values.
    """
    run = run.replaced(**PARTS)
    cfg = run.cfg
    each = []
    net = plain(cfg.model, run.weights())
    for rank in range(RANKS):
        rows, batch = batch_of(cfg, RANKS_STEP, rank, RANKS)
        losses = flow.losses(net, batch, torch.float32)
        (losses.mean() / RANKS).backward()  # gradients add up over ranks
        state = run.start()
        loss, norm = train_step(state.net, state.opt, batch, Health(CPU), cfg)
        each.append(rows | {"losses": losses.detach(), "loss": loss, "grad_norm_of_rank": norm})

    values: Recorded = {name: np.stack([row[name] for row in each]) for name in each[0]}
    sizes = norms(gradients(net))
    return named("ranks", values | {"mean_loss": values["loss"].mean(), "grad.norms": sizes, "grad_norm": sizes.norm()})


def far(run: Replay) -> Recorded:
    """The batch of a late step, as a run takes it that goes on there."""
    rows, batch = batch_of(run.cfg, FAR_STEP)
    return named("far", rows | {name: batch[name] for name in ("t5", "clip")})


def step_in_bf16(run: Replay) -> Tensors:
    """A step of two micro-batches in bf16: the gradient that they add up to, a weight after it, how far it moved."""
    run = run.replaced(compute__dtype="bf16", train__micro_batch=1)
    cfg = run.cfg
    state = run.start()
    state.opt.lr.fill_(schedule.lr(0, cfg.optim))
    _, batch = batch_of(cfg)
    update = state.opt.step
    weight = local(state.net)[WEIGHT]
    before = weight.clone()
    values = {}

    def noted() -> Tensor:
        gradient = cast(DTensor, named_parameters(state.net)[WEIGHT].grad)
        values[f"grad.{WEIGHT}"] = gradient.to_local().clone()
        return update()

    with patch.object(state.opt, "step", noted):
        train_step(state.net, state.opt, batch, Health(CPU), cfg)
    moved = (weight - before).sum(1)
    return named("bf16.step", values | {f"weights.{WEIGHT}": weight, f"moved.{WEIGHT}": moved})


def evaluated(run: Replay, samples: int) -> Tensors:
    """The validation loss of the given weights after so many training samples.

    The last batch holds one sample; its other rows are padding.
    """
    val_set = dataloader.ValSet(run.cfg, 0, 1, pin=False)
    val_set.open()
    result = evaluate.validation_loss(Validator(run.start().net, run.cfg, run.world), val_set, samples)
    losses = {"loss_per_timestep": result.val_loss_per_timestep, "loss": result.val_loss}
    return {name: torch.tensor(value) for name, value in losses.items()}


def validation(run: Replay) -> Recorded:
    """What validation draws, and its loss, before training; its loss after some training samples."""
    cfg = run.replaced(eval__batch=run.cfg.data.expected_val_samples + 1).cfg  # all samples, and a row of padding
    val_set = dataloader.ValSet(cfg, 0, 1, pin=False)
    val_set.open()
    padded = next(val_set.feed(0)).tensors
    batch = {name: rows[padded["timestep"] != dataloader.PADDING] for name, rows in padded.items()}
    drawn = {name: batch[name] for name in ("t", "latent_eps", "noise")}
    counts = batch["timestep"].bincount(minlength=schedule.TIMESTEPS).float()
    values = drawn | {"losses": losses_of(cfg, run.weights(), batch), "count": counts} | evaluated(run, 0)
    later = evaluated(run, inputs_of("val.later.loss")["evaluation"])
    return named("val", values | named("later", later))
