"""The golden values: what a small run computes, place by place, recorded from the code that trains.

`record` takes the product's own path (shards, draws, batches, FSDP over one process, train_step, validation, FP8) on
the CPU and notes what passes. There is no second forward pass here: modules are watched by hooks and carry Black
Forest Labs' names, a few functions are wrapped while it runs. The order of the values is the order of computation.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from flux_ref import config_file, data, evaluate, flow, model, ranks, rng, schedule, sharding, step, steps
from flux_ref.config import Config, Fp8Config
from flux_ref.formats import shard_writer, shards
from flux_ref.golden import places
from flux_ref.golden.hooks import watched, wrapped
from flux_ref.ranks import World
from flux_ref.speed import fp8
from flux_ref.step import Health, State

CPU = torch.device("cpu")
SEED = 0  # of the inputs
STEPS = 3
VAL_TIMESTEPS = (0, 1, 2, 3, 4, 5, 6, 7, 3)  # uneven, so that means in the wrong order show
# Inputs are uniform in -width .. width; powers of two keep them exact in every arithmetic. What norms see is small,
# so that their epsilons show. A weight that is not here has the width at which linears keep magnitudes.
WIDTHS = {
    **{"t5": 2.0, "clip": 2.0, "mean": 4.0, "logvar": 2.0, "x": 8.0, "grad": 2.0**-7},
    **{"img_in.weight": 2.0**-5, "txt_in.weight": 2.0**-5, "img_in.bias": 2.0**-4, "txt_in.bias": 2.0**-4},
    **{"qkv.weight": 2.0**-6, "qkv.bias": 2.0**-6, "bias": 0.25, "scale": 0.25},
}
# Largest magnitudes of input and gradient in six steps; 0 leaves history and scale as they were.
AMAXES = ((3, 0.5), (12, 0.25), (5, 0), (4, 2.0**-70), (6, 2.0**-71), (7, 2.0**-72))
WHOLE = (  # parameters of which gradients, moments and weights are kept whole; of the others, norms
    "img_in.weight",
    "time_in.in_layer.bias",
    "vector_in.out_layer.bias",
    "txt_in.bias",
    "double_blocks.0.img_mod.lin.bias",
    "double_blocks.0.img_attn.qkv.weight",
    "double_blocks.0.img_attn.norm.key_norm.scale",
    "double_blocks.1.txt_attn.proj.weight",
    "double_blocks.1.txt_mlp.2.bias",
    "single_blocks.0.linear1.bias",
    "single_blocks.1.norm.query_norm.scale",
    "single_blocks.2.modulation.lin.bias",
    "single_blocks.2.linear2.bias",
    "final_layer.adaLN_modulation.1.bias",
    "final_layer.linear.weight",
)
BATCH = (*shards.MEMBERS, "t", "latent_eps", "noise")

Values = dict[str, np.ndarray | Tensor]


class Recorded(NamedTuple):
    """dtype: what it was computed in: fp32, bf16 (array then is float32), int64, ..."""

    dtype: str
    array: np.ndarray


def inputs(cfg: Config) -> dict[str, np.ndarray]:
    """Weights and data to start from, by name: 2 u - 1 (times a width, of norms' scales plus 1), u drawn as
    draws.INIT under the name; what is bf16 in a data set lies on its grid. All exact in fp32."""
    shapes = {f"weights.{name}": shape for name, shape in model.parameter_table(cfg.model).items()}
    for part, count in (("train", cfg.data.train_count), ("val", cfg.data.val_count)):
        shapes |= {f"data.{part}.{name}": (count, *data.fields(cfg.model)[name][0]) for name in shards.MEMBERS}
    shapes |= {f"data.empty.{name}": data.fields(cfg.model)[name][0] for name in ("t5", "clip")}
    shapes |= {"fp8.x": (32, 48), "fp8.weight": (16, 48), "fp8.bias": (16,), "fp8.grad": (32, 16)}
    found = {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        u = rng.uniform(rng.words(SEED, rng.INIT, count, sample=rng.name_key(name))).reshape(shape)
        width = next((WIDTHS[end] for end in WIDTHS if name.endswith("." + end)), None)
        width = width or 2.0 ** -round(np.log2(shape[1]) / 2)
        found[name] = ((2 * u - 1) * width + name.endswith(".scale")).astype(np.float32)
        if not name.startswith("weights."):
            found[name] = torch.from_numpy(found[name]).bfloat16().float().numpy()
    return found | {"fp8.delayed.amax": np.array(AMAXES, np.float32)}


def record(cfg: Config, given: dict[str, np.ndarray]) -> dict[str, Recorded]:
    """All values, in order of computation. given: what `inputs` made, of this or an earlier version."""
    values: Values = {}
    with tempfile.TemporaryDirectory() as folder, one_process() as world:
        _write_data(Path(folder), cfg, given)
        cfg = config_file.replace(cfg, data__train=f"{folder}/train", data__val=f"{folder}/val")
        _draws(values, cfg)
        values |= given
        _init(values, cfg, world)
        _training(values, cfg, world, given)
        _validation(values, cfg, world, given)
        _bf16(values, config_file.replace(cfg, parallel__dtype="bf16"), world, given)
    _fp8(values, given)
    return {name: plain(value) for name, value in values.items()}


def plain(value: Tensor | np.ndarray) -> Recorded:
    """A value for a file: bf16 becomes fp32, which is exact."""
    dtype = str(value.dtype).removeprefix("torch.")
    if isinstance(value, Tensor):
        value = value.detach()
        value = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return Recorded({"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}.get(dtype, dtype), value)


@contextmanager
def one_process() -> Iterator[World]:
    """A world of this process alone, on the CPU whatever else there is."""
    alone = ranks.is_apart()
    if alone:
        dist.init_process_group(ranks.BACKENDS["cpu"], store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(0, 1, CPU, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)), ["this"])
    finally:
        if alone:
            ranks.stop()


def _write_data(folder: Path, cfg: Config, given: dict[str, np.ndarray]) -> None:
    """The given data as the shards of a data set."""
    for part, timesteps in (("train", [None] * cfg.data.train_count), ("val", VAL_TIMESTEPS)):
        bits = {name: shards.to_bf16_bits(given[f"data.{part}.{name}"]) for name in shards.MEMBERS}
        rows = ({name: array[i] for name, array in bits.items()} for i in range(len(timesteps)))
        samples = (shard_writer.Sample(*each) for each in zip(rows, timesteps))
        shard_writer.write(folder / part, samples, part)
    (folder / "empty_encodings").mkdir()
    for name in ("t5", "clip"):
        np.save(folder / "empty_encodings" / f"{name}_empty.npy", given[f"data.empty.{name}"][None])


def _draws(values: Values, cfg: Config) -> None:
    """The host generator, and what the run draws with it."""
    for number, (seed, stream, sample, epoch, start) in enumerate(places.WORDS):
        values[f"draws.words.{number}"] = rng.words(seed, stream, 8, sample=sample, epoch=epoch, start=start)
    values["draws.uniform"] = rng.uniform(values["draws.words.1"])
    values["draws.normal"] = rng.normal(values["draws.words.1"])
    values["draws.name_key"] = np.array(rng.name_key("img_in.weight"), np.uint64)
    seed, shape = cfg.train.seed, cfg.model.latent_shape
    for epoch in range(2):
        values[f"draws.order.{epoch}"] = rng.order(seed, epoch, 50)
    drawn = [rng.train_draw(seed, 1, sample, shape, cfg.train.caption_drop) for sample in range(50)]
    values["draws.drop"] = np.array([draw.drop_caption for draw in drawn])
    values["draws.t"] = np.array([draw.t for draw in drawn], np.float32)
    values["draws.latent_eps"], values["draws.noise"] = drawn[3].latent_eps, drawn[3].noise
    values["draws.val_latent_eps"], values["draws.val_noise"] = rng.val_draw(seed, 262_144, 3, shape)


def _init(values: Values, cfg: Config, world: World) -> None:
    """The weights that a real run of this config starts from; they would leave most values and gradients 0."""
    found = _local(sharding.named_parameters(sharding.build(cfg, world, cfg.train.seed)))
    for name in ("img_in.weight", "time_in.in_layer.weight", "double_blocks.0.img_attn.qkv.weight"):
        values[f"init.{name}"] = found[name][:4]
    values["init.norms"] = _norms(found)


def _started(cfg: Config, world: World, given: dict[str, np.ndarray]) -> State:
    """A run that begins with the given weights."""
    net = sharding.build(cfg, world, None)
    with torch.no_grad():
        for name, local in _local(sharding.named_parameters(net)).items():
            local.copy_(torch.from_numpy(given[f"weights.{name}"]))
    return State.of(net, cfg, world)


def _local(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().to_local() for name, parameter in parameters.items()}


def _norms(tensors: dict[str, Tensor]) -> Tensor:
    """The Euclidean norm of each, in order."""
    return torch.stack([tensor.norm() for tensor in tensors.values()])


def _training(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """Three optimizer steps; of the first, everything."""
    state, health = _started(cfg, world, given), Health(CPU)
    start = {name: tensor.clone() for name, tensor in _local(sharding.named_parameters(state.net)).items()}
    train_set = data.TrainSet(cfg, 0, 1, pin=False)
    train_set.open()
    batch, feed = data.allocate(cfg.model, cfg.train.global_batch), train_set.feed(0)
    try:
        for number in range(1, STEPS + 1):
            feed.copy_into(batch)
            if number == 1:
                values |= {f"batch.{name}": batch[name].clone() for name in BATCH}
            state.opt.lr.fill_(schedule.lr(number - 1, cfg.optim.lr, cfg.optim.warmup_steps))
            with _watched_step(values, state, number):
                loss, norm = step.train_step(state, batch, health, cfg)
            _after_step(values, f"step{number}", state, loss, norm, start)
    finally:
        feed.close()


@contextmanager
def _watched_step(values: Values, state: State, number: int) -> Iterator[None]:
    """During the first step, its forward pass, loss and gradients are noted."""
    with ExitStack() as stack:
        if number == 1:
            stack.enter_context(watched(values, state.net))

            def gradients(*_: object) -> None:
                values["loss"] = values["losses"].mean()
                found = {name: p.grad.to_local() for name, p in sharding.named_parameters(state.net).items()}
                values.update({f"grad.{name}": found[name].clone() for name in reversed(WHOLE)})
                values["grad.norms"] = _norms(found)

            stack.enter_context(wrapped(state.opt, "step", before=gradients))
        yield


def _after_step(values: Values, name: str, state: State, loss: Tensor, norm: Tensor, start: dict[str, Tensor]) -> None:
    found = {"loss": loss, "grad_norm": norm, "clip_coefficient": 1 / state.opt.adamw.grad_scale, "lr": state.opt.lr}
    if name in ("step1", f"step{STEPS}"):
        for moment, tensors in state.opt.moments().items():
            by_name = dict(zip(start, tensors))
            found |= {f"{moment}.{parameter}": by_name[parameter] for parameter in WHOLE if name == "step1"}
            found[f"{moment}.norms"] = _norms(by_name)
        weights = _local(sharding.named_parameters(state.net))
        found |= {f"weights.{parameter}": weights[parameter] for parameter in WHOLE}
        found["update_norms"] = _norms({parameter: weights[parameter] - start[parameter] for parameter in start})
    values.update({f"{name}.{place}": value.clone() for place, value in found.items()})


def _validation(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """The validation loss of the given weights."""
    val_set = data.ValSet(cfg, 0, 1, pin=False)
    val_set.open()
    state = _started(cfg, world, given)

    def each(result: Tensor, net: nn.Module, batch: data.Batch, dtype: torch.dtype) -> None:
        values["val.t"], values["val.losses"] = batch["t"][: len(VAL_TIMESTEPS)].clone(), result[: len(VAL_TIMESTEPS)]

    with wrapped(flow, "losses", after=each):
        found = evaluate.validation_loss(steps.Steps(state, cfg, world), val_set, samples=0)
    values["val.loss_per_timestep"] = np.array(found.losses, np.float32)
    values["val.loss"] = np.array(found.loss, np.float32)


def _bf16(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """Forward, loss and gradient norms of the first step, computed in bf16 as parallel.dtype=bf16 does."""
    state, found = _started(cfg, world, given), {}
    batch = {name.removeprefix("batch."): value for name, value in values.items() if name.startswith("batch.")}
    batch["weight"] = torch.ones(cfg.train.global_batch)

    def norm(module: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
        found["rms_norm.input"], found["rms_norm"] = args[0].clone(), result.clone()

    with ExitStack() as stack:
        stack.enter_context(watched(found, state.net))
        query_norm = next(m for name, m in state.net.named_modules() if name.endswith("img_attn.norm.query_norm"))
        stack.callback(query_norm.register_forward_hook(norm).remove)
        flow.losses(state.net, batch, torch.bfloat16).mean().backward()
    found["loss"] = found["losses"].mean()
    found["grad.norms"] = _norms({k: p.grad.to_local() for k, p in sharding.named_parameters(state.net).items()})
    kept = re.compile(
        r"time_waves|rope|rms_norm.*|vec|(double|single)_blocks\.\d+(\.img|\.txt)?|prediction|loss.*|grad.*"
    )
    values.update({f"bf16.{name}": value for name, value in found.items() if kept.fullmatch(name)})


def _fp8(values: Values, given: dict[str, np.ndarray]) -> None:
    """One linear in FP8, forward and backward; the formats of MI300X; scales remembered over steps."""
    x, weight, grad = (torch.from_numpy(given[f"fp8.{name}"]).bfloat16() for name in ("x", "weight", "grad"))
    linear = nn.Linear(48, 16, dtype=torch.bfloat16)
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(torch.from_numpy(given["fp8.bias"]).bfloat16())
    names = iter(("x", "weight", "grad", "weight"))  # the order in which a linear casts

    def cast(result: Tensor, x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        name = next(names)
        values[f"fp8.{name}.scale"], values[f"fp8.{name}.bits"] = scale, result.view(torch.uint8)

    with wrapped(fp8, "cast", after=cast):
        own = fp8.Fp8Linear(linear, Fp8Config(recipe="dynamic"), fp8.arithmetic("cpu"))
        x.requires_grad_()
        y = own(x)
        y.backward(grad)
    values |= {"fp8.y": y, "fp8.grad_x": x.grad, "fp8.grad_weight": own.weight.grad, "fp8.grad_bias": own.bias.grad}
    for name, tensor, dtype in (("x", x, torch.float8_e4m3fnuz), ("grad", grad, torch.float8_e5m2fnuz)):
        scale = fp8.scale_of_magnitude(fp8.largest_magnitude(tensor), torch.finfo(dtype).max, 44)
        values[f"fp8.fnuz.{name}.scale"] = scale
        values[f"fp8.fnuz.{name}.bits"] = fp8.cast(tensor, scale, dtype).view(torch.uint8)

    cfg = Fp8Config(recipe="delayed", history=3, margin=1)
    net = nn.Sequential(fp8.Fp8Linear(linear, cfg, fp8.arithmetic("cpu")))
    amaxes = torch.from_numpy(given["fp8.delayed.amax"])
    with one_process():
        state, scales = fp8.Fp8State(net, cfg, CPU), []
        for amax in amaxes:
            torch._foreach_copy_(state.amaxes, list(amax.unbind()))
            state.update()
            scales.append(torch.stack(state.scales))
    values["fp8.delayed.scale"] = torch.stack(scales)
