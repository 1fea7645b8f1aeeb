"""FSDP2 gathers the weights of FP8 linears as FP8 codes: half the bytes of bf16, and no rank casts a whole weight.

FSDP2 lets a parameter's local shard decide what is gathered, by two methods of the shard (`Gathered`):
1. fsdp_pre_all_gather turns the shard into what this rank sends: codes.
2. fsdp_post_all_gather gets the codes of all ranks and returns the tensor that stands for the weight in the net.
The products read `linear.codes`, so nothing reads that tensor. It is a placeholder of the weight's shape, which
receives the weight's gradient. It holds only NaN, so reading it by mistake shows. All placeholders share one memory.

A weight has one scale, so the ranks must agree on its largest magnitude before they cast. They do so at each forward of
the net, in one collective for all weights. So a changed weight never meets an old scale.

numerics: codes and scales equal, bit for bit, those of a cast after gathering in bf16. Rounding to bf16 is monotone, so
the largest rounded value is the rounded largest value.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flux_ref.config import Config
from flux_ref.precision import policy
from flux_ref.precision.casts import scale_of_magnitude
from flux_ref.precision.fp8 import agreed_magnitudes, cast, keep_scales
from flux_ref.precision.linear import PolicyLinear


@dataclass(frozen=True, eq=False)
class Gathered:
    """FSDP2's two methods for one weight. FSDP2 tells by the number of their arguments what to give them.

    shard: this rank's rows, the very tensor that FSDP2 keeps. placeholder: of NaN. encode: `_encode`, or compiled.
    """

    linear: PolicyLinear
    shard: Tensor
    placeholder: Tensor
    encode: Callable[..., Tensor]

    def fsdp_pre_all_gather(self, mesh, size, stride, module, policy) -> tuple[tuple[Tensor], None]:
        """What this rank gives: the codes of its rows. size: of the whole weight."""
        padding = -(-size[0] // mesh.size()) - len(self.shard)
        with torch.no_grad():  # in forward, too: a compiler would make another graph for this mode
            codes = self.encode(self.shard, self.linear.weight_scale, padding, self.linear.arith.forward)
        return (codes,), None

    def fsdp_post_all_gather(self, outputs: tuple[Tensor], metadata, dtype, *, out: Tensor | None = None):
        """Keep the codes of all ranks. Later gathers fill the same memory, with `out` given: nothing is to do."""
        if out is None:
            linear = self.linear
            linear.codes = outputs[0].view(linear.arith.forward)[: linear.out_features]
            return self.placeholder, ()
        return None


def install(net: nn.Module, cfg: Config) -> None:
    """Make FSDP2 gather the linears whose weights are e4m3 in all stages as codes. Call it once the net has weights."""
    names = policy.layers_gathered_in_fp8(cfg).values()
    linears = [one for one in net.modules() if isinstance(one, PolicyLinear) and one.layer in names]
    if not linears:
        return
    shards = [linear.weight._local_tensor for linear in linears]  # `to_local` returns another tensor object
    device = shards[0].device
    mesh = linears[0].weight.device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    largest = max(linear.weight.numel() for linear in linears)
    placeholder = torch.full((largest,), math.nan, device=device, dtype=torch.bfloat16)
    encode = torch.compile(_encode, fullgraph=True, dynamic=False) if cfg.parallel.compile else _encode
    for linear, shard in zip(linears, shards):
        # One tensor each: compiled graphs copy inputs that are not aligned.
        linear.weight_scale = torch.ones((), device=device)
        linear.weight_inverse = torch.ones((), device=device)
        hooks = Gathered(linear, shard, placeholder, encode)
        shard.fsdp_pre_all_gather = hooks.fsdp_pre_all_gather
        shard.fsdp_post_all_gather = hooks.fsdp_post_all_gather
    # FSDP2's own hook casts and gathers, so this one comes before it.
    net.register_forward_pre_hook(lambda *_: _agree(linears, shards, group), prepend=True)


@torch.no_grad()
def _agree(linears: list[PolicyLinear], shards: list[Tensor], group: dist.ProcessGroup) -> None:
    """Set the scales of the weights as they are now. Collective; works on the device alone and in place."""
    for linear, shard in zip(linears, shards):
        # A weight that stays gathered, as in the second of two forwards without backward, shows no shard.
        assert getattr(linear.weight, "_local_tensor", shard) is shard, "a shard was replaced: its hooks are lost"
    filled = [shard if shard.numel() else shard.new_zeros(1) for shard in shards]
    amax = agreed_magnitudes(filled, group).bfloat16().float()
    scale = scale_of_magnitude(amax, torch.finfo(linears[0].arith.forward).max)
    keep_scales(scale, [linear.weight_scale for linear in linears], [linear.weight_inverse for linear in linears])


def _encode(shard: Tensor, scale: Tensor, padding: int, dtype: torch.dtype) -> Tensor:
    """The rows of a shard as codes, with rows of zeros behind; uint8, which every backend can gather."""
    return cast(F.pad(shard.bfloat16(), (0, 0, 0, padding)), scale, dtype).view(torch.uint8)
