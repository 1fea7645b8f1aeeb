"""The linears of the blocks under a policy (policy.py): which products are cast, where their scales
come from, and how FSDP2 gathers their weights.

Modulation, embedders, head and attention stay in compute.dtype.
A linear multiplies by one of three paths.

    plain    no product is cast
    tensor   each tensor is cast once, with one scale, for both of its products (fp8.py)
    blocks   each side of each product is cast by itself (blocks.py)

Without gradients (validation, pictures) every scale comes from the tensor itself, and every side is rounded to nearest.
The loss then depends on weights and data alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flux_ref.config import Config
from flux_ref.model import Flux, PartsLinear
from flux_ref.precision import fp8, policy
from flux_ref.precision.blocks import BlockMatmul, MatmulOptions, RoundingKey
from flux_ref.precision.casts import scale_of_magnitude
from flux_ref.precision.formats import E4M3, Products, matmul_path
from flux_ref.precision.fp8 import NOTHING, Codes, Fp8Matmul, Scales, agreed_magnitudes, keep_scales


class PolicyLinear(PartsLinear):
    """A linear whose parameters keep their names, shapes and dtype, and whose products are those of a policy.

    layer: its name in the net, by which a policy knows it.
    pairs: the sides of its products. path: plain, tensor or blocks, see above.
    arch: of the device, "" without native products.
    gathered: the weight in FP8; None where the weight itself is gathered. linear.py sets it.
    of_input, of_grad: what training notes and takes of the input and of the output's gradient. draws: for stochastic
    rounding. recipe.py sets them between steps.
    """

    def __init__(self, linear: nn.Linear, layer: str, cfg: Config, arch: str):
        """Takes over the parameters of a linear. Raises: Refusal if the architecture cannot do what a stage asks."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias
        self.layer = layer
        stages = policy.stages(cfg)
        is_fp8 = any(matmul_path(stage.pairs[layer]) == "tensor" for stage in stages)
        self.support = fp8.support(arch if is_fp8 else "cpu")
        self.arch = arch if cfg.precision.native else ""
        self.in_validation = cfg.precision.eval
        self.gathered: Codes | None = None
        self.of_input = NOTHING
        self.of_grad = NOTHING
        self.draws: RoundingKey | None = None
        self.take(stages[0].pairs[layer])

    def take(self, pairs: Products) -> None:
        """Multiply with these sides from now on."""
        self.pairs = pairs
        self.path = matmul_path(pairs)

    def in_parts(self, parts: tuple[Tensor, ...], widths: Sequence[int]) -> Sequence[Tensor]:
        """The same with the result in parts: (..., S, n) for each n of widths, whose sum is N."""
        path = self.path if torch.is_grad_enabled() or self.in_validation else "plain"
        if path == "tensor":
            return self._in_fp8(parts, widths)
        if path == "plain":
            return super().in_parts(parts, widths)
        joined = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
        how = MatmulOptions(self.pairs, self.arch, self.draws if torch.is_grad_enabled() else None, joined.shape[-2])
        out = BlockMatmul.apply(joined.flatten(0, -2), self.weight, self.bias, how)
        return out.unflatten(0, joined.shape[:-1]).split(widths, dim=-1)

    def _in_fp8(self, parts: tuple[Tensor, ...], widths: Sequence[int]) -> list[Tensor]:
        gradient, _ = self.pairs["grad_input"]
        is_e4m3 = gradient and gradient.form == E4M3
        # For the gradients of queries, keys and values, which have one width, one kernel is enough.
        groups = [list(group) for _, group in groupby(widths)]
        results = Fp8Matmul.apply(
            self.weight,
            self.bias,
            self.gathered,
            self.support._replace(gradient=self.support.forward) if is_e4m3 else self.support,
            any(self.pairs["grad_weight"]),
            [sum(group) for group in groups],
            *((self.of_input, self.of_grad) if torch.is_grad_enabled() else (NOTHING, NOTHING)),
            *(part.flatten(0, -2) for part in parts),
        )
        split = [part for result, group in zip(results, groups) for part in result.split(group, dim=1)]
        return [part.unflatten(0, parts[0].shape[:-1]) for part in split]


def convert(net: Flux, cfg: Config, arch: str) -> None:
    """Make the linears of a net's blocks compute as cfg.precision says, before the net is sharded.

    arch: of the device (fp8.architecture). Blocks that no stage casts stay as they are. Raises: Refusal.
    """
    for name in policy.layers(cfg.model):
        if any(matmul_path(stage.pairs[name]) != "plain" for stage in policy.stages(cfg)):
            linear = cast(nn.Linear, net.get_submodule(name))
            net.set_submodule(name, PolicyLinear(linear, name, cfg, arch))


# FSDP2 gathers the weights of FP8 linears as FP8 codes: half the bytes of bf16, and no rank casts a whole weight.
#
# FSDP2 lets a parameter's local shard decide what is gathered, by two methods of the shard (`Gathered`):
# 1. fsdp_pre_all_gather turns the shard into what this rank sends: codes.
# 2. fsdp_post_all_gather gets the codes of all ranks and returns the tensor that stands for the weight in the net.
# The products read `linear.gathered`, so nothing reads that tensor. It is a placeholder of the weight's shape, which
# receives the weight's gradient. It holds only NaN, so reading it by mistake shows. All placeholders share one memory.
#
# A weight has one scale, so the ranks must agree on its largest magnitude before they cast. They do so at each forward
# of the net, in one collective for all weights. So a changed weight never meets an old scale.
#
# numerics: codes and scales equal, bit for bit, those of a cast after gathering in bf16. Rounding to bf16 is monotone,
# so the largest rounded value is the rounded largest value.


@dataclass(frozen=True, eq=False)
class Gathered:
    """FSDP2's two methods for one weight. FSDP2 tells by the number of their arguments what to give them.

    shard: this rank's rows, the very tensor that FSDP2 keeps. scales: one tensor each, since compiled graphs copy
    inputs that are not aligned. placeholder: of NaN. encode: `_encode`, or compiled.
    """

    linear: PolicyLinear
    shard: Tensor
    scales: Scales
    placeholder: Tensor
    encode: Callable[..., Tensor]

    def fsdp_pre_all_gather(self, mesh, size, stride, module, policy) -> tuple[tuple[Tensor], None]:
        """What this rank gives: the codes of its rows. size: of the whole weight."""
        padding = -(-size[0] // mesh.size()) - len(self.shard)
        with torch.no_grad():  # in forward, too: a compiler would make another graph for this mode
            return (self.encode(self.shard, self.scales[0], padding, self.linear.support.forward),), None

    def fsdp_post_all_gather(self, outputs: tuple[Tensor], metadata, dtype, *, out: Tensor | None = None):
        """Keep the codes of all ranks. Later gathers fill the same memory, with `out` given: nothing is to do."""
        if out is None:
            codes = outputs[0].view(self.linear.support.forward)[: self.linear.out_features]
            self.linear.gathered = Codes(codes, self.scales)
            return self.placeholder, ()
        return None


def install(net: nn.Module, cfg: Config) -> None:
    """Make FSDP2 gather the linears whose weights are e4m3 in all stages as codes. Call it once the net has weights."""
    names = policy.layers_gathered_in_fp8(cfg)
    linears = [one for one in net.modules() if isinstance(one, PolicyLinear) and one.layer in names]
    if not linears:
        return
    device = linears[0].weight.device
    largest = max(linear.weight.numel() for linear in linears)
    placeholder = torch.full((largest,), math.nan, device=device, dtype=torch.bfloat16)
    encode = torch.compile(_encode, fullgraph=True, dynamic=False) if cfg.compute.compile else _encode
    every = []
    for linear in linears:
        scales = torch.ones((), device=device), torch.ones((), device=device)
        shard = cast(DTensor, linear.weight)._local_tensor  # `to_local` returns another tensor object
        one = Gathered(linear, shard, scales, placeholder, encode)
        shard.fsdp_pre_all_gather = one.fsdp_pre_all_gather  # type: ignore[attr-defined]  # as FSDP2 documents
        shard.fsdp_post_all_gather = one.fsdp_post_all_gather  # type: ignore[attr-defined]
        every.append(one)
    group = cast(DTensor, linears[0].weight).device_mesh.get_group("shard")
    # FSDP2's own hook casts and gathers, so this one comes before it.
    net.register_forward_pre_hook(lambda *_: _agree(every, group), prepend=True)


@torch.no_grad()
def _agree(every: list[Gathered], group: dist.ProcessGroup) -> None:
    """Set the scales of the weights as they are now. Collective; works on the device alone and in place."""
    filled = [one.shard if one.shard.numel() else one.shard.new_zeros(1) for one in every]
    amax = agreed_magnitudes(filled, group).bfloat16().float()
    scale = scale_of_magnitude(amax, torch.finfo(every[0].linear.support.forward).max)
    keep_scales(scale, [one.scales for one in every])


def _encode(shard: Tensor, scale: Tensor, padding: int, dtype: torch.dtype) -> Tensor:
    """The rows of a shard as codes, with rows of zeros behind; uint8, which every backend can gather."""
    return fp8.cast(F.pad(shard.bfloat16(), (0, 0, 0, padding)), scale, dtype).view(torch.uint8)
