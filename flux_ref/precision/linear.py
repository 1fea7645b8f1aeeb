"""The linears of the blocks under a policy (policy.py): which products are cast, and where their scales come from.

Modulation, embedders, head and attention stay in parallel.dtype.
A linear multiplies in one of three ways.

    plain    no product is cast
    tensor   each tensor is cast once, with one scale, for both of its products (fp8.py)
    blocks   each side of each product is cast by itself (blocks.py)

Without gradients (validation, pictures) every scale comes from the tensor itself, and every side is rounded to nearest.
The loss then depends on weights and data alone.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flux_ref import model
from flux_ref.config import Config
from flux_ref.model import Flux, SingleBlock
from flux_ref.precision import fp8, policy
from flux_ref.precision.blocks import BlockMatmul, Draws, How
from flux_ref.precision.formats import E4M3, Products, way
from flux_ref.precision.fp8 import NOTHING, Codes, Fp8Matmul


class PolicyLinear(nn.Linear):
    """A linear whose parameters keep their names, shapes and dtype, and whose products are those of a policy.

    layer: its name in the net, by which a policy knows it.
    pairs: the sides of its products. way: plain, tensor or blocks, see above.
    arch: of the device, "" without native products.
    gathered: the weight in FP8; None where the weight itself is gathered. gather.py sets it.
    of_input, of_grad: what training notes and takes of the input and of the output's gradient. draws: for stochastic
    rounding. stages.py sets them between steps.
    """

    def __init__(self, linear: nn.Linear, layer: str, cfg: Config, arch: str):
        """Takes over the parameters of a linear. Raises: Refusal if the architecture cannot do what a stage asks."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.layer = layer
        stages = policy.stages(cfg)
        is_fp8 = any(way(stage.pairs[layer]) == "tensor" for stage in stages)
        self.support = fp8.support(arch if is_fp8 else "cpu")
        self.arch = arch if cfg.precision.native else ""
        self.in_validation = cfg.precision.eval
        self.gathered: Codes | None = None
        self.of_input = NOTHING
        self.of_grad = NOTHING
        self.draws: Draws | None = None
        self.take(stages[0].pairs[layer])

    def take(self, pairs: Products) -> None:
        """Multiply with these sides from now on."""
        self.pairs = pairs
        self.way = way(pairs)

    def forward(self, *parts: Tensor) -> Tensor:
        """(..., S, K) bf16 -> (..., S, N) bf16. parts: of the input, which join along K."""
        (out,) = self.in_parts(parts, (self.out_features,))
        return out

    def in_parts(self, parts: tuple[Tensor, ...], widths: Sequence[int]) -> Sequence[Tensor]:
        """The same with the result in parts: (..., S, n) for each n of widths, whose sum is N."""
        way = self.way if torch.is_grad_enabled() or self.in_validation else "plain"
        if way == "tensor":
            return self._in_fp8(parts, widths)
        joined = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        if way == "plain":
            return F.linear(joined, self.weight, self.bias).split(widths, dim=-1)
        how = How(self.pairs, self.arch, self.draws if torch.is_grad_enabled() else None, joined.shape[-2])
        out = BlockMatmul.apply(joined.flatten(0, -2), self.weight, self.bias, how)
        return out.unflatten(0, joined.shape[:-1]).split(widths, dim=-1)

    def _in_fp8(self, parts: tuple[Tensor, ...], widths: Sequence[int]) -> list[Tensor]:
        gradient, _ = self.pairs["grad_input"]
        is_e4m3 = gradient and gradient.form == E4M3
        results = Fp8Matmul.apply(
            self.weight,
            self.bias,
            self.gathered,
            self.support._replace(gradient=self.support.forward) if is_e4m3 else self.support,
            any(self.pairs["grad_weight"]),
            widths,
            *((self.of_input, self.of_grad) if torch.is_grad_enabled() else (NOTHING, NOTHING)),
            *(part.flatten(0, -2) for part in parts),
        )
        return [result.unflatten(0, parts[0].shape[:-1]) for result in results]


class PartsBlock(nn.Module):
    """A single block whose linears give and take parts. It takes over the modules of the plain one, with their names.

    A compiler then casts each part to FP8 where the part is computed. It would write and read a joined tensor once
    more: 20 % of the bytes of a step of schnell in FP8 on an H200, counted.
    """

    modulation: nn.Module
    linear1: PolicyLinear
    norm: nn.Module
    linear2: PolicyLinear

    def __init__(self, block: SingleBlock):
        super().__init__()
        self.widths = (
            sum(block.widths[:3]),
            block.widths[3],
        )  # queries, keys and values, for which one kernel is enough
        for name, module in block.named_children():
            self.add_module(name, module)

    def forward(self, x_BSD: Tensor, vec_BD: Tensor, rope_SR2: Tensor) -> Tensor:
        """As model.SingleBlock.forward."""
        shift_B1D, scale_B1D, gate_B1D = self.modulation(vec_BD)
        x = model.modulate(x_BSD, shift_B1D, scale_B1D)
        qkv_BS3D, inner_BSM = self.linear1.in_parts((x,), self.widths)
        attended_BSD = model.attention(*self.norm(*qkv_BS3D.chunk(3, dim=-1), rope_SR2))
        return x_BSD + gate_B1D * self.linear2(attended_BSD, F.gelu(inner_BSM, approximate="tanh"))


def convert(net: Flux, cfg: Config, arch: str) -> None:
    """Make the linears of a net's blocks compute as cfg.precision says, before the net is sharded.

    arch: of the device (fp8.architecture). Blocks that no stage casts stay as they are. Raises: Refusal.
    """
    for name in policy.layers(cfg.model):
        if any(way(stage.pairs[name]) != "plain" for stage in policy.stages(cfg)):
            linear = cast(nn.Linear, net.get_submodule(name))
            net.set_submodule(name, PolicyLinear(linear, name, cfg, arch))
    for i, block in enumerate(net.single_blocks):
        if isinstance(block.linear1, PolicyLinear) and isinstance(block.linear2, PolicyLinear):
            net.single_blocks[i] = PartsBlock(cast(SingleBlock, block))
