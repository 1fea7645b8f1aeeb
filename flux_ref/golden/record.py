"""The golden values: what a small run computes, place by place, recorded from the code that trains.

`record` runs the product's own code on the CPU: shards, draws, batches, FSDP over one process, train_step, validation,
FP8. There is no second forward pass here: hooks on modules and wrappers around a few functions note the values. The
values come in order of computation.
"""

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
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
from flux_ref.golden.hooks import recording, wrapped
from flux_ref.ranks import World
from flux_ref.speed import fp8, fp8_product
from flux_ref.step import Health, State

CPU = torch.device("cpu")
SEED = 0  # for the given values
STEPS = 3
VAL_TIMESTEPS = (0, 1, 2, 3, 4, 5, 6, 7, 3)  # uneven, so that means in the wrong order show
# Inputs are uniform in -width .. width. Powers of two keep them exact in every arithmetic. Inputs of norms are small:
# then a wrong epsilon shows. Weights that are not listed have the width at which a linear keeps magnitudes.
WIDTHS = {
    **{"t5": 2.0, "clip": 2.0, "mean": 4.0, "logvar": 2.0, "x": 8.0, "grad": 2.0**-7},
    **{"img_in.weight": 2.0**-5, "txt_in.weight": 2.0**-5, "img_in.bias": 2.0**-4, "txt_in.bias": 2.0**-4},
    **{"qkv.weight": 2.0**-6, "qkv.bias": 2.0**-6, "bias": 0.25, "scale": 0.25},
}
# Largest magnitudes of (input, gradient) in six steps. A 0 leaves history and scale as they were.
AMAXES = ((3, 0.5), (12, 0.25), (5, 0), (4, 2.0**-70), (6, 2.0**-71), (7, 2.0**-72))
WHOLE = (  # parameters whose gradients, moments and weights are kept whole; only norms are kept of the others
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
    """A value. dtype: the one that it was computed in: fp32, bf16 (the array is float32 then), int64, ..."""

    dtype: str
    array: np.ndarray


def inputs(cfg: Config) -> dict[str, np.ndarray]:
    """The given values by name: weights and data from which the run starts, all exact in fp32.

    An element is (2 u - 1) * width, u being uniforms of stream INIT with the name's key. Scales of norms add 1. Values
    that are bf16 in a data set, and the operands of FP8, are then rounded to bf16.
    """
    shapes = {f"weights.{name}": shape for name, shape in model.parameter_table(cfg.model).items()}
    for part, count in (("train", cfg.data.train_count), ("val", cfg.data.val_count)):
        shapes |= {f"data.{part}.{name}": (count, *data.fields(cfg.model)[name][0]) for name in shards.MEMBERS}
    shapes |= {f"data.empty.{name}": data.fields(cfg.model)[name][0] for name in ("t5", "clip")}
    shapes |= {"fp8.x": (32, 48), "fp8.weight": (16, 48), "fp8.bias": (16,), "fp8.grad": (32, 16)}
    given = {}
    for name, shape in shapes.items():
        count = int(np.prod(shape))
        u = rng.uniform(rng.words(SEED, rng.INIT, count, sample=rng.name_key(name))).reshape(shape)
        width = next((WIDTHS[end] for end in WIDTHS if name.endswith("." + end)), None)
        width = width or 2.0 ** -round(np.log2(shape[1]) / 2)
        given[name] = ((2 * u - 1) * width + name.endswith(".scale")).astype(np.float32)
        if not name.startswith("weights."):
            given[name] = torch.from_numpy(given[name]).bfloat16().float().numpy()
    return given | {"fp8.delayed.amax": np.array(AMAXES, np.float32)}


def record(cfg: Config, given: dict[str, np.ndarray]) -> dict[str, Recorded]:
    """All values, in order of computation. given: what `inputs` returns, of this or an earlier version."""
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
    """A value as a file holds it: bf16 becomes fp32, which is exact."""
    tensor = torch.as_tensor(value).detach()
    dtype = str(tensor.dtype).removeprefix("torch.")
    array = (tensor.float() if dtype == "bfloat16" else tensor).numpy()
    contiguous = np.array(array, order="C")  # safetensors writes the memory as it lies
    return Recorded({"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}.get(dtype, dtype), contiguous)


@contextmanager
def one_process() -> Iterator[World]:
    """A world of this process alone. It is on the CPU, also where there is an accelerator."""
    alone = ranks.is_apart()
    if alone:
        dist.init_process_group(ranks.BACKENDS["cpu"], store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(0, 1, CPU, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)), ["this"])
    finally:
        if alone:
            ranks.stop()


def _write_data(folder: Path, cfg: Config, given: dict[str, np.ndarray]) -> None:
    """Write the given data as the shards of a data set."""
    for part, timesteps in (("train", [None] * cfg.data.train_count), ("val", VAL_TIMESTEPS)):
        bits = {name: shards.to_bf16_bits(given[f"data.{part}.{name}"]) for name in shards.MEMBERS}
        rows = ({name: array[i] for name, array in bits.items()} for i in range(len(timesteps)))
        samples = (shard_writer.Sample(row, timestep) for row, timestep in zip(rows, timesteps))
        shard_writer.write(folder / part, samples, part)
    empty = {name: given[f"data.empty.{name}"][None] for name in ("t5", "clip")}
    shard_writer.write_empty(folder / "empty_encodings", empty)


def _draws(values: Values, cfg: Config) -> None:
    """The host generator's words and numbers, and the draws of the run."""
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
    """The weights from which a real run of this config starts. With them, most values and gradients would be 0."""
    initial = _local(sharding.build(cfg, world, cfg.train.seed))
    for name in ("img_in.weight", "time_in.in_layer.weight", "double_blocks.0.img_attn.qkv.weight"):
        values[f"init.{name}"] = initial[name][:4]
    values["init.norms"] = _norms(initial)


def _initial_state(cfg: Config, world: World, given: dict[str, np.ndarray]) -> State:
    """The state of a run that starts from the given weights."""
    net = sharding.build(cfg, world, None)
    with torch.no_grad():
        for name, local in _local(net).items():
            local.copy_(torch.from_numpy(given[f"weights.{name}"]))
    return State.of(net, cfg, world)


def _local(net: nn.Module) -> dict[str, Tensor]:
    """The parameters, which share memory with the net."""
    return {name: parameter.detach().to_local() for name, parameter in sharding.named_parameters(net).items()}


def _norms(tensors: dict[str, Tensor]) -> Tensor:
    """The Euclidean norm of each, in order."""
    return torch.stack([tensor.norm() for tensor in tensors.values()])


def _training(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """Three optimizer steps. All values of the first one are recorded."""
    state, health = _initial_state(cfg, world, given), Health(CPU)
    start = {name: tensor.clone() for name, tensor in _local(state.net).items()}
    train_set = data.TrainSet(cfg, 0, 1, pin=False)
    train_set.open()
    batch = data.allocate(cfg.model, cfg.train.global_batch)

    def record_gradients(*_: object) -> None:
        values["loss"] = values["losses"].mean()
        gradients = _gradients(state.net)
        values.update({f"grad.{name}": gradients[name].clone() for name in reversed(WHOLE)})
        values["grad.norms"] = _norms(gradients)

    with closing(train_set.feed(0)) as feed:
        for number in range(1, STEPS + 1):
            feed.copy_into(batch)
            state.opt.lr.fill_(schedule.lr(number - 1, cfg.optim.lr, cfg.optim.warmup_steps))
            with ExitStack() as stack:
                if number == 1:
                    values |= {f"batch.{name}": batch[name].clone() for name in BATCH}
                    stack.enter_context(recording(values, state.net))
                    stack.enter_context(wrapped(state.opt, "step", before=record_gradients))
                loss, norm = step.train_step(state, batch, health, cfg)
            _after_step(values, number, state, loss, norm, start)


def _gradients(net: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.to_local() for name, parameter in sharding.named_parameters(net).items()}


def _after_step(
    values: Values, number: int, state: State, loss: Tensor, norm: Tensor, start: dict[str, Tensor]
) -> None:
    result = {"loss": loss, "grad_norm": norm, "clip_coefficient": 1 / state.opt.adamw.grad_scale, "lr": state.opt.lr}
    if number in (1, STEPS):
        for moment, tensors in state.opt.moments().items():
            by_name = dict(zip(start, tensors))
            result |= {f"{moment}.{parameter}": by_name[parameter] for parameter in WHOLE if number == 1}
            result[f"{moment}.norms"] = _norms(by_name)
        weights = _local(state.net)
        result |= {f"weights.{parameter}": weights[parameter] for parameter in WHOLE}
        result["update_norms"] = _norms({parameter: weights[parameter] - start[parameter] for parameter in start})
    values.update({f"step{number}.{place}": value.clone() for place, value in result.items()})


def _validation(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """The validation loss of the given weights."""
    count = len(VAL_TIMESTEPS)  # the batch is larger: its last rows are padding
    val_set = data.ValSet(cfg, 0, 1, pin=False)
    val_set.open()
    state = _initial_state(cfg, world, given)

    def record_losses(losses: Tensor, net: nn.Module, batch: data.Batch, dtype: torch.dtype) -> None:
        values["val.t"], values["val.losses"] = batch["t"][:count].clone(), losses[:count]

    with wrapped(flow, "losses", after=record_losses):
        result = evaluate.validation_loss(steps.Steps(state, cfg, world), val_set, samples=0)
    values["val.loss_per_timestep"] = np.array(result.losses, np.float32)
    values["val.loss"] = np.array(result.loss, np.float32)


def _bf16(values: Values, cfg: Config, world: World, given: dict[str, np.ndarray]) -> None:
    """Forward, loss and gradient norms of the first step, computed in bf16 as parallel.dtype=bf16 does."""
    state, recorded = _initial_state(cfg, world, given), {}
    batch = {name.removeprefix("batch."): value for name, value in values.items() if name.startswith("batch.")}
    batch["weight"] = torch.ones(cfg.train.global_batch)

    def record_norm(module: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
        recorded["rms_norm.input"], recorded["rms_norm"] = (value.transpose(1, 2).clone() for value in (*args, result))

    query_norm = next(m for name, m in state.net.named_modules() if name.endswith("img_attn.norm.query_norm"))
    with recording(recorded, state.net), query_norm.register_forward_hook(record_norm):
        flow.losses(state.net, batch, torch.bfloat16).mean().backward()
    recorded["loss"], recorded["grad.norms"] = recorded["losses"].mean(), _norms(_gradients(state.net))
    kept = re.compile(
        r"time_waves|rope|rms_norm.*|vec|(double|single)_blocks\.\d+(\.img|\.txt)?|prediction|loss.*|grad.*"
    )
    values.update({f"bf16.{name}": value for name, value in recorded.items() if kept.fullmatch(name)})


def _fp8(values: Values, given: dict[str, np.ndarray]) -> None:
    """One linear in FP8, forward and backward; casts to MI300X's formats; scales that are remembered over steps."""
    x, weight, grad = (torch.from_numpy(given[f"fp8.{name}"]).bfloat16() for name in ("x", "weight", "grad"))
    linear = nn.Linear(48, 16, dtype=torch.bfloat16)
    linear.weight, linear.bias = nn.Parameter(weight), nn.Parameter(torch.from_numpy(given["fp8.bias"]).bfloat16())
    names = iter(("x", "weight", "grad", "weight"))  # the order in which a linear casts

    def record_cast(result: Tensor, x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        name = next(names)
        values[f"fp8.{name}.scale"], values[f"fp8.{name}.bits"] = scale, result.view(torch.uint8)

    with wrapped(fp8_product, "cast", after=record_cast):
        in_fp8 = fp8.Fp8Linear(linear, Fp8Config(recipe="dynamic"), fp8_product.arithmetic("cpu"))
        x.requires_grad_()
        y = in_fp8(x)
        y.backward(grad)
    values |= {"fp8.y": y, "fp8.grad_x": x.grad}
    values |= {"fp8.grad_weight": in_fp8.weight.grad, "fp8.grad_bias": in_fp8.bias.grad}
    for name, tensor, dtype in (("x", x, torch.float8_e4m3fnuz), ("grad", grad, torch.float8_e5m2fnuz)):
        scale, _ = fp8_product.scales_of(fp8_product.magnitudes(tensor), dtype, 44)
        values[f"fp8.fnuz.{name}.scale"] = scale
        values[f"fp8.fnuz.{name}.bits"] = fp8_product.cast(tensor, scale, dtype).view(torch.uint8)

    cfg = Fp8Config(recipe="delayed", history=3, margin=1)
    net = nn.Sequential(fp8.Fp8Linear(linear, cfg, fp8_product.arithmetic("cpu")))
    state, scales = fp8.Fp8State(net, cfg, CPU), []
    for amax in torch.from_numpy(given["fp8.delayed.amax"]):
        for noted, value in zip(state.amaxes, amax.unbind()):
            noted.fill_(value)
        state.update()
        scales.append(torch.stack(state.scales))
    values["fp8.delayed.scale"] = torch.stack(scales)
