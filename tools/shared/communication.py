"""How FSDP2 splits a net over ranks, and what each rank sends in a step: closed forms.

FSDP2 splits the first dimension of each parameter over the ranks of a replica, as torch.chunk does.
It gathers one unit at a time: a region of blocks, or the root with all parameters outside of blocks.
"""

import re
from dataclasses import dataclass
from math import ceil, prod

from flux_ref.config import Config, ParallelConfig
from flux_ref.precision import policy

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
    gathered: int  # bytes of `padded`


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
    held: dict[tuple[str, int], dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        block = BLOCK.match(name)
        place = (block[1], int(block[2]) // cfg.parallel.region_blocks) if block else (ROOT, 0)
        held.setdefault(place, {})[name] = shape
    units = [
        _unit(cfg, f"{kind} {length}", held[kind, i], shards)
        for kind, lengths in region_lengths(cfg).items()
        for i, length in enumerate(lengths)
    ]
    return Layout((*units, _unit(cfg, ROOT, held[ROOT, 0], shards)), shards, replicas)


def region_lengths(cfg: Config) -> dict[str, list[int]]:
    """{"double", "single": number of blocks in each region, in the order of forward}."""
    most = cfg.parallel.region_blocks
    model = cfg.model
    counts = {"double": model.double_blocks, "single": model.single_blocks}
    return {kind: [min(most, count - first) for first in range(0, count, most)] for kind, count in counts.items()}


def gathered_bytes(cfg: Config, name: str) -> int:
    """Bytes of a parameter's element in a gather. name: Black Forest Labs'."""
    module, _, leaf = name.rpartition(".")
    return 1 if leaf == "weight" and module in policy.layers_gathered_in_fp8(cfg) else ITEM_BYTES[cfg.parallel.dtype]


def freed(cfg: ParallelConfig, regions: int) -> int:
    """How many of the first regions FSDP2 frees after forward and gathers again for backward."""
    return max(0, regions - cfg.kept_regions) if cfg.kept_regions >= 0 else 0


def _unit(cfg: Config, kind: str, shapes: dict[str, tuple[int, ...]], shards: int) -> Unit:
    rows = {name: ceil(shape[0] / shards) for name, shape in shapes.items()}
    padded = {name: shards * rows[name] * prod(shape[1:]) for name, shape in shapes.items()}
    return Unit(
        kind=kind,
        whole=sum(map(prod, shapes.values())),
        padded=sum(padded.values()),
        shard=sum(min(rows[name], shape[0]) * prod(shape[1:]) for name, shape in shapes.items()),
        gathered=sum(count * gathered_bytes(cfg, name) for name, count in padded.items()),
    )


def sent(cfg: Config, layout: Layout, micros: int) -> dict[str, float]:
    """Bytes that one rank sends in an optimizer step of so many micro-batches, by collective, in rings.

    scalars: all ranks sum the gradient norm. With delayed FP8 they also agree on two magnitudes per linear. Before each
    forward the ranks of a replica agree on the magnitudes of the weights that are gathered in FP8.
    """
    reduced = ITEM_BYTES[cfg.parallel.reduce_dtype]
    n = layout.shards
    r = layout.replicas
    whole = sum(unit.padded for unit in layout.units)
    again = layout.units[: freed(cfg.parallel, len(layout.units) - 1)]
    of_all = 1 + 2 * len(policy.layers_with_delayed_scales(cfg))
    of_weights = micros * len(policy.layers_gathered_in_fp8(cfg))
    return {
        "all_gather": micros * sum(unit.gathered for unit in (*layout.units, *again)) * (n - 1) / n,
        "reduce_scatter": micros * reduced * whole * (n - 1) / n,
        "all_reduce": 2 * reduced * whole / n * (r - 1) / r,
        "scalars": 2 * 4 * (of_all * (n * r - 1) / (n * r) + of_weights * (n - 1) / n),
    }
