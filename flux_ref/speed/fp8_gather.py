"""FSDP2 gathers the weights of FP8 linears as FP8 codes: half the bytes of bf16, and no rank casts a whole weight.

FSDP2 asks a parameter's local shard for two hooks. The first hook turns the shard into what is gathered. The second
hook turns the gathered memory into a parameter. Here the second hook keeps the memory as `linear.codes`. The
parameter is a handle: it has the weight's shape, holds only NaN, and receives the weight's gradient. All handles
share one memory.

A weight has one scale, so the ranks must agree on its largest magnitude before they cast. They do so at each forward of
the net, in one collective for all weights. So a changed weight never meets an old scale.

numerics: codes and scales equal, bit for bit, those of a cast after gathering in bf16. Rounding to bf16 is monotone, so
the largest rounded value is the rounded largest value.
"""

import inspect
import math
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flux_ref.config import Config
from flux_ref.speed import policy
from flux_ref.speed.fp8_product import agreed_magnitudes, cast, keep_scales, scale_of_magnitude
from flux_ref.speed.linear import PolicyLinear


def install_fp8_gather(net: nn.Module, cfg: Config) -> None:
    """Make FSDP2 gather the linears whose weights are e4m3 in all stages as codes. Call it once net is materialised."""
    names = policy.layers_gathered_in_fp8(cfg).values()
    linears = [one for one in net.modules() if isinstance(one, PolicyLinear) and one.layer in names]
    if not linears:
        return
    # FSDP2 keeps this very tensor; `to_local` returns another tensor object.
    shards = [linear.weight._local_tensor for linear in linears]
    device = shards[0].device
    mesh = linears[0].weight.device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    largest = max(linear.weight.numel() for linear in linears)
    handle = torch.full((largest,), math.nan, device=device, dtype=torch.bfloat16)
    encode = torch.compile(_encode, fullgraph=True, dynamic=False) if cfg.parallel.compile else _encode
    for linear, shard in zip(linears, shards):
        # One tensor each: compiled graphs copy inputs that are not aligned.
        linear.weight_scale = torch.ones((), device=device)
        linear.weight_inverse = torch.ones((), device=device)
        shard.fsdp_pre_all_gather = partial(_before, linear, encode)
        shard.fsdp_pre_all_gather.__signature__ = SIGNATURE  # FSDP2 would look it up at every gather, at 0.1 ms
        shard.fsdp_post_all_gather = partial(_after, linear, handle)
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


def _before(linear: PolicyLinear, encode, mesh, size: torch.Size, stride, module, policy) -> tuple[tuple[Tensor], None]:
    shard = linear.weight._local_tensor
    padding = -(-size[0] // mesh.size()) - len(shard)
    with torch.no_grad():  # in forward, too: a compiler would make another graph for this mode
        return (encode(shard, linear.weight_scale, padding, linear.arith.forward),), None


SIGNATURE = inspect.signature(partial(_before, None, None))


def _after(linear: PolicyLinear, handle: Tensor, outputs: tuple[Tensor], metadata, dtype, *, out: Tensor | None = None):
    if out is None:  # the first gather; later ones fill the same memory
        linear.codes = outputs[0].view(linear.arith.forward)[: linear.out_features]
        return handle, ()
