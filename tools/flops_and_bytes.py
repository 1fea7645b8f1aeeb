"""How FSDP2 splits a net over ranks, and what each rank sends in a step: closed forms.

FSDP2 splits the first dimension of each parameter over the ranks of a replica, as torch.chunk does.
It gathers one unit at a time: a region of blocks, or the root with all parameters outside of blocks.
"""

import re
from collections import Counter
from dataclasses import dataclass
from math import ceil, prod
from typing import NamedTuple

from flux_ref.config import Config, ModelConfig
from flux_ref.model import parameter_table
from flux_ref.precision import policy
from flux_ref.precision.policy import layers
from flux_ref.sharding import freed_regions

ITEM_BYTES = {"bf16": 2, "fp32": 4}  # of compute.dtype and parallel.reduce_dtype
ROOT = "ends"
BLOCK = re.compile(r"(double|single)_blocks\.(\d+)\.")


@dataclass
class Unit:
    """What FSDP2 gathers at once. Sizes are numbers of parameters."""

    kind: str  # "double 2" for a region of two double blocks, ROOT for the root
    whole: int = 0
    padded: int = 0  # whole, and the padding that makes all shards equal
    gathered: int = 0  # bytes of `padded`


@dataclass(frozen=True)
class FsdpLayout:
    """The units of a net over all ranks: regions in the order of forward, then the root."""

    units: list[Unit]
    shards: int  # ranks that hold one copy together
    replicas: int  # copies

    def sharded(self, *units: Unit) -> int:
        """The parameters of a rank's shards, with padding."""
        return sum(unit.padded for unit in units) // self.shards

    @property
    def parameters(self) -> int:
        return sum(unit.whole for unit in self.units)


def fsdp_layout(cfg: Config, ranks: int, replicas: int) -> FsdpLayout:
    """How a net is split over ranks that hold so many replicas."""
    shards = ranks // replicas
    lengths = region_lengths(cfg)
    regions = {(kind, i): Unit(f"{kind} {length}") for kind in lengths for i, length in enumerate(lengths[kind])}
    root = Unit(ROOT)
    in_fp8 = policy.layers_gathered_in_fp8(cfg)
    for name, shape in parameter_table(cfg.model).items():
        block = BLOCK.match(name)
        unit = regions[block[1], int(block[2]) // cfg.parallel.region_blocks] if block else root
        padded = shards * ceil(shape[0] / shards) * prod(shape[1:])
        is_code = name.endswith(".weight") and name.removesuffix(".weight") in in_fp8
        unit.whole += prod(shape)
        unit.padded += padded
        unit.gathered += padded * (1 if is_code else ITEM_BYTES[cfg.compute.dtype])
    return FsdpLayout([*regions.values(), root], shards, replicas)


def region_lengths(cfg: Config) -> dict[str, list[int]]:
    """{"double", "single": number of blocks in each region, in the order of forward}."""
    most = cfg.parallel.region_blocks
    counts = {"double": cfg.model.double_blocks, "single": cfg.model.single_blocks}
    return {kind: [min(most, count - first) for first in range(0, count, most)] for kind, count in counts.items()}


def sent(cfg: Config, layout: FsdpLayout, micros: int = 1) -> dict[str, float]:
    """Bytes that one rank sends in an optimizer step of so many micro-batches, by collective, in rings."""
    reduced = ITEM_BYTES[cfg.parallel.reduce_dtype]
    n = layout.shards
    r = layout.replicas
    again = layout.units[: freed_regions(cfg.parallel, len(layout.units) - 1)]
    return {
        "all_gather": sum(unit.gathered for unit in (*layout.units, *(2 * micros - 1) * again)) * (n - 1) / n,
        "reduce_scatter": micros * reduced * layout.sharded(*layout.units) * (n - 1),
        "all_reduce": 2 * reduced * layout.sharded(*layout.units) * (r - 1) / r,
    }


FIRST = ("img_in", "txt_in", "time_in.in_layer", "vector_in.in_layer")  # their inputs need no gradient


class Op(NamedTuple):
    """An operation at one place of the net. forward, backward: operations per sample of one occurrence."""

    name: str  # of the module, with * for the number of a block
    times: int  # in the net
    rows: int  # per sample: tokens, or 1
    forward: int
    backward: int


def operations(model: ModelConfig) -> list[Op]:
    """Every operation of the net: the linears, then attention.

    Backward of a linear makes the gradients of its input and weight. Backward of attention counts twice: computing the
    scores again does not count.
    """
    tokens = model.image_tokens + model.text_tokens
    rows = {"img_in": model.image_tokens, "txt_in": model.text_tokens, "final_layer.linear": model.image_tokens}
    rows |= {name: layer.tokens for name, layer in layers(model).items()}
    counts: Counter[tuple[str, int, int]] = Counter()
    for name, shape in parameter_table(model).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight":
            counts[re.sub(r"\.\d+\.", ".*.", module), rows.get(module, 1), prod(shape)] += 1
    found = []
    for (module, seen, size), times in counts.items():
        once = 2 * seen * size
        found.append(Op(module, times, seen, once, once if module in FIRST else 2 * once))
    scores_and_values = 4 * tokens * tokens * model.hidden
    for part, times in (("double_blocks", model.double_blocks), ("single_blocks", model.single_blocks)):
        found.append(Op(f"{part}.*.attention", times, tokens, scores_and_values, 2 * scores_and_values))
    return found


def per_sample(model: ModelConfig) -> int:
    """Operations of one training sample, forward and backward; recomputation does not count.

    20.41e12 for schnell at the benchmark's shape.
    """
    return sum(op.times * (op.forward + op.backward) for op in operations(model))
