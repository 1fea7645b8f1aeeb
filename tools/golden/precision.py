"""The golden values of bf16 and FP8: one step, single operations, casts, scales and their order."""

import re
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flux_ref import config_file, flow, latents, model
from flux_ref.config import KEYS, Config, PrecisionConfig
from flux_ref.ranks import World
from flux_ref.speed import fp8_product
from flux_ref.speed.linear import PolicyLinear
from flux_ref.speed.precision import Precision
from tools.golden import places
from tools.golden.hooks import recording, wrapped
from tools.golden.training import BATCH, CPU, after_step, gradients, initial_state, local, norms, take_step

LAYER = "single.0.linear1"  # as a policy names a linear; any will do
KEPT = re.compile(
    r"time_waves|rope|rms_norm.*|vec|(double|single)_blocks\.\d+(\.img|\.txt)?|(double|single)_blocks\.0\.attention\.q"
    r"|x_t|prediction|loss.*|grad.*|step1\.(grad|exp_avg|exp_avg_sq|weights)\.img_in\.weight"
)
QKV = "double_blocks.0.img_attn.qkv"
RENAMED = {QKV: "rms_norm.input", "double_blocks.0.img_attn.norm.query_norm": "rms_norm"}
FP8_FORMATS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")


def tensors(given: dict, prefix: str) -> dict[str, Tensor]:
    """The given values of a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): torch.from_numpy(given[name]) for name in given if name.startswith(prefix)}


def bf16(values: dict, cfg: Config, world: World, given: dict) -> None:
    """The first step in bf16; step1.*: a step of two micro-batches, whose losses are t * (sum of weights^2) / 2."""
    cfg = config_file.replace(cfg, parallel__dtype="bf16", train__micro_batch=1)
    recorded = {}
    state = initial_state(cfg, world, given)
    batch = {name: values[f"batch.{name}"] for name in BATCH}
    batch["weight"] = torch.ones(cfg.train.global_batch)
    with recording(recorded, state.net):
        flow.losses(state.net, batch, torch.bfloat16).mean().backward()
    query = recorded[QKV].chunk(3, dim=-1)[0]
    recorded[QKV] = query.unflatten(-1, (cfg.model.heads, -1)).transpose(1, 2)
    recorded = {RENAMED.get(name, name): value for name, value in recorded.items()}
    recorded["loss"] = recorded["losses"].mean()
    recorded["grad.norms"] = norms(gradients(state.net))

    def given_losses(net: nn.Module, part: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        return part["t"] * sum(weight.to_local().square().sum() for weight in net.parameters()) / 2

    state = initial_state(cfg, world, given)
    state.opt.lr.fill_(cfg.optim.lr)
    with patch.object(flow, "losses", given_losses):
        taken = take_step(state, batch, cfg)
    recorded["step1.grad.img_in.weight"] = taken.gradients["img_in.weight"]
    after_step(recorded, 1, state, taken, local(state.net))
    values.update({f"bf16.{name}": value for name, value in recorded.items() if KEPT.fullmatch(name)})


def operations(values: dict, cfg: Config, given: dict) -> None:
    """Single operations in bf16, each by the function of the product, on given operands: bf16.fed.* to bf16.only.*"""
    fed = tensors(given, "bf16.fed.")
    x = {name: tensor.bfloat16() for name, tensor in fed.items()}
    of_rope = places.inputs_of("bf16.only.rope")
    text = torch.zeros(of_rope["text_tokens"], 3, dtype=torch.float64)
    height, width = of_rope["grid"]
    positions = torch.cat((text, latents.image_positions(2 * height, 2 * width)))
    table = model.rope_table(positions, of_rope["axes"], of_rope["theta"])
    both = model.QKNorm(16)
    both.query_norm.scale = both.key_norm.scale = nn.Parameter(x["rope.norm"])
    with torch.no_grad():
        results = {
            "linear": F.linear(x["linear.x"], x["linear.weight"], x["linear.bias"]),
            "modulate": model.modulate(x["modulate.x"], x["modulate.shift"], x["modulate.scale"]),
            "rope": model.apply_rope(both.query_norm(x["rope.x"]), table),
            "qk": torch.stack(both(x["rope.x"], x["rope.x"], table)),
            "attention": model.attention(x["attention.q"], x["attention.k"], x["attention.v"]),
            "gelu": model.mlp(cfg.model)[1](x["gelu.x"]),
            "gelu_single": gelu_of_single_block(cfg, x["gelu.x"]),
            "gate": x["gate.x"] + x["gate.gate"] * x["gate.y"],
            "losses": losses_of(x["loss.prediction"], fed["loss.target"]),
        }
    values.update({f"bf16.only.{name}": value for name, value in results.items()})


def gelu_of_single_block(cfg: Config, inner: Tensor) -> Tensor:
    """What a single block makes of the first inner features of its MLP."""
    block = model.SingleBlock(cfg.model).bfloat16()
    x = torch.zeros(1, 1, cfg.model.hidden, dtype=torch.bfloat16)
    inner = inner[None, None, : cfg.model.mlp_ratio * cfg.model.hidden]
    linear1 = patch.object(block.linear1, "forward", return_value=torch.cat((x, x, x, inner), dim=-1))
    linear2 = patch.object(block.linear2, "forward", return_value=x)
    with linear1, linear2 as called:
        block(x, x[0], torch.ones(1, cfg.model.head_dim // 2, 2))
    return called.call_args.args[0][..., cfg.model.hidden :].flatten()


def losses_of(prediction: Tensor, target: Tensor) -> Tensor:
    """The loss of each sample for a given prediction. The latent is zero here, so the target is the noise."""
    batch = {name: torch.zeros(1) for name in ("logvar", "latent_eps", "t5", "clip", "t")}
    batch |= {"mean": torch.full((1,), latents.SHIFT), "noise": latents.unpack(target, 4, 6)}
    return flow.losses(lambda *_: prediction, batch, torch.bfloat16)


def operands(given: dict) -> tuple[Tensor, Tensor, nn.Linear]:
    """Input and gradient of y of a linear, in bf16, and the linear."""
    x = tensors(given, "fp8.")
    linear = nn.Linear(48, 16, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(x["weight"].bfloat16())
    linear.bias = nn.Parameter(x["bias"].bfloat16())
    return x["x"].bfloat16(), x["grad"].bfloat16(), linear


def delayed(linear: nn.Linear, name: str) -> tuple[nn.Module, Precision]:
    """A linear with delayed scales and the keys that places.toml gives for a value, and what it remembers."""
    keys = {key: x for key, x in places.inputs_of(name).items() if f"precision.{key}" in KEYS}
    cfg = Config(precision=PrecisionConfig(preset="fp8_delayed", **keys))
    in_fp8 = PolicyLinear(linear, LAYER, cfg, "cpu")
    return in_fp8, Precision(in_fp8, cfg, CPU)


def fp8_linear(values: dict, given: dict) -> None:
    """One linear in FP8, forward and backward; casts to MI300X's formats; scales that are remembered over steps."""
    x, grad, linear = operands(given)
    names = iter(("x", "weight", "grad", "weight"))  # the order in which a linear casts

    def record_cast(result: Tensor, x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        name = next(names)
        values[f"fp8.{name}.scale"] = scale
        values[f"fp8.{name}.bits"] = result.view(torch.uint8)

    with wrapped(fp8_product, "cast", record_cast):
        in_fp8 = PolicyLinear(linear, LAYER, Config(precision=PrecisionConfig(preset="fp8")), "cpu")
        x.requires_grad_()
        y = in_fp8(x)
        y.backward(grad)
    values["fp8.y"] = y
    values["fp8.grad_x"] = x.grad
    values["fp8.grad_weight"] = in_fp8.weight.grad
    values["fp8.grad_bias"] = in_fp8.bias.grad
    others = (("fnuz.x", x, "e4m3fnuz"), ("fnuz.grad", grad, "e5m2fnuz"), ("negative", -x.abs(), "e4m3fn"))
    for name, tensor, kind in others:
        dtype = getattr(torch, f"float8_{kind}")
        scale, _ = fp8_product.scales_of(fp8_product.magnitudes(tensor), dtype)
        values[f"fp8.{name}.scale"] = scale
        values[f"fp8.{name}.bits"] = fp8_product.cast(tensor, scale, dtype).view(torch.uint8)
    amax = torch.from_numpy(given["fp8.delayed.amax"])
    remember(values, "fp8.delayed", amax)
    remember(values, "fp8.recent", amax * torch.eye(2)[0])
    values["fp8.delayed.scale"] = values["fp8.delayed.scale"][1:]


def remember(values: dict, place: str, amax: Tensor) -> None:
    """The scales before the first step and after each, and the histories after each. amax: (steps, 2)."""
    _, state = delayed(nn.Linear(48, 16, dtype=torch.bfloat16), f"{place}.scale")
    scales = [torch.stack(state.scales)]
    histories = []
    for row in amax:
        for noted, value in zip(state.amaxes, row):
            noted.copy_(noted.maximum(value))  # as a cast notes them
        state.remember_magnitudes()
        scales.append(torch.stack(state.scales))
        histories.append(state.history.clone())
    values[f"{place}.scale"] = torch.stack(scales)
    values[f"{place}.history"] = torch.stack(histories)


def fp8_edges(values: dict, given: dict) -> None:
    """Casts at the edges of every format, and scales of magnitudes at the edges of fp32."""
    x = tensors(given, "fp8.")
    for kind in FP8_FORMATS:
        dtype = getattr(torch, f"float8_{kind}")
        bits = fp8_product.cast(x[f"edge.{kind}.x"], torch.tensor(1.0), dtype)
        values[f"fp8.edge.{kind}.bits"] = bits.view(torch.uint8)
        values[f"fp8.edge.{kind}.decoded"] = bits.float()
        values[f"fp8.scales.{kind}"] = fp8_product.scale_of_magnitude(x["scales.amax"], torch.finfo(dtype).max)


def fp8_order(values: dict, given: dict) -> None:
    """Which scale each cast uses under delayed scaling: history 2, the first step dynamic, two micro-batches a step.

    Step i casts inputs and gradients with the scales that were set after step i - 1. The weight doubles after each
    step, and its scale is of the present weight.
    """
    x, grad, linear = operands(given)
    in_fp8, state = delayed(linear, "fp8.order.scale")
    steps = torch.from_numpy(given["fp8.order.factors"]).bfloat16()
    scales = []
    with wrapped(fp8_product, "cast", lambda result, x, scale, dtype: scales.append(scale.clone())):
        for number, factors in enumerate(steps):
            state.begin(number)
            for factor in factors:
                in_fp8(x * factor).backward(grad * factor)
            state.remember_magnitudes()
            in_fp8.weight.data.mul_(2)
        with torch.no_grad():
            in_fp8(x)
    casts = torch.stack(scales[:-2]).view(*steps.shape, 4)  # x, weight, gradient, weight again
    values["fp8.order.scale"] = casts[..., :3]
    values["fp8.order.val_scale"] = torch.stack(scales[-2:])
