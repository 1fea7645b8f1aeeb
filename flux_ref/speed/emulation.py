"""A linear's three products as a policy casts them, on any device: the sides are cast, decoded, and multiplied in fp32.

What a side becomes is exact, bit for bit (number_formats.py). Only the order of the sums depends on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flux_ref.speed import number_formats
from flux_ref.speed.chances import chances
from flux_ref.speed.policy import PRODUCTS, Pair, Side

# Shapes: M tokens of a micro-batch, K inputs and N outputs of a linear; R rows and S columns, which are summed over.
INPUT, WEIGHT, GRADIENT = range(3)  # what a side is a cast of


@dataclass
class Draws:
    """What the chances of stochastic rounding depend on, shared by all linears of a net.

    step: (), int64, on the device; the steps trained so far. first_sample: of this micro-batch, in the global batch.
    """

    seed: int
    step: Tensor
    first_sample: int = 0

    def __post_init__(self):
        assert not self.step.is_meta, "torch would give undefined chances without a word"


def decoded(x_RS: Tensor, side: Side | None, chance_RS: Tensor | None = None) -> Tensor:
    """What a tensor becomes as a side, fp32 (R, S), but for a Hadamard transform, which stays. None: itself."""
    x_RS = x_RS.float()
    if side is None:
        return x_RS
    if side.hadamard:
        x_RS = number_formats.hadamard(x_RS, side.hadamard)
    values, scales, whole = number_formats.scaled(x_RS, side.form, side.scaling, chance_RS)
    blocks = number_formats.blocks(values, side.scaling) * scales[:, None, :, None]
    return blocks.flatten(2).flatten(0, 1) * whole


class EmulatedMatmul(torch.autograd.Function):
    """x @ w.T + b. The sides of the three products are those of `pairs`, by product."""

    @staticmethod
    def forward(ctx, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, linear: "EmulatedLinear", rows: int):
        """rows: tokens of a sample."""
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.linear, ctx.rows = linear, rows
        left, right = linear.sides("forward", ((x_MK, INPUT, False), (weight_NK, WEIGHT, False)), rows)
        out_MN = left @ right.t()
        return (out_MN if bias_N is None else out_MN + bias_N.float()).to(x_MK.dtype)

    @staticmethod
    def backward(ctx, grad_MN: Tensor):
        (x_MK, weight_NK), linear, rows = ctx.saved_tensors, ctx.linear, ctx.rows
        left, right = linear.sides("grad_input", ((grad_MN, GRADIENT, False), (weight_NK, WEIGHT, True)), rows)
        grad_x_MK = (left @ right.t()).to(x_MK.dtype)
        left, right = linear.sides("grad_weight", ((grad_MN, GRADIENT, True), (x_MK, INPUT, True)), rows)
        grad_w_NK = (left @ right.t()).to(weight_NK.dtype)
        return grad_x_MK, grad_w_NK, grad_MN.sum(0) if ctx.needs_input_grad[2] else None, None, None


class EmulatedLinear(nn.Linear):
    """A linear whose parameters keep their names, shapes and dtype, and whose products are those of a policy.

    number: of the linear in the model's order.
    """

    def __init__(self, linear: nn.Linear, number: int, pairs: dict[str, Pair], draws: Draws):
        """Takes over the parameters of a linear."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias, self.widths = linear.weight, linear.bias, getattr(linear, "widths", None)
        self.number, self.pairs, self.draws = number, pairs, draws

    def forward(self, *parts: Tensor) -> Tensor | tuple[Tensor, ...]:
        """(..., S, K) -> (..., S, N), from parts and in parts as the linear that was taken over."""
        joined = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        flat = joined.flatten(0, -2)
        out = EmulatedMatmul.apply(flat, self.weight, self.bias, self, joined.shape[-2]).unflatten(0, joined.shape[:-1])
        return out.split(self.widths, dim=-1) if self.widths else out

    def sides(self, product: str, tensors: Sequence[tuple[Tensor, int, bool]], rows: int) -> tuple[Tensor, Tensor]:
        """Both sides of a product, decoded. tensors: (tensor, what it is, whether it is turned) of each side."""
        left, right = (
            decoded(tensor.t() if turned else tensor, side, self._chance(product, tensor, kind, turned, side, rows))
            for side, (tensor, kind, turned) in zip(self.pairs[product], tensors)
        )
        return left, right

    def _chance(
        self, product: str, tensor: Tensor, kind: int, turned: bool, side: Side | None, rows: int
    ) -> Tensor | None:
        """Chances for the elements of a tensor, by their places in the whole batch, so that all ranks agree."""
        if side is None or not side.stochastic:
            return None
        key = 9 * self.number + 3 * PRODUCTS.index(product) + kind
        first = 0 if kind == WEIGHT else self.draws.first_sample * rows * tensor.shape[1]
        found = chances(self.draws.seed, self.draws.step, key, first, tensor)
        return found.t() if turned else found
