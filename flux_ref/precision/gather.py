"""FSDP2 gathers the weights of FP8 linears as FP8 codes: half the bytes of bf16, and no rank casts a whole weight.

FSDP2 lets a parameter's local shard decide what is gathered, by two methods of the shard (`Gathered`):
1. fsdp_pre_all_gather turns the shard into what this rank sends: codes.
2. fsdp_post_all_gather gets the codes of all ranks and returns the tensor that stands for the weight in the net.
The products read `linear.gathered`, so nothing reads that tensor. It is a placeholder of the weight's shape, which
receives the weight's gradient. It holds only NaN, so reading it by mistake shows. All placeholders share one memory.

A weight has one scale, so the ranks must agree on its largest magnitude before they cast. They do so at each forward of
the net, in one collective for all weights. So a changed weight never meets an old scale.

numerics: codes and scales equal, bit for bit, those of a cast after gathering in bf16. Rounding to bf16 is monotone, so
the largest rounded value is the rounded largest value.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flux_ref.config import Config
from flux_ref.precision import fp8, policy
from flux_ref.precision.casts import scale_of_magnitude
from flux_ref.precision.fp8 import Codes, Scales, agreed_magnitudes, keep_scales
from flux_ref.precision.linear import PolicyLinear


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
    encode = torch.compile(_encode, fullgraph=True, dynamic=False) if cfg.parallel.compile else _encode
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
