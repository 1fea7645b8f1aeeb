"""A linear's three products from sides that a policy casts each by itself, on any device.

The sides are cast and decoded to bf16, which holds them exactly. Products are summed in fp32. What a side becomes is
equal on all devices, bit for bit (casts.py). Only the order of the sums depends on the device.
Where torch has a kernel for a pair of sides, the kernel takes their codes (native.py).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flux_ref.speed import casts, native
from flux_ref.speed.chances import chances
from flux_ref.speed.sides import PRODUCTS, Products, Side

# Shapes: M tokens of a micro-batch, K inputs and N outputs of a linear; R rows and S columns, which are summed over.
INPUT, WEIGHT, GRADIENT = range(3)  # what a side is a cast of
TURNED = True
Scaled = tuple[Tensor, Tensor, Tensor]


class Draws(NamedTuple):
    """What the chances of a linear's stochastic rounding depend on: int64 scalars on the device.

    step: steps trained so far. sample: the first of this micro-batch, in the global batch. linear: its place in
    layers.layers. A seed that is no tensor would be part of compiled code.
    """

    seed: Tensor
    step: Tensor
    sample: Tensor
    linear: Tensor


def scaled(x_RS: Tensor, side: Side, chance_RS: Tensor | None = None) -> Scaled:
    """(R, S) as a side: transformed, scaled and rounded, as `casts.scaled` returns it."""
    x_RS = x_RS.contiguous().float()  # a CPU is slow on turned tensors
    if side.hadamard:
        x_RS = casts.hadamard(x_RS, side.hadamard)
    return casts.scaled(x_RS, side.form, side.scaling, chance_RS)


def held(given: Scaled | Tensor, side: Side | None) -> tuple[Tensor, Tensor | None]:
    """(values (R, S) in bf16, which holds them exactly; fp32 scales to multiply a product with, or None for 1).

    given: `scaled`, or the tensor itself for a side in bf16.
    The scales are (R, 1), (1, 1) or (): they are common to what is summed over.
    numerics: a value and its E8M0 or E4M3 scale have at most 6 significant bits. Below 2**-126 bf16 may round them.
    """
    if side is None:
        return given.bfloat16(), None
    values, scales, whole = given
    if not side.scaling.columns:
        return values.bfloat16(), scales
    casts.blocks(values, side.scaling).mul_(scales[:, None, :, None])
    return values.bfloat16(), whole if side.scaling.rule == "two-level" else None


def decoded(x_RS: Tensor, side: Side | None, chance_RS: Tensor | None = None) -> Tensor:
    """What a tensor becomes as a side, fp32 (R, S), but for a Hadamard transform, which stays."""
    values, scales = held(x_RS if side is None else scaled(x_RS, side, chance_RS), side)
    return values.float() if scales is None else values.float() * scales


class BlockMatmul(torch.autograd.Function):
    """x @ w.T + b. The sides of the three products are those of `pairs`, by product.

    arch: of the device, for native products. rows: tokens of a sample. draws: None rounds every side to nearest, as
    validation does.
    """

    @staticmethod
    def forward(ctx, x_MK, weight_NK, bias_N, pairs: Products, arch: str, draws: Draws | None, rows: int):
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.pairs = pairs
        ctx.arch = arch
        ctx.draws = draws
        ctx.rows = rows
        return _product(ctx, "forward", (x_MK, INPUT), (weight_NK, WEIGHT), bias_N)

    @staticmethod
    def backward(ctx, grad_MN: Tensor):
        x_MK, weight_NK = ctx.saved_tensors
        grad_x_MK = _product(ctx, "grad_input", (grad_MN, GRADIENT), (weight_NK, WEIGHT, TURNED))
        grad_w_NK = _product(ctx, "grad_weight", (grad_MN, GRADIENT, TURNED), (x_MK, INPUT, TURNED))
        return grad_x_MK, grad_w_NK, grad_MN.sum(0) if ctx.needs_input_grad[2] else None, *(None,) * 4


def _product(ctx, product: str, left: tuple, right: tuple, bias: Tensor | None = None) -> Tensor:
    """left @ right.T + bias in bf16. left, right: (tensor, what it is) of a side, with TURNED to turn it first."""
    pair = ctx.pairs[product]
    given = [_side(ctx, product, side, *tensor) for side, tensor in zip(pair, (left, right))]
    if found := native.product(ctx.arch, *pair):
        out = found(*given)
        return out if bias is None else out + bias
    (a, a_scale), (b, b_scale) = map(held, given, pair)
    # A CPU without bf16 matrix units multiplies bf16 many times slower than fp32, which holds the same values.
    if a_scale is None and b_scale is None and a.device.type != "cpu":
        return F.linear(a, b, bias)  # sums in fp32
    out = a.float() @ b.float().t()
    if a_scale is not None:
        out = out * a_scale
    if b_scale is not None:
        out = out * b_scale.t()
    return (out if bias is None else out + bias.float()).bfloat16()


def _side(ctx, product: str, side: Side | None, tensor: Tensor, kind: int, turned: bool = False) -> Scaled | Tensor:
    """Chances go to elements by their places in the whole batch, so that all ranks agree."""
    chance = None
    if side and side.stochastic and ctx.draws:
        seed, step, sample, linear = ctx.draws
        number = 9 * linear + 3 * PRODUCTS.index(product) + kind
        rows = 0 if kind == WEIGHT else ctx.rows  # of the tensor for each sample
        first = sample * (rows * tensor.shape[1])
        chance = chances(torch.stack((seed, step, number, first)), tensor)
    if turned:
        tensor = tensor.t()
        chance = None if chance is None else chance.t().contiguous()
    return scaled(tensor, side, chance) if side else tensor
