"""The golden values of bf16 and FP8: one step, single operations, casts, scales and their order."""

import re
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flux_ref import config_file, flow, latents, model, step
from flux_ref.config import TYPES, Config, PrecisionConfig
from flux_ref.ranks import World
from flux_ref.speed import fp8_product
from flux_ref.speed.linear import PolicyLinear
from flux_ref.speed.precision import Precision
from flux_ref.step import Health
from tools.golden import places
from tools.golden.hooks import recording, wrapped
from tools.golden.inputs import FED, FP8_FORMATS
from tools.golden.training import CPU, after_step, gradients, initial_state, local, norms

LAYER = "single.0.linear1"  # as a policy names a linear; any will do
KEPT = re.compile(
    r"time_waves|rope|rms_norm.*|vec|(double|single)_blocks\.\d+(\.img|\.txt)?|(double|single)_blocks\.0\.attention\.q"
    r"|x_t|prediction|loss.*|grad.*|step1\.(grad|exp_avg|exp_avg_sq|weights)\.img_in\.weight"
)


def bf16(values: dict, cfg: Config, world: World, given: dict) -> None:
    """The first step in bf16; step1.*: a step of two micro-batches, whose losses are t * (sum of weights^2) / 2."""
    cfg = config_file.replace(cfg, parallel__dtype="bf16", train__micro_batch=1)
    recorded = {}
    state = initial_state(cfg, world, given)
    batch = {name.removeprefix("batch."): value for name, value in values.items() if name.startswith("batch.")}
    batch["weight"] = torch.ones(cfg.train.global_batch)

    def record_norm(module: nn.Module, args: tuple[Tensor], result: Tensor) -> None:
        recorded["rms_norm.input"], recorded["rms_norm"] = (value.transpose(1, 2).clone() for value in (*args, result))

    query_norm = next(m for name, m in state.net.named_modules() if name.endswith("img_attn.norm.query_norm"))
    with recording(recorded, state.net), query_norm.register_forward_hook(record_norm):
        flow.losses(state.net, batch, torch.bfloat16).mean().backward()
    recorded["loss"], recorded["grad.norms"] = recorded["losses"].mean(), norms(gradients(state.net))

    def given_losses(net: nn.Module, part: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        return part["t"] * sum(weight.to_local().square().sum() for weight in net.parameters()) / 2

    def record_gradients(*_: object) -> None:
        recorded.update({f"step1.grad.{name}": grad.clone() for name, grad in gradients(state.net).items()})

    state = initial_state(cfg, world, given)
    state.opt.lr.fill_(cfg.optim.lr)
    with patch.object(flow, "losses", given_losses), wrapped(state.opt, "step", before=record_gradients):
        result = step.train_step(state, batch, Health(CPU), cfg)
    after_step(recorded, 1, state, *result, local(state.net))
    values.update({f"bf16.{name}": value for name, value in recorded.items() if KEPT.fullmatch(name)})


def operations(values: dict, cfg: Config, given: dict) -> None:
    """Single operations in bf16, each by the function of the product, on given operands: bf16.fed.* to bf16.only.*"""
    fed = {name: torch.from_numpy(given[f"bf16.fed.{name}"]).bfloat16() for name in FED}
    names = ("modulate", "rope", "attention", "gelu", "linear", "gate")
    modulate, rope, attention, gelu, linear, gate = (
        {name.partition(".")[2]: value for name, value in fed.items() if name.startswith(f"{kind}.")} for kind in names
    )
    of_rope = places.inputs_of("bf16.only.rope")
    text = torch.zeros(of_rope["text_tokens"], 3, dtype=torch.float64)
    positions = torch.cat((text, latents.image_positions(*(2 * size for size in of_rope["grid"]))))
    table = model.rope_table(positions, of_rope["axes"], of_rope["theta"])
    norm = model.RMSNorm(16)
    norm.scale = nn.Parameter(rope["norm"])
    both = model.QKNorm(16)
    single = model.SingleBlock(cfg.model).bfloat16()
    noted = []
    both.query_norm = both.key_norm = norm
    x = torch.zeros(1, 1, cfg.model.hidden, dtype=torch.bfloat16)
    inner = cfg.model.mlp_ratio * cfg.model.hidden
    single.linear1.register_forward_hook(lambda *_: (x, x, x, gelu["x"][None, None, :inner]))
    single.linear2.register_forward_pre_hook(lambda module, args: noted.append(args[1].flatten()))
    target = torch.from_numpy(given["bf16.fed.loss.target"])
    square = {"logvar": torch.zeros(1), "mean": torch.zeros(1), "latent_eps": torch.zeros(1)}
    square |= {"t": torch.zeros(len(target)), "t5": torch.zeros(1), "clip": torch.zeros(1)}
    with torch.no_grad(), patch.object(latents, "sample", lambda *_: torch.zeros(())):  # the target is the noise then
        single(x, x[0], torch.ones(1, cfg.model.head_dim // 2, 2))
        noise = latents.unpack(target, 4, 6)
        losses = flow.losses(lambda *_: fed["loss.prediction"], square | {"noise": noise}, torch.bfloat16)
        results = {
            "linear": F.linear(linear["x"], linear["weight"], linear["bias"]),
            "modulate": model.modulate(modulate["x"], modulate["shift"], modulate["scale"]),
            "rope": model.apply_rope(norm(rope["x"]), table),
            "qk": torch.stack(both(rope["x"], rope["x"], table)),
            "attention": model.attention(*attention.values()),
            "gelu": model.mlp(cfg.model)[1](gelu["x"]),
            "gelu_single": noted[0],
            "gate": gate["x"] + gate["gate"] * gate["y"],
            "losses": losses,
        }
    values.update({f"bf16.only.{name}": value for name, value in results.items()})


def delayed(linear: nn.Linear, name: str) -> tuple[nn.Module, Precision]:
    """A linear with delayed scales and the keys that places.toml gives for a value, and what it remembers."""
    given = {key: x for key, x in places.inputs_of(name).items() if f"precision.{key}" in TYPES}
    cfg = Config(precision=PrecisionConfig(preset="fp8_delayed", **given))
    in_fp8 = PolicyLinear(linear, LAYER, cfg, "cpu")
    return in_fp8, Precision(in_fp8, cfg, CPU)


def fp8_linear(values: dict, given: dict) -> None:
    """One linear in FP8, forward and backward; casts to MI300X's formats; scales that are remembered over steps."""
    x, weight, grad = (torch.from_numpy(given[f"fp8.{name}"]).bfloat16() for name in ("x", "weight", "grad"))
    linear = nn.Linear(48, 16, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(weight)
    linear.bias = nn.Parameter(torch.from_numpy(given["fp8.bias"]).bfloat16())
    names = iter(("x", "weight", "grad", "weight"))  # the order in which a linear casts

    def record_cast(result: Tensor, x: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        name = next(names)
        values[f"fp8.{name}.scale"], values[f"fp8.{name}.bits"] = scale, result.view(torch.uint8)

    with wrapped(fp8_product, "cast", after=record_cast):
        in_fp8 = PolicyLinear(linear, LAYER, Config(precision=PrecisionConfig(preset="fp8")), "cpu")
        x.requires_grad_()
        y = in_fp8(x)
        y.backward(grad)
    values |= {"fp8.y": y, "fp8.grad_x": x.grad}
    values |= {"fp8.grad_weight": in_fp8.weight.grad, "fp8.grad_bias": in_fp8.bias.grad}
    others = (("fnuz.x", x, "e4m3fnuz"), ("fnuz.grad", grad, "e5m2fnuz"), ("negative", -x.abs(), "e4m3fn"))
    for name, tensor, kind in others:
        dtype = getattr(torch, f"float8_{kind}")
        scale, _ = fp8_product.scales_of(fp8_product.magnitudes(tensor), dtype, 44)
        values[f"fp8.{name}.scale"] = scale
        values[f"fp8.{name}.bits"] = fp8_product.cast(tensor, scale, dtype).view(torch.uint8)

    amax = torch.from_numpy(given["fp8.delayed.amax"])
    for name, magnitudes in (("delayed", amax), ("recent", amax * torch.eye(2)[0])):
        _, state = delayed(linear, f"fp8.{name}.scale")
        scales = [torch.stack(state.scales)]
        histories = []
        for row in magnitudes:
            for noted, value in zip(state.amaxes, row):
                noted.copy_(noted.maximum(value))  # as a cast notes them
            state.remember_magnitudes()
            scales.append(torch.stack(state.scales))
            histories.append(state.history.clone())
        values[f"fp8.{name}.scale"] = torch.stack(scales)[name == "delayed" :]
        values[f"fp8.{name}.history"] = torch.stack(histories)


def fp8_edges(values: dict, given: dict) -> None:
    """Casts at the edges of every format, and scales of magnitudes at the edges of fp32."""
    amax = torch.from_numpy(given["fp8.scales.amax"])
    exponent = PrecisionConfig().max_scale_exponent
    for kind in FP8_FORMATS:
        dtype = getattr(torch, f"float8_{kind}")
        bits = fp8_product.cast(torch.from_numpy(given[f"fp8.edge.{kind}.x"]), torch.tensor(1.0), dtype)
        values[f"fp8.edge.{kind}.bits"], values[f"fp8.edge.{kind}.decoded"] = bits.view(torch.uint8), bits.float()
        values[f"fp8.scales.{kind}"] = fp8_product.scale_of_magnitude(amax, torch.finfo(dtype).max, exponent)


def fp8_order(values: dict, given: dict) -> None:
    """Which scale each cast uses under delayed scaling: history 2, the first step dynamic, two micro-batches a step.

    Step i casts inputs and gradients with the scales that were set after step i - 1. The weight doubles after each
    step, and its scale is of the present weight.
    """
    x, weight, grad = (torch.from_numpy(given[f"fp8.{name}"]).bfloat16() for name in ("x", "weight", "grad"))
    linear = nn.Linear(48, 16, dtype=torch.bfloat16)
    linear.weight = nn.Parameter(weight.clone())
    linear.bias = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
    (in_fp8, state), scales = delayed(linear, "fp8.order.scale"), []
    with wrapped(fp8_product, "cast", before=lambda x, scale, dtype: scales.append(scale.clone())):
        for number, factors in enumerate(torch.from_numpy(given["fp8.order.factors"]).bfloat16()):
            state.begin(number)
            for factor in factors:
                in_fp8(x * factor).backward(grad * factor)
            state.remember_magnitudes()
            with torch.no_grad():
                in_fp8.weight.mul_(2)
        with torch.no_grad():
            in_fp8(x)
    casts = torch.stack(scales[:-2]).view(*given["fp8.order.factors"].shape, 4)  # x, weight, gradient, weight again
    values["fp8.order.scale"], values["fp8.order.val_scale"] = casts[..., :3], torch.stack(scales[-2:])
