"""The linears of the blocks under a policy (policy.py): which products are cast, and where their scales come from.

Modulation, embedders, head and attention stay in parallel.dtype.
A linear multiplies in one of three ways.

    plain    no product is cast
    tensor   each tensor is cast once, with one scale, for both of its products (fp8.py)
    blocks   each side of each product is cast by itself (blocks.py)

Without gradients (validation, pictures) every scale comes from the tensor itself, and every side is rounded to nearest.
The loss then depends on weights and data alone.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flux_ref import model
from flux_ref.config import Config
from flux_ref.model import Flux, SingleBlock
from flux_ref.precision import fp8, policy
from flux_ref.precision.blocks import BlockMatmul, Draws
from flux_ref.precision.formats import E4M3
from flux_ref.precision.fp8 import NOTHING, Fp8Matmul, Remembered, cast, magnitudes, scales_of
from flux_ref.precision.layers import Products, is_delayed, layers, way

SLICES = 16  # of an input's rows; divides their number, as policy.require_rows demands for training


class Memory(nn.Module):
    """What training remembers of one tensor of a linear, in buffers of fp32.

    amax: the largest magnitudes over the micro-batches of a step. scale, inverse: the delayed scale and 1 / scale.
    """

    def __init__(self, length: int, device: torch.device):
        """length: of amax."""
        super().__init__()
        # One tensor each: views of one tensor would share a version counter, which compiled backwards refuse.
        for name, shape in (("amax", length), ("scale", ()), ("inverse", ())):
            self.register_buffer(name, torch.zeros(shape, device=device), persistent=False)


class PolicyLinear(nn.Linear):
    """A linear whose parameters keep their names, shapes and dtype, and whose products are those of a policy.

    layer: its name in rules.
    pairs: the sides of its products. way: plain, tensor or blocks, see above.
    notes: whether training notes magnitudes for delayed scales.
    hooks.py sets pairs, way, notes, is_delayed and draws between steps.
    is_delayed: whether training takes the delayed scales.
    of_input, of_grad: of the input and of the output's gradient; None where no stage has delayed sides. Only a stage
    with delayed sides notes magnitudes. So a run computes the same whether or not later stages are known.
    of_input.amax: (16,), of 16 slices of the rows; one long reduction would need two kernels.
    of_grad.amax: (N,), of the columns.
    codes, weight_scale, weight_inverse: the gathered weight in FP8, (N, K), its scale and 1 / scale; None where the
    weight itself is gathered.
    """

    def __init__(self, linear: nn.Linear, layer: str, cfg: Config, arch: str):
        """Takes over the parameters of a linear. Raises: Refusal if the architecture cannot do what a stage asks."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        stages = policy.stages(cfg)
        is_fp8 = any(way(stage.pairs[layer]) == "tensor" for stage in stages)
        self.arith = fp8.arithmetic(arch) if is_fp8 else None
        self.arch = arch if cfg.precision.native else ""
        self.layer = layer
        self.in_validation = cfg.precision.eval
        self.is_delayed = False
        self.draws: Draws | None = None
        self.take(stages[0].pairs[layer])
        self.codes = None
        self.weight_scale = None
        self.weight_inverse = None
        remembers = layer in policy.layers_with_delayed_scales(cfg)
        self.of_input = Memory(SLICES, linear.weight.device) if remembers else None
        self.of_grad = Memory(linear.out_features, linear.weight.device) if remembers else None

    def take(self, pairs: Products) -> None:
        """Multiply with these sides from now on."""
        self.pairs = pairs
        self.way = way(pairs)
        self.notes = is_delayed(pairs)

    @torch.no_grad()
    def encode(self) -> None:
        """Make the codes of the weight as it is now, as a gather would. For nets that are not sharded."""
        dtype = self.arith.forward
        self.weight_scale, self.weight_inverse = scales_of(magnitudes(self.weight), dtype)
        self.codes = cast(self.weight, self.weight_scale, dtype)

    def forward(self, *parts: Tensor) -> Tensor:
        """(..., S, K) bf16 -> (..., S, N) bf16. parts: of the input, which join along K."""
        (out,) = self.in_parts(parts, (self.out_features,))
        return out

    def in_parts(self, parts: Sequence[Tensor], widths: Sequence[int]) -> Sequence[Tensor]:
        """The same with the result in parts: (..., S, n) for each n of widths, whose sum is N."""
        way = self.way if torch.is_grad_enabled() or self.in_validation else "plain"
        if way == "tensor":
            return self._in_fp8(parts, widths)
        joined = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        out = self._in_blocks(joined) if way == "blocks" else F.linear(joined, self.weight, self.bias)
        return out.split(widths, dim=-1)

    def _in_blocks(self, joined: Tensor) -> Tensor:
        draws = self.draws if torch.is_grad_enabled() else None
        rows = joined.shape[-2]
        out = BlockMatmul.apply(joined.flatten(0, -2), self.weight, self.bias, self.pairs, self.arch, draws, rows)
        return out.unflatten(0, joined.shape[:-1])

    def _in_fp8(self, parts: Sequence[Tensor], widths: Sequence[int]) -> list[Tensor]:
        gradient = self.pairs["grad_input"][0]
        of_weight = self.pairs["grad_weight"][0]
        arith = self.arith._replace(gradient=self.arith.forward) if gradient.form == E4M3 else self.arith
        # Equal neighbours are one part for the product: queries, keys and values. Kernels for each would be small.
        groups = [list(group) for _, group in itertools.groupby(widths)]
        results = Fp8Matmul.apply(
            self.weight,
            self.bias,
            self.codes,
            self.weight_inverse,
            arith,
            of_weight is not None,
            [sum(group) for group in groups],
            self._remembered(self.of_input),
            self._remembered(self.of_grad),
            *(part.flatten(0, -2) for part in parts),
        )
        results = [result.unflatten(0, parts[0].shape[:-1]) for result in results]
        return [piece for result, group in zip(results, groups) for piece in result.chunk(len(group), dim=-1)]

    def _remembered(self, memory: Memory | None) -> Remembered:
        """Where training notes magnitudes, and what it remembers."""
        if not self.notes or not torch.is_grad_enabled():
            return NOTHING
        return Remembered(memory.amax, memory.scale, memory.inverse) if self.is_delayed else Remembered(memory.amax)


class PartsBlock(nn.Module):
    """A single block whose linears give and take parts. It takes over the modules of the plain one, with their names.

    A compiler then casts each part to FP8 where the part is computed. It would write and read a joined tensor once
    more: 20 % of the bytes of a step of schnell in FP8 on an H200, counted.
    """

    def __init__(self, block: SingleBlock):
        super().__init__()
        self.heads = block.heads
        self.widths = block.widths
        for name, module in block.named_children():
            self.add_module(name, module)

    def forward(self, x_BSD: Tensor, vec_BD: Tensor, rope_SR2: Tensor) -> Tensor:
        """As model.SingleBlock.forward."""
        shift_B1D, scale_B1D, gate_B1D = self.modulation(vec_BD)
        x = model.modulate(x_BSD, shift_B1D, scale_B1D)
        q_BSD, k_BSD, v_BSD, inner_BSM = self.linear1.in_parts([x], self.widths)
        heads = self.heads
        q_BSHK, k_BSHK = self.norm(model.split_heads(q_BSD, heads), model.split_heads(k_BSD, heads), rope_SR2)
        attended_BSD = model.attention(q_BSHK, k_BSHK, model.split_heads(v_BSD, heads))
        return x_BSD + gate_B1D * self.linear2(attended_BSD, F.gelu(inner_BSM, approximate="tanh"))


def convert(net: Flux, cfg: Config, arch: str) -> None:
    """Make the linears of a net's blocks compute as cfg.precision says, before the net is sharded.

    arch: of the device (fp8.architecture). Blocks that no stage casts stay as they are. Raises: Refusal.
    """
    for module, layer in layers(cfg.model).items():
        if any(way(stage.pairs[layer.name]) != "plain" for stage in policy.stages(cfg)):
            net.set_submodule(module, PolicyLinear(net.get_submodule(module), layer.name, cfg, arch))
    for i, block in enumerate(net.single_blocks):
        if isinstance(block.linear1, PolicyLinear) and isinstance(block.linear2, PolicyLinear):
            net.single_blocks[i] = PartsBlock(block)
