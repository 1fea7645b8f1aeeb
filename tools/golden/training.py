"""The golden values of training and validation: initial weights, clipping, steps, two ranks, evaluation."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flux_ref import config_file, dataloader, dataset, evaluate, flow, model, optim, rng, schedule, sharding
from flux_ref.config import Config, ModelConfig, TrainConfig
from flux_ref.dataloader import Batch
from flux_ref.ranks import World
from flux_ref.sharding import ShardedFlux, named_parameters
from flux_ref.trainer import Health, Trainer, TrainState, train_step
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
        found = [name for name in self.given if name.startswith(prefix)]
        return {name.removeprefix(prefix): torch.from_numpy(self.given[name]) for name in found}

    def weights(self) -> Tensors:
        return self.tensors("weights.")

    def start(self) -> TrainState:
        """The state of a run that starts from the given weights."""
        net = sharding.build(self.cfg, self.world, None)
        weights = self.weights()
        with torch.no_grad():
            for name, parameter in named_parameters(net).items():
                first, rows = sharding.local_rows(parameter)
                rows.copy_(weights[name][first : first + len(rows)])
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


def passed(net: model.Flux, batch: Batch, dtype: torch.dtype) -> Tensors:
    """What one pass over a batch computes, in order, and the gradients of the mean loss. The net keeps the hooks."""
    values: dict[str, Any] = {}
    calls: list[tuple[Tensor, ...]] = []  # of attention, block by block: operands and result
    attention = model.attention
    in_parts = model.PartsLinear.in_parts

    def attend(*operands_BSHK: Tensor) -> Tensor:
        result_BSD = attention(*operands_BSHK)
        calls.append((*operands_BSHK, result_BSD))
        return result_BSD

    def note(name: str, module: nn.Module, args: tuple[Tensor, ...], result: Any) -> None:
        is_norm = name.endswith(("query_norm", "key_norm"))  # of queries or keys, (B, S, H, K)
        values[f"{name}.input"] = args[0]
        values[name] = result.transpose(1, 2) if is_norm else result

    def note_parts(linear: model.PartsLinear, parts: tuple[Tensor, ...], widths: Sequence[int]) -> Sequence[Tensor]:
        results = in_parts(linear, parts, widths)
        note(names[linear], linear, (torch.cat(parts, dim=-1),), torch.cat(list(results), dim=-1))
        return results

    names = {module: name for name, module in net.named_modules()}
    for module, name in names.items():
        if not isinstance(module, model.PartsLinear):
            module.register_forward_hook(partial(note, name))

    with patch.object(model, "attention", attend), patch.object(model.PartsLinear, "in_parts", note_parts):
        losses = flow.losses(net, batch, dtype)
    losses.mean().backward()
    latent = flow.sample_latent(batch["mean"], batch["logvar"], batch["latent_eps"])
    noise = batch["noise"]

    values |= {
        "rope": net.rope,
        "latent": latent,
        "x_t": flow.interpolate(latent, noise, batch["t"]),
        "target": flow.pack(noise - latent),
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


def batches(cfg: Config, rank: int = 0, size: int = 1, first: int = 0) -> Iterator[tuple[Values, Batch]]:
    """What a rank takes in the steps from `first` on: epoch, sample, drop and time of each row; and the batch.

    Steps count from 0. The batch is filled anew for each step.
    """
    train = cfg.train
    train_set = dataloader.TrainSet(cfg, rank, size, pin=False)
    train_set.open()
    batch = dataloader.allocate(cfg.model, train.global_batch // size)
    with closing(train_set.feed(first * train.global_batch)) as feed:
        for number in count(first):
            dataloader.copy_next(feed, batch)
            rows = drawn_at(dataloader.rank_slice(cfg, number, rank, size), cfg.data.expected_train_samples, train)
            yield rows | {"t": batch["t"].numpy().copy()}, batch


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
    for number, (rows, batch) in zip(range(1, STEPS + 1), batches(cfg)):
        place = f"step{number}"
        values |= named(place, rows)
        if number == 1:
            values |= named("batch", {name: batch[name].clone() for name in BATCH})
            values |= passed(plain(cfg.model, initial), batch, torch.float32)
        else:
            values[f"{place}.losses"] = losses_of(cfg, local(state.net), batch)

        state.opt.lr.fill_(schedule.lr(number - 1, cfg.optim))
        loss, norm = train_step(state.net, state.opt, batch, Health(CPU), cfg)

        coefficient = (cfg.optim.clip_norm / (norm + optim.CLIP_EPS)).clamp(max=1.0)
        done = {"loss": loss, "grad_norm": norm, "clip_coefficient": coefficient, "lr": state.opt.lr.clone()}
        values |= named(place, done)
        if number in (1, STEPS):
            values |= named(place, after_step(state, initial, with_moments=number == 1))
    return values


def after_step(state: TrainState, initial: Tensors, with_moments: bool) -> Tensors:
    """Norms of the moments, weights, and how far the weights have moved. with_moments: some moments, too."""
    values: Tensors = {}
    for kind, tensors in moments(state).items():
        if with_moments:
            values |= named(kind, {name: tensors[name].clone() for name in WHOLE})
        values[f"{kind}.norms"] = norms(tensors)

    weights = local(state.net)
    values |= named("weights", {name: weights[name].clone() for name in WHOLE})
    values["update_norms"] = norms({name: weights[name] - initial[name] for name in initial})
    return values


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
        rows, batch = next(batches(cfg, rank, RANKS, RANKS_STEP))
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
    rows, batch = next(batches(run.cfg, first=FAR_STEP))
    return named("far", rows | {name: batch[name] for name in ("t5", "clip")})


def step_in_bf16(run: Replay) -> Tensors:
    """A step of two micro-batches in bf16: the gradient that they add up to, a weight after it, how far it moved."""
    run = run.replaced(compute__dtype="bf16", train__micro_batch=1)
    cfg = run.cfg
    state = run.start()
    state.opt.lr.fill_(schedule.lr(0, cfg.optim))
    _, batch = next(batches(cfg))
    update = state.opt.step
    before = local(state.net)[WEIGHT].clone()
    values = {}

    def noted() -> Tensor:
        gradient = cast(DTensor, named_parameters(state.net)[WEIGHT].grad)
        values[f"grad.{WEIGHT}"] = gradient.to_local().clone()
        return update()

    with patch.object(state.opt, "step", noted):
        train_step(state.net, state.opt, batch, Health(CPU), cfg)
    after = local(state.net)[WEIGHT]
    moved = (after - before).sum(1)
    return named("bf16.step", values | {f"weights.{WEIGHT}": after, f"moved.{WEIGHT}": moved})


def validated(run: Replay, samples: int) -> tuple[Tensors, list[Tensors]]:
    """(losses, what each batch holds) of the validation of the given weights after so many training samples.

    The last batch holds one sample; its other rows are padding.
    """
    val_set = dataloader.ValSet(run.cfg, 0, 1, pin=False)
    val_set.open()
    validator = Trainer(run.start(), run.cfg, run.world)
    batches: list[Tensors] = []

    def note(_: str) -> None:
        batch = validator.val_batch
        found = batch | {"losses": losses_of(run.cfg, run.weights(), batch)}
        is_sample = batch["timestep"] >= 0
        batches.append({name: found[name][is_sample] for name in ("t", "latent_eps", "noise", "losses")})

    result = evaluate.validation_loss(validator, val_set, samples, note)
    losses = {"loss_per_timestep": result.val_loss_per_timestep, "loss": result.val_loss}
    return {name: torch.tensor(value) for name, value in losses.items()}, batches


def later_validation(run: Replay) -> Tensors:
    """The validation loss after some training samples."""
    losses, _ = validated(run, inputs_of("val.later.loss")["evaluation"])
    return named("val.later", losses)


def validation(run: Replay) -> Recorded:
    """The validation loss before training."""
    losses, batches = validated(run, samples=0)
    values: Recorded = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    counts = np.bincount(run.given["data.val.timestep"], minlength=schedule.TIMESTEPS)
    return named("val", values | {"count": counts.astype(np.float32)} | losses)
