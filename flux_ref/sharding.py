"""How the net is split over the ranks: regions, FSDP2 units, shards and their initial values.

A port replaces this file. Parameters keep Black Forest Labs' names whatever the regions are (`named_parameters`).
"""

import re
import warnings

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from flux_ref import rng
from flux_ref.config import DTYPE_NAMES, Config, micro_batch
from flux_ref.model import Flux, initialiser
from flux_ref.ranks import World
from flux_ref.speed import fp8_product, linear, regions
from flux_ref.speed.attention import allow_attention_of
from flux_ref.speed.fp8_gather import install_fp8_gather

DTYPES = {name: getattr(torch, known) for name, known in DTYPE_NAMES.items()}


def named_parameters(net: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by Black Forest Labs' names, whatever the regions of the net."""
    inside = re.compile(r"^((?:double|single)_blocks)\.(\d+)\.blocks\.(\d+)")

    def block_name(match: re.Match) -> str:
        kind, region, block = match.groups()
        return f"{kind}.{int(region) * len(getattr(net, kind)[0].blocks) + int(block)}"

    return {inside.sub(block_name, name): parameter for name, parameter in net.named_parameters()}


def build(cfg: Config, world: World, seed: int | None) -> Flux:
    """The sharded net of a config. seed: of its initial weights; None leaves the weights undefined."""
    allow_attention_of(cfg, world.device)
    with torch.device("meta"):
        net = Flux(cfg.model)
        linear.convert(net, cfg, fp8_product.architecture(world.device), micro_batch(cfg, world.size))
    net = shard(net, cfg, world)
    materialise(net, world, seed)
    install_fp8_gather(net, cfg)
    return net


def shard(net: Flux, cfg: Config, world: World) -> Flux:
    """Group the blocks of a net on the meta device into regions, then shard the net. The order of the lines matters.

    The ranks of a replica gather weights and reduce the gradients of each micro-batch.
    Replicas average their gradient shards once per step, with the last micro-batch (step.train_step).
    numerics: master weights stay fp32. Units are gathered in parallel.dtype; gradients are reduced in
    parallel.reduce_dtype.
    """
    parallel = cfg.parallel
    net.double_blocks = regions.regions(net.double_blocks, parallel)
    net.single_blocks = regions.regions(net.single_blocks, parallel)
    units = [*net.double_blocks, *net.single_blocks]
    mixed_precision = MixedPrecisionPolicy(
        param_dtype=DTYPES[parallel.dtype],
        reduce_dtype=DTYPES[parallel.reduce_dtype],
        cast_forward_inputs=False,  # numerics: would turn t and RoPE into bf16
    )
    if parallel.compile:
        regions.compile_all(units, cfg, world.device)
    freed = len(units) - parallel.kept_regions if parallel.kept_regions >= 0 else 0
    for i, unit in enumerate(units):
        fully_shard(unit, mesh=world.mesh, mp_policy=mixed_precision, reshard_after_forward=i < freed)
    fully_shard(net, mesh=world.mesh, mp_policy=mixed_precision)
    # torch 2.14 and later warn that an in-place operation on a result would be lost. The objective has none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    regions.overlap(net)
    return net


def materialise(net: Flux, world: World, seed: int | None) -> None:
    """Allocate the shards. With a seed, fill each shard with its part of the initial weights.

    Element e of a parameter is a function of (seed, name, e). So every world size starts from the same values, and no
    rank draws more than it keeps.
    """
    net.to_empty(device=world.device)
    net.rope = net.make_rope().to(world.device)
    if seed is None:
        return
    with torch.no_grad():
        for name, parameter in named_parameters(net).items():
            start, local = local_rows(parameter)
            kind, width = initialiser(name, parameter.shape)
            if kind in ("zeros", "ones"):
                local.fill_(kind == "ones")
            else:
                _fill_random(local.view(-1), start * local[:1].numel(), name, kind, width, seed)


def fill_for_warm_up(net: Flux) -> None:
    """Small random weights, for a warm-up before a checkpoint is loaded. They are the same on no two ranks."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.to_local().normal_(std=0.02)


def local_rows(parameter: nn.Parameter) -> tuple[int, Tensor]:
    """This rank's rows of a parameter, as (number of the first row, rows). FSDP2 splits axis 0 like torch.chunk."""
    assert isinstance(parameter, DTensor), "sharded parameters only"
    mesh = parameter.device_mesh
    chunk = -(-parameter.shape[0] // mesh.size(-1))
    return min(mesh.get_local_rank(mesh.ndim - 1) * chunk, parameter.shape[0]), parameter.to_local()


def _fill_random(flat: Tensor, start: int, name: str, kind: str, width: float, seed: int) -> None:
    """Elements start, start + 1, ... of a parameter's random values, drawn in pieces that fit a processor's cache."""
    piece = 1 << 16
    for begin in range(0, flat.numel(), piece):
        count = min(piece, flat.numel() - begin)
        lead = (start + begin) % 4  # words come in blocks of four
        drawn = lead + count + (lead + count) % 2  # normal numbers take words in pairs
        words = rng.words(seed, rng.INIT, drawn, sample=rng.name_key(name), start=start + begin - lead)
        values = rng.normal(words) * width if kind == "normal" else (rng.uniform(words) * 2 - 1) * width
        flat[begin : begin + count] = torch.from_numpy(values[lead : lead + count].astype(np.float32)).to(flat.device)


def reshard(net: nn.Module) -> None:
    """Free all gathered weights. After a forward without backward, the next forward would use old weights."""
    for module in net.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
