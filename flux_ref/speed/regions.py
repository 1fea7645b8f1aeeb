"""What a block runs in: consecutive blocks make a region, which is one FSDP unit, one compiled graph, one prefetch.

A region of k blocks is gathered, fused and recomputed as one. More blocks per region mean fewer, larger collectives
and fusion across their borders, but more gathered weights at a time and a gradient reduction that starts later.
"""

import contextlib
import shutil

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from flux_ref.config import ParallelConfig
from flux_ref.errors import Refusal

GRAPHS = 64  # each kind and length of region has one per mode, precision and batch shape


class Region(nn.Module):
    """Consecutive blocks that act as one."""

    def __init__(self, blocks: list[nn.Module], recompute: str):
        """recompute: what is kept for backward is the input of each "block", of the whole "region", or "none"."""
        super().__init__()
        self.blocks = nn.ModuleList(blocks)  # numbered from 0, so that equal regions share one compiled graph
        self.recompute = recompute

    def forward(self, streams, vec_BD: Tensor, rope_SR2: Tensor):
        """As its blocks: streams is a pair of tensors (double blocks) or one (single blocks)."""
        if self.recompute == "region":
            return again(self._run, streams, vec_BD, rope_SR2)
        return self._run(streams, vec_BD, rope_SR2)

    def _run(self, streams, vec_BD: Tensor, rope_SR2: Tensor):
        for block in self.blocks:
            one = (streams, vec_BD, rope_SR2)
            streams = again(block, *one) if self.recompute == "block" else block(*one)
        return streams


def again(function, *args):
    """Call a function whose inner activations are not kept but computed again in backward."""
    # No generator is involved, so there is no state of one to keep.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def regions(blocks: nn.ModuleList, cfg: ParallelConfig) -> nn.ModuleList:
    """The blocks in regions of cfg.region_blocks; the last may be shorter."""
    starts = range(0, len(blocks), cfg.region_blocks)
    return nn.ModuleList(Region(list(blocks[start : start + cfg.region_blocks]), cfg.recompute) for start in starts)


def compile_all(found: list[Region], cfg: ParallelConfig, device: torch.device) -> None:
    """Have every region compiled at its first call in each mode. Raises: Refusal without a compiler."""
    if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise Refusal(
            "parallel.compile=true needs a C++ compiler on the CPU; install g++ or set parallel.compile=false"
        )
    torch.compiler.set_stance("default")
    torch._dynamo.config.recompile_limit = GRAPHS
    torch._functorch.config.activation_memory_budget = cfg.activation_budget
    for region in found:
        region.compile(fullgraph=True, dynamic=False)


def forbid_recompilation() -> None:
    """From now on a shape, dtype or mode that has not been compiled yet is an error: it would stop all ranks."""
    torch.compiler.set_stance("fail_on_recompile")


def permit_compilation() -> None:
    """As it was before `compile_all` and `forbid_recompilation`."""
    torch.compiler.set_stance("default")
    torch._functorch.config.activation_memory_budget = 1.0


def uncompiled(cfg: ParallelConfig) -> contextlib.AbstractContextManager:
    """For batches of other shapes, such as those of pictures: run what is compiled as it is written."""
    return torch.compiler.set_stance("force_eager") if cfg.compile else contextlib.nullcontext()


def overlap(net: FSDPModule, units: list[FSDPModule], cfg: ParallelConfig) -> None:
    """Beyond what FSDP2 does by itself, which is to gather the next unit while one computes. Raises: Refusal."""
    for i, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + cfg.forward_prefetch])
    if cfg.separate_reduce_scatter:
        if not hasattr(net, "set_separate_reduce_scatter_group"):
            raise Refusal(
                f"parallel.separate_reduce_scatter=true needs torch 2.13, this is {torch.__version__}; set it to false"
            )
        net.set_separate_reduce_scatter_group()
        net.set_reduce_scatter_max_input_buffers(2)  # with one, backward waits for the reduction before
