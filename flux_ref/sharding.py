"""How the net is split over the ranks: regions, FSDP2 units, shards and their initial values; compiling; attention.

A region is a few consecutive blocks that are gathered and compiled together: one FSDP unit and one compiled
graph. A larger region has fewer and larger collectives, and operations are fused across its blocks. But it holds more
gathered weights at a time, and its gradients are reduced later.

A port replaces this file. Parameters keep Black Forest Labs' names whatever the regions are (`named_parameters`).
"""

import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from flux_ref import model, ranks, rng
from flux_ref.cli import Refusal
from flux_ref.config import Config, ParallelConfig
from flux_ref.model import Flux
from flux_ref.precision.recipe import DTYPES, Options, PrecisionRecipe
from flux_ref.ranks import World

# Regions whose gradients FSDP2 reduces at a time, before backward waits for a reduction. Before torch 2.13 it is one.
REDUCTIONS = 2 if hasattr(FSDPModule, "set_reduce_scatter_max_input_buffers") else 1
RECOMPILE_LIMIT = 64  # compiled variants: one per kind and length of region, mode, phase and batch shape
PIECE = 1 << 16  # initial values drawn at a time; they fit a processor's cache


class Region(nn.Module):
    """Consecutive blocks of one kind that run as one module."""

    def __init__(self, blocks: list[nn.Module], activation_checkpointing: str):
        """activation_checkpointing: keep for backward only the input of each "block"; "none" keeps everything."""
        super().__init__()
        self.blocks = nn.ModuleList(blocks)  # numbered from 0, so that equal regions share one compiled graph
        self.activation_checkpointing = activation_checkpointing

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Run the blocks. inputs: as of a block. Returns what the last block returns."""
        *streams, vec_BD, rope_SR2 = inputs
        for block in self.blocks:
            if self.activation_checkpointing == "block":  # blocks draw no random numbers: no generator's state is kept
                out = checkpoint(block, *streams, vec_BD, rope_SR2, use_reentrant=False, preserve_rng_state=False)
            else:
                out = block(*streams, vec_BD, rope_SR2)
            streams = [*out] if isinstance(out, tuple) else [out]
        return out


class ShardedFlux(Flux, FSDPModule):
    """The type of a sharded net: FSDP2 gives a Flux the methods of FSDPModule. No object is made of it."""

    names: list[str]  # Black Forest Labs' names of the parameters, in the net's order
    recipe: PrecisionRecipe
    kept: list[FSDPModule]  # units whose weights stay gathered through a step, the root among them


def regions(blocks: nn.ModuleList, cfg: Config) -> nn.ModuleList:
    """The blocks in regions of parallel.region_blocks blocks each; the last region may be shorter."""
    size = cfg.parallel.region_blocks
    starts = range(0, len(blocks), size)
    return nn.ModuleList(
        Region(list(blocks[start : start + size]), cfg.compute.activation_checkpointing) for start in starts
    )


def freed_regions(cfg: ParallelConfig, regions: int) -> int:
    """How many of the first regions FSDP2 frees after forward and gathers again for backward."""
    return max(0, regions - cfg.kept_regions) if cfg.kept_regions >= 0 else 0


def named_parameters(net: ShardedFlux) -> dict[str, DTensor]:
    """Parameters by Black Forest Labs' names, whatever the regions are."""
    return dict(zip(net.names, cast(Iterator[DTensor], net.parameters()), strict=True))


def build(cfg: Config, world: World, seed: int | None, recipe: PrecisionRecipe | None = None) -> ShardedFlux:
    """The sharded net of a config.

    seed: of its initial weights; None leaves the weights undefined. recipe: None is PrecisionRecipe(cfg).
    """
    recipe = recipe or PrecisionRecipe(cfg)
    allow_attention(cfg, world.device)
    with torch.device("meta"):
        plain = Flux(cfg.model)
        recipe.convert(plain, world.device)
    net = shard(plain, cfg, world, recipe)
    net.to_empty(device=world.device)
    net.rope = net.make_rope().to(world.device)  # the first one had no memory
    if seed is not None:
        init_weights(net, seed)
    recipe.attach(net, world)
    return net


def shard(plain: Flux, cfg: Config, world: World, recipe: PrecisionRecipe) -> ShardedFlux:
    """Group the blocks of a net on the meta device into regions, then shard it, in place.

    The order matters: names are noted before blocks are grouped. Regions are marked to be compiled before FSDP2 wraps
    them, so that its hooks stay outside of compiled code. Units are sharded before the net, which takes what is left.

    The ranks of a replica gather weights and reduce the gradients of each micro-batch. Kept weights are gathered once
    per step: weights change only at its end (trainer.train_step).
    Replicas average their gradient shards once per step, with the last micro-batch (trainer.train_step).
    numerics: master weights stay fp32. Units are gathered in compute.dtype; gradients are reduced in
    parallel.reduce_dtype.
    """
    parallel = cfg.parallel
    names = [name for name, _ in plain.named_parameters()]
    plain.double_blocks = regions(plain.double_blocks, cfg)
    plain.single_blocks = regions(plain.single_blocks, cfg)
    units = [*plain.double_blocks, *plain.single_blocks]
    if cfg.compute.compile:
        compile_all(units, cfg, world.device, recipe.compiler)
    mixed_precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[cfg.compute.dtype],
        reduce_dtype=DTYPES[parallel.reduce_dtype],
        cast_forward_inputs=False,  # numerics: True would round t and RoPE to compute.dtype
    )
    first_kept = freed_regions(parallel, len(units))
    for i, unit in enumerate(units):
        fully_shard(unit, mesh=world.mesh, mp_policy=mixed_precision, reshard_after_forward=i < first_kept)
    net = cast(ShardedFlux, fully_shard(plain, mesh=world.mesh, mp_policy=mixed_precision))
    net.names = names
    net.recipe = recipe
    net.kept = [*units[first_kept:], net]
    # torch 2.14 and later warn that operations in place on a unit's result would be lost. The objective has none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    if REDUCTIONS > 1:
        net.set_reduce_scatter_max_input_buffers(REDUCTIONS)
    return net


@torch.no_grad()
def init_weights(net: ShardedFlux, seed: int) -> None:
    """Fill each shard with its part of the initial weights.

    Element e of a parameter is a function of (seed, name, e). So every world size starts from the same values, and no
    rank draws more than it keeps.
    """
    for name, parameter in named_parameters(net).items():
        first, local = local_rows(parameter)
        start = first * math.prod(parameter.shape[1:])
        kind, width = model.init_spec(name, tuple(parameter.shape))
        for piece in local.view(-1).split(PIECE):
            piece.copy_(torch.from_numpy(rng.init_values(seed, name, kind, width, start, len(piece))))
            start += len(piece)


def local_rows(parameter: DTensor) -> tuple[int, Tensor]:
    """This rank's rows of a parameter, as (number of the first row, rows). FSDP2 splits axis 0 like torch.chunk."""
    mesh = parameter.device_mesh
    chunk = -(-parameter.shape[0] // mesh.size(-1))
    return min(mesh.get_local_rank("shard") * chunk, parameter.shape[0]), parameter.to_local()


def reshard(net: nn.Module) -> None:
    """Free all gathered weights. After a forward without backward they stay, and the next forward would use them."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


# Compiling


def choose_compile_cache(cfg: Config, world: World) -> None:
    """With compute.compile, let torch's compiler keep its code in a folder of this user, for later starts. Collective.

    By itself torch takes the pickles and the code in /tmp/torchinductor_USER; another user may have made that folder.
    TORCHINDUCTOR_CACHE_DIR names another folder. Call this before a net is built: torch then imports its compiler,
    which looks for the folder. Raises: Refusal if the folder belongs to another user.
    """
    if cfg.compute.compile:
        host = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/flux_ref/{os.uname().nodename}_{torch.__version__}"
        place = Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or host).expanduser()
        # torch finds compiled code by the code of the net. The code does not name the kernel of attention.
        place /= attention_kernel(cfg, world.device).replace(" ", "_")  # torch's call of g++ would split it
        with ranks.agreed():
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if place.stat().st_uid != os.geteuid():
                raise Refusal(f"{place} belongs to another user, whose code would run; set TORCHINDUCTOR_CACHE_DIR")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(place)


def compile_all(units: list[Region], cfg: Config, device: torch.device, own: Options) -> None:
    """Mark every region to be compiled at its first call in each mode. own: the recipe's options of the compiler.

    The options save memory traffic of GPUs. On a CPU they were not faster, so it takes none.
    An option that this torch does not know is left out; its old default then costs some memory traffic.
    """
    wanted = {
        "realize_reads_threshold": 8,  # RoPE's gradient is computed where it is used, not stored in fp32
        "max_complex_pointwise_cat_inputs": 0,  # a part of a joint tensor is written where the part is computed
        **own,
    }
    known: Any = torch._inductor.config  # a module that torch fills as it is imported
    options = {name: value for name, value in wanted.items() if name in known._config and device.type != "cpu"}
    torch.compiler.set_stance("default")
    _set(torch._dynamo.config, "recompile_limit", RECOMPILE_LIMIT)
    for name, value in partitioning(cfg).items():
        _set(torch._functorch.config, name, value)
    for region in units:
        region.compile(fullgraph=True, dynamic=False, options=options)


def partitioning(cfg: Config) -> dict[str, float]:
    """What decides which activations a compiled region keeps for backward: settings of torch._functorch.config."""
    # torch recomputes operators that are not its own as if they cost nothing, such as the products of precision/.
    return {"activation_memory_budget": cfg.compute.activation_memory_budget, "is_non_builtin_to_include": True}


def _set(config: Any, name: str, value: float) -> None:
    """Change a setting of the compiler in all threads. config: a config module of torch.

    From torch 2.12 on (torch/utils/_config_module.py) an assignment holds in its thread only. Autograd runs backward,
    and with it FSDP2 and the casts of precision/linear.py, in threads of its own. These read the default of a setting,
    which has no public setter: hence the private `_config`, which torch 2.11 has, too.
    """
    setattr(config, name, value)
    config._config[name].default = value


# Attention: which of torch's kernels computes it on a GPU. On a CPU torch chooses.

KERNELS = ("cudnn", "flash", "efficient", "math")
FAST_CUDNN = 91501  # cuDNN 9.15.1
# Before this version cuDNN's backward accessed illegal memory: github.com/pytorch/pytorch, pull request 171627.
SOUND_CUDA = (12, 9)


def attention_kernel(cfg: Config, device: torch.device) -> str:
    """The kernel that the net's attention uses on a device.

    compute.attention=auto is cuDNN's kernel on Hopper and datacenter Blackwell from cuDNN 9.15.1 and CUDA 12.9 on,
    where it is the fastest and where torch itself trusts it. Elsewhere, and on AMD, it is flash attention. Neither
    kernel takes fp32; fp32 takes plain products.
    """
    if device.type == "cpu":
        return "chosen by torch"
    if cfg.compute.attention != "auto":
        return cfg.compute.attention
    if cfg.compute.dtype == "fp32":
        return "math"
    major, _ = torch.cuda.get_device_capability(device)
    is_datacenter = torch.version.hip is None and major in (9, 10)  # on sm120 cuDNN was slower: transformers 48163
    is_sound = tuple(map(int, (torch.version.cuda or "0").split("."))) >= SOUND_CUDA
    is_fast = is_datacenter and is_sound and (torch.backends.cudnn.version() or 0) >= FAST_CUDNN
    # torch refuses cuDNN in deterministic mode. From torch 2.15 on it also refuses tokens % 128 == 64, whose gradients
    # may be NaN. Heads smaller than the benchmark's are left to flash attention, which is known to take them.
    tokens = cfg.model.text_tokens + cfg.model.image_tokens
    is_taken = cfg.model.head_dim >= 64 and tokens % 128 != 64 and not torch.are_deterministic_algorithms_enabled()
    return "cudnn" if is_fast and is_taken else "flash"


def allow_attention(cfg: Config, device: torch.device) -> None:
    """Let scaled_dot_product_attention use a config's kernel only, in the whole process from now on.

    So torch cannot take another one unnoticed. On a CPU it may use all kernels.
    """
    kernels = KERNELS if device.type == "cpu" else [attention_kernel(cfg, device)]
    switches = torch.backends.cuda  # for ROCm too
    switches.enable_cudnn_sdp("cudnn" in kernels)
    switches.enable_flash_sdp("flash" in kernels)
    switches.enable_mem_efficient_sdp("efficient" in kernels)
    switches.enable_math_sdp("math" in kernels)
