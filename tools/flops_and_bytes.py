"""How FSDP2 splits a net over ranks, what each rank sends in a step, and how much arithmetic a sample takes.

FSDP2 splits the first dimension of each parameter over the ranks of a replica, as torch.chunk does.
It gathers one unit at a time: a region of blocks, or the root with all parameters outside of blocks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import ceil, prod
from typing import cast

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from flux_ref import flow
from flux_ref.config import Config, ModelConfig, micro_batch, rank_batch
from flux_ref.dataloader import allocate
from flux_ref.model import Flux
from flux_ref.precision.policy import layers_gathered_in_fp8
from flux_ref.precision.recipe import DTYPES
from flux_ref.sharding import Region, freed_regions, regions

ROOT = "ends"


@dataclass
class Unit:
    """What FSDP2 gathers at once. Sizes are numbers of parameters."""

    kind: str  # "double 2" for a region of two double blocks, ROOT for the root
    whole: int = 0
    padded: int = 0  # whole, and the padding that makes all shards equal
    gathered: int = 0  # bytes of `padded`


@dataclass(frozen=True)
class FsdpLayout:
    """The units of a net over all ranks: regions in the order of forward, then the root; how a step uses them."""

    units: list[Unit]
    shards: int  # ranks that hold one copy together
    replicas: int  # copies
    freed: int  # of the first units; they are gathered again for backward
    item: int  # bytes of a weight in compute.dtype
    reduced: int  # bytes of a gradient in parallel.reduce_dtype
    rows: int  # of a micro-batch
    micros: int  # micro-batches of a rank's step

    def sharded(self, *units: Unit) -> int:
        """The parameters of a rank's shards, with padding."""
        return sum(unit.padded for unit in units) // self.shards

    @property
    def parameters(self) -> int:
        return sum(unit.whole for unit in self.units)


def fsdp_layout(cfg: Config, ranks: int, replicas: int) -> FsdpLayout:
    """How a net is split over ranks that hold so many replicas."""
    shards = ranks // replicas
    item = DTYPES[cfg.compute.dtype].itemsize
    with torch.device("meta"):
        net = Flux(cfg.model)
    codes = {net.get_parameter(f"{layer}.weight") for layer in layers_gathered_in_fp8(cfg)}
    units = []
    for kind, module in split(net, cfg):
        unit = Unit(kind)
        for parameter in module.parameters():
            padded = shards * ceil(len(parameter) / shards) * prod(parameter.shape[1:])
            unit.whole += parameter.numel()
            unit.padded += padded
            unit.gathered += padded * (1 if parameter in codes else item)
        units.append(unit)
    rows = micro_batch(cfg, ranks)
    return FsdpLayout(
        units,
        shards,
        replicas,
        freed_regions(cfg.parallel, len(units) - 1),
        item,
        DTYPES[cfg.parallel.reduce_dtype].itemsize,
        rows,
        ceil(rank_batch(cfg, ranks) / rows),
    )


def split(net: Flux, cfg: Config) -> Iterator[tuple[str, nn.Module]]:
    """The units of a net and their kinds: its regions in the order of forward, then the net, which loses its blocks."""
    for kind, blocks in (("double", net.double_blocks), ("single", net.single_blocks)):
        for region in cast(Iterable[Region], regions(blocks, cfg)):
            yield f"{kind} {len(region.blocks)}", region
    net.double_blocks = nn.ModuleList()
    net.single_blocks = nn.ModuleList()
    yield ROOT, net


def sent(layout: FsdpLayout) -> dict[str, float]:
    """Bytes that one rank sends in an optimizer step, by collective, in rings."""
    units = layout.units
    again = (2 * layout.micros - 1) * units[: layout.freed]
    reduced = layout.reduced * layout.sharded(*units)
    return {
        "all_gather": sum(unit.gathered for unit in units + again) * (layout.shards - 1) / layout.shards,
        "reduce_scatter": layout.micros * reduced * (layout.shards - 1),
        "all_reduce": 2 * reduced * (layout.replicas - 1) / layout.replicas,
    }


@cache
def per_sample(model: ModelConfig) -> int:
    """Operations of one training sample, forward and backward, as torch counts them; recomputation does not count.

    20.41e12 for schnell at the benchmark's shape.
    """
    meta = torch.device("meta")
    with meta:
        net = Flux(model)
        net.rope = net.make_rope()
    with FlopCounterMode(display=False) as counted:
        flow.losses(net, allocate(model, 1, meta), torch.float32).sum().backward()
    return counted.get_total_flops()
