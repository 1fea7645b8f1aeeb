"""Regions: consecutive blocks that are gathered, compiled and recomputed together.

A region is one FSDP unit and one compiled graph. A larger region has fewer and larger collectives, and operations are
fused across its blocks. But it holds more gathered weights at a time, and its gradients are reduced later.
"""

import contextlib
import os
import shutil
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from flux_ref.config import Config, ParallelConfig
from flux_ref.errors import Refusal
from flux_ref.speed import policy

# Regions whose gradients FSDP2 reduces at a time, before backward waits for a reduction. Before torch 2.13 it is one.
REDUCTIONS = 2 if hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers") else 1
GRAPHS = 64  # at most: one per kind and length of region, mode, precision and batch shape


class Region(nn.Module):
    """Consecutive blocks of one kind that run as one module."""

    def __init__(self, blocks: list[nn.Module], recompute: str):
        """recompute: keep for backward only the input of each "block" or of the "region"; "none" keeps everything."""
        super().__init__()
        self.blocks = nn.ModuleList(blocks)  # numbered from 0, so that equal regions share one compiled graph
        self.recompute = recompute

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Run the blocks. inputs: as of a block. Returns what the last block returns."""
        return recomputed(self._run, *inputs) if self.recompute == "region" else self._run(*inputs)

    def _run(self, *inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        *streams, vec_BD, rope_SR2 = inputs
        for block in self.blocks:
            inputs = (*streams, vec_BD, rope_SR2)
            out = recomputed(block, *inputs) if self.recompute == "block" else block(*inputs)
            streams = out if isinstance(out, tuple) else (out,)
        return out


def recomputed(function, *args):
    """Call a function whose inner activations are not kept: backward computes them again."""
    # Blocks draw no random numbers, so there is no state of a generator to keep.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def regions(blocks: nn.ModuleList, cfg: ParallelConfig) -> nn.ModuleList:
    """The blocks in regions of cfg.region_blocks blocks each; the last region may be shorter."""
    starts = range(0, len(blocks), cfg.region_blocks)
    return nn.ModuleList(Region(list(blocks[start : start + cfg.region_blocks]), cfg.recompute) for start in starts)


def options(cfg: Config, device: torch.device) -> dict[str, object]:
    """The compiler's options for regions.

    They save memory traffic of GPUs. On a CPU they were not faster, so it takes none.
    An option that this torch does not know is left out; its old default then costs some memory traffic.
    """
    if device.type == "cpu":
        return {}
    wanted = {
        "realize_reads_threshold": 8,  # RoPE's gradient is computed where it is used, not stored in fp32
        "max_complex_pointwise_cat_inputs": 0,  # a part of a joint tensor is written where the part is computed
    }
    if any(map(policy.is_low, policy.stages(cfg))):  # transposed codes are written where they belong, too
        wanted["max_pointwise_cat_inputs"] = 0
    return {name: value for name, value in wanted.items() if name in torch._inductor.config._config}


def compile_all(units: list[Region], cfg: Config, device: torch.device) -> None:
    """Mark every region to be compiled at its first call in each mode.

    Raises: Refusal without a C++ compiler on the CPU, or a C compiler on a GPU, where Triton builds its launchers.
    """
    names = ("g++", "c++", "clang++")
    if device.type != "cpu":
        names = (os.environ["CC"],) if "CC" in os.environ else ("gcc", "clang")
        if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():  # which the launchers include
            raise Refusal("parallel.compile=true needs Python.h; install python3-dev or set parallel.compile=false")
    if not any(map(shutil.which, names)):
        raise Refusal(f"parallel.compile=true needs {names[0]}; install it or set parallel.compile=false")
    torch.compiler.set_stance("default")
    _set(torch._dynamo.config, "recompile_limit", GRAPHS)
    _set(torch._functorch.config, "activation_memory_budget", cfg.parallel.activation_budget)
    for region in units:
        region.compile(fullgraph=True, dynamic=False, options=options(cfg, device))


def forbid_recompilation() -> None:
    """From now on, a shape, dtype or mode that would trigger a compilation raises an error."""
    torch.compiler.set_stance("fail_on_recompile")


def permit_compilation() -> None:
    """Undo `compile_all` and `forbid_recompilation`."""
    torch.compiler.set_stance("default")
    _set(torch._functorch.config, "activation_memory_budget", 1.0)


def _set(config, name: str, value: float) -> None:
    """Change a setting of the compiler in all threads. config: a config module of torch.

    From torch 2.12 on an assignment holds in its thread only (torch/utils/_config_module.py). Autograd calls FSDP2,
    and so the casts of fp8_gather.py, in threads of its own. These read the default, which has no public setter.
    """
    setattr(config, name, value)
    config._config[name].default = value


def uncompiled(cfg: ParallelConfig) -> contextlib.AbstractContextManager:
    """A block in which compiled regions run eagerly, for batches of other shapes, such as those of pictures."""
    return torch.compiler.set_stance("force_eager") if cfg.compile else contextlib.nullcontext()


def overlap(net: FSDPModule) -> None:
    """Set how many units FSDP2 reduces beside computing. By itself it gathers the next unit while one computes."""
    if REDUCTIONS > 1:
        net.set_reduce_scatter_max_input_buffers(REDUCTIONS)
