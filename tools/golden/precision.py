"""The golden values of bf16 and FP8: one step, single operations, casts and scales."""

import re

import torch
from torch import nn

from flux_ref import flow, model, sharding
from flux_ref.config import Config, PrecisionConfig
from flux_ref.precision.casts import scale_of_magnitude
from flux_ref.precision.fp8 import cast, magnitudes, scales_of
from flux_ref.precision.linear import PolicyLinear
from tools.golden.files import inputs_of
from tools.golden.training import Replay, Tensors, batch_of, named, passed

LAYER = "single_blocks.0.linear1"  # as a policy names a linear; any will do
KEPT = re.compile(
    r"timestep_embedding|rope|vec|(double|single)_blocks\.\d+(\.img|\.txt)?|(double|single)_blocks\.0\.attention\.q"
    r"|x_t|target|prediction|loss.*|grad\.norms"
)
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
MI300X = torch.float8_e4m3fnuz, torch.float8_e5m2fnuz


def bf16(run: Replay) -> Tensors:
    """The first batch in bf16."""
    _, batch = batch_of(run.cfg)
    values = passed(run, batch, torch.bfloat16)
    return named("bf16", {name: value for name, value in values.items() if KEPT.fullmatch(name)})


@torch.no_grad()
def operations(run: Replay) -> Tensors:
    """Single operations in bf16, each by the function of the product, on given operands: bf16.fed.* to bf16.only.*"""
    fed = run.tensors("bf16.fed.")
    x = {name: tensor.bfloat16() for name, tensor in fed.items()}
    about = inputs_of("bf16.only.rope")
    text = torch.zeros(about["text_tokens"], 3, dtype=torch.float64)
    height, width = about["grid"]
    positions = torch.cat((text, flow.image_positions(2 * height, 2 * width)))
    table = model.rope_table(positions, about["axes"], about["theta"])

    both = model.QKNormRope(16)
    both.query_norm.scale = both.key_norm.scale = nn.Parameter(x["rope.norm"])

    scaled = model.RMSNorm(16)
    scaled.scale = nn.Parameter(fed["rms_norm.scale"])

    # The latent is zero, so the target is the noise.
    batch = {name: torch.zeros(1) for name in ("logvar", "latent_eps", "t5", "clip", "t")}
    batch["mean"] = torch.full((1,), flow.SHIFT)
    batch["noise"] = flow.unpack(fed["loss.target"], 4, 6)
    results = {
        "linear": nn.functional.linear(x["linear.x"], x["linear.weight"]),
        "rms_norm": scaled.bfloat16()(x["rope.x"]),
        "modulate": model.modulated_norm(x["modulate.x"], x["modulate.shift"], x["modulate.scale"]),
        "rope": model.apply_rope(both.query_norm(x["rope.x"]), table),
        "qk": torch.stack(both(*[x["rope.x"].flatten(-2)] * 3, table)[:2]),
        "attention": model.attention(x["attention.q"], x["attention.k"], x["attention.v"]),
        "gelu": model.mlp(run.cfg.model)[1](x["gelu.x"]),
        "losses": flow.losses(lambda *_: x["loss.prediction"], batch, torch.bfloat16),
    }
    return named("bf16.only", results)


def fp8_linear(run: Replay) -> Tensors:
    """One linear in FP8, forward and backward; casts of its operands, also to MI300X's formats."""
    fed = run.tensors("fp8.")
    x, weight, grad = (fed[name].bfloat16() for name in ("x", "weight", "grad"))
    values: Tensors = {}
    for name, operand, dtype in (
        ("x", x, E4M3),
        ("weight", weight, E4M3),
        ("grad", grad, E5M2),
        ("fnuz.x", x, MI300X[0]),
        ("fnuz.grad", grad, MI300X[1]),
        ("negative", -x.abs(), E4M3),
    ):
        scale, _ = scales_of(magnitudes(operand), dtype)
        values[f"{name}.scale"] = scale
        values[f"{name}.bits"] = cast(operand, scale, dtype).view(torch.uint8)

    linear = nn.Linear(48, 16, dtype=torch.bfloat16)
    linear.load_state_dict({"weight": weight, "bias": fed["bias"]})
    in_fp8 = PolicyLinear(linear, LAYER, Config(precision=PrecisionConfig(preset="fp8")), "cpu")

    x.requires_grad_()
    y = in_fp8(x)
    y.backward(grad)
    results = {"y": y, "grad_x": x.grad, "grad_weight": in_fp8.weight.grad, "grad_bias": in_fp8.bias.grad}
    return named("fp8", values | results)


def delayed_scales(run: Replay) -> Tensors:
    """The scale that the next step takes after each of some magnitudes of an input. Collective."""
    about = inputs_of("fp8.delayed.scale")
    small = run.replaced(
        model__hidden=48,  # FP8 takes multiples of 16
        model__rope_axes=[4, 6, 6],
        compute__dtype="bf16",
        precision__preset="fp8_delayed",
        precision__history=about["history"],
        precision__dynamic_steps=0,
    )
    recipe = sharding.build(small.cfg, run.world, None).recipe
    scales = []
    for magnitude in map(float, about["magnitudes"]):
        recipe.amaxes[0].fill_(magnitude)
        recipe.after_backward()
        scales.append(recipe.scales[0][0].clone())
    return {"fp8.delayed.scale": torch.stack(scales)}


def fp8_edges(run: Replay) -> Tensors:
    """Casts at the edges of every format, and scales of magnitudes at the edges of fp32."""
    fed = run.tensors("fp8.")
    values: Tensors = {}
    for dtype in (E4M3, E5M2, *MI300X):
        kind = str(dtype).removeprefix("torch.float8_")
        codes = cast(fed[f"edge.{kind}.x"], torch.tensor(1.0), dtype)
        values |= {
            f"edge.{kind}.bits": codes.view(torch.uint8),
            f"edge.{kind}.decoded": codes.float(),
            f"edge.{kind}.is_nan": cast(torch.tensor([torch.nan, torch.inf, 1.0]), torch.tensor(1.0), dtype).isnan(),
            f"scales.{kind}": scale_of_magnitude(fed["scales.amax"], torch.finfo(dtype).max),
        }
    return named("fp8", values)
