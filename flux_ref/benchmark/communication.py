"""How FSDP2 splits a net over ranks, and what each rank sends in a step: closed forms.

FSDP2 splits the first dimension of each parameter over the ranks of a replica, as torch.chunk does.
It gathers one unit at a time: a region of blocks, or the root with all parameters outside of blocks.
"""

import re
from dataclasses import dataclass
from math import ceil, prod

from flux_ref.config import Config

ITEM_BYTES = {"bf16": 2, "fp32": 4}  # of parallel.dtype and parallel.reduce_dtype
ROOT = "ends"
BLOCK = re.compile(r"(double|single)_blocks\.(\d+)\.")


@dataclass(frozen=True)
class Unit:
    """What FSDP2 gathers at once. Sizes are numbers of parameters."""

    kind: str  # "double 2" for a region of two double blocks, ROOT for the root
    whole: int
    padded: int  # whole, and the padding that makes all shards equal
    shard: int  # on rank 0, which holds the most


@dataclass(frozen=True)
class Layout:
    """The units of a net over all ranks: regions in the order of forward, then the root."""

    units: tuple[Unit, ...]
    shards: int  # ranks that hold one copy together
    replicas: int  # copies

    @property
    def parameters(self) -> int:
        return sum(unit.whole for unit in self.units)


def layout(cfg: Config, shapes: dict[str, tuple[int, ...]], ranks: int, replicas: int) -> Layout:
    """How a net is split over ranks that hold so many replicas. shapes: of all parameters (model.parameter_table)."""
    shards = ranks // replicas
    held: dict[tuple[str, int], list[tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        block = BLOCK.match(name)
        place = (block[1], int(block[2]) // cfg.parallel.region_blocks) if block else (ROOT, 0)
        held.setdefault(place, []).append(shape)
    units = [
        _unit(f"{kind} {length}", held[kind, i], shards)
        for kind, lengths in region_lengths(cfg).items()
        for i, length in enumerate(lengths)
    ]
    return Layout((*units, _unit(ROOT, held[ROOT, 0], shards)), shards, replicas)


def region_lengths(cfg: Config) -> dict[str, list[int]]:
    """{"double", "single": number of blocks in each region, in the order of forward}."""
    most, model = cfg.parallel.region_blocks, cfg.model
    counts = {"double": model.double_blocks, "single": model.single_blocks}
    return {kind: [min(most, count - first) for first in range(0, count, most)] for kind, count in counts.items()}


def _unit(kind: str, shapes: list[tuple[int, ...]], shards: int) -> Unit:
    rows = [ceil(shape[0] / shards) for shape in shapes]
    widths = [prod(shape[1:]) for shape in shapes]
    return Unit(
        kind=kind,
        whole=sum(map(prod, shapes)),
        padded=sum(shards * count * width for count, width in zip(rows, widths)),
        shard=sum(min(count, shape[0]) * width for count, shape, width in zip(rows, shapes, widths)),
    )


def sent(cfg: Config, layout: Layout, micros: int) -> dict[str, float]:
    """Bytes that one rank sends in an optimizer step of so many micro-batches, by collective, in rings.

    scalars: all ranks sum the gradient norm. With delayed FP8 they also agree on two magnitudes per linear.
    """
    gathered, reduced = ITEM_BYTES[cfg.parallel.dtype], ITEM_BYTES[cfg.parallel.reduce_dtype]
    passes = 2 if cfg.parallel.reshard_after_forward else 1
    n, r = layout.shards, layout.replicas
    linears = 8 * cfg.model.double_blocks + 2 * cfg.model.single_blocks  # in FP8
    scalars = 1 + (2 * linears if cfg.fp8.recipe == "delayed" else 0)
    whole, root = sum(unit.padded for unit in layout.units), layout.units[-1].padded
    return {
        "all_gather": micros * gathered * (passes * (whole - root) + root) * (n - 1) / n,
        "reduce_scatter": micros * reduced * whole * (n - 1) / n,
        "all_reduce": 2 * reduced * whole / n * (r - 1) / r,
        "scalars": 2 * 4 * scalars * (n * r - 1) / (n * r),
    }
