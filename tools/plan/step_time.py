"""How long a step takes on given cards and links: one roofline, and links beside it.

A product takes the longer of two times: its operations at a share of the card's peak, and its bytes at a share of the
memory's bandwidth. Everything else takes its bytes. Links work while the card computes, so the longer of both counts.
Not modelled: links that slow the card down, launches, and ranks that wait for a slow rank.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log2
from pathlib import Path

from flux_ref.cli import Refusal
from flux_ref.config import Config
from tools.figures import read_json
from tools.flops_and_bytes import FsdpLayout
from tools.plan.memory import checkpoint_bytes
from tools.plan.region_costs import Footprints, Pass

TABLE = Path(__file__).with_name("hardware.toml")
SPREAD = 0.1  # of a step whose rates were measured: kernels of other shapes, overlap; assumed


@dataclass(frozen=True)
class Gpu:
    """One kind of card and its links; hardware.toml explains the figures."""

    arch: str
    memory_gb: float
    memory_tb_s: float
    bf16_tflops: float
    fp8_tflops: float
    node: int
    domain: int
    scale_up_gb_s: float
    scale_out_gb_s: float


@dataclass(frozen=True)
class Assumed:
    """Figures that no datasheet gives: the first four of an architecture and a precision, the others of all."""

    gemm_share: float  # of the peak arithmetic
    memory_share: float  # of the memory's bandwidth
    range: float  # times may be off by a factor of 1 + range
    source: str
    link_share: float  # of a link's bandwidth
    hop_us: float
    margin: float
    outside_gb: float
    graph_node_kb: float
    host_ms_per_region: float
    host_us_per_kernel: float


@cache
def load(name: str, precision: str = "bf16") -> tuple[Gpu, Assumed]:
    """A card of the table, and what is assumed of it in a precision: bf16 or fp8. Raises: Refusal."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    gpus = table["gpu"]
    if name not in gpus:
        raise Refusal(f"unknown GPU {name}; known are {', '.join(gpus)}")
    gpu = Gpu(**gpus[name])
    if precision == "fp8" and not gpu.fp8_tflops:
        raise Refusal(f"FP8 needs FP8 matrix units, {name} has none; set precision.preset=bf16")
    return gpu, Assumed(**table["share"][f"{gpu.arch}_{precision}"], **table["assumed"])


def measured(path: Path, gpus: int) -> tuple[Gpu, Assumed]:
    """The card of a file by `tools.preflight --json`, and what is still assumed. gpus: of the plan. Raises: Refusal."""
    try:
        gpu = Gpu(**read_json(path))
    except TypeError as error:
        raise Refusal(f"{path}: {error}; write it with tools.preflight --json") from None
    if (gpus > 1 and not gpu.scale_up_gb_s) or (gpus > gpu.node and not gpu.scale_out_gb_s):
        raise Refusal(f"{path} has no rate of the links that {gpus} GPUs use; run tools.preflight on more of them")
    return gpu, replace(
        load("h200")[1],  # what of it remains is of all cards
        gemm_share=1.0,
        memory_share=1.0,
        link_share=1.0,
        range=SPREAD,
        source=f"measured, {path}",
    )


@dataclass(frozen=True)
class Times:
    """Seconds of one optimizer step."""

    step: float
    compute: float  # forward, backward and the optimizer, if nothing waited for links
    optimizer: float
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    validation: float  # of a batch


@dataclass(frozen=True)
class Machine:
    """Some cards of one kind."""

    gpu: Gpu
    assumed: Assumed
    gpus: int

    def seconds(self, work: Pass) -> float:
        return self.multiplying(work) + self.moving(work.moved)

    def multiplying(self, work: Pass) -> float:
        """Seconds of the products alone."""
        spent = 0.0
        for product in work.products:
            peak = self.gpu.fp8_tflops if product.is_fp8 else self.gpu.bf16_tflops
            spent += max(product.flop / (self.assumed.gemm_share * peak * 1e12), self.moving(product.moved))
        return spent

    def moving(self, moved: float) -> float:
        """Seconds to read and write so many bytes."""
        return moved / (self.assumed.memory_share * self.gpu.memory_tb_s * 1e12)

    def ring(self, moved: float, ranks: int, stride: int = 1, tree: bool = False) -> float:
        """Seconds of an all-gather or a reduce-scatter of so many bytes in all over ranks that are stride apart.

        A domain is a group of cards with fast links, such as a node. A ring of neighbours leaves each domain once, and
        has the adapters of all its ranks for this. In a ring of ranks that are a domain apart, each rank has its own
        adapter. tree: half of an all-reduce by a tree, which takes log2(ranks) hops instead of ranks - 1.
        """
        if ranks == 1:
            return 0.0
        gpu = self.gpu
        speed = gpu.scale_up_gb_s
        if (ranks - 1) * stride >= gpu.domain:
            speed = min(speed, max(1, gpu.domain // stride) * gpu.scale_out_gb_s)
        share = self.assumed.link_share * 1e9
        hops = ceil(log2(ranks)) if tree else ranks - 1
        return moved * (ranks - 1) / ranks / (share * speed) + hops * self.assumed.hop_us * 1e-6


def times(cfg: Config, layout: FsdpLayout, footprints: Footprints, machine: Machine) -> Times:
    """One optimizer step.

    Forward waits for two gathers, of the root and the first region. Micro-batches after the first gather again only
    what is freed. Behind backward the gradients of the root and the first region are still reduced. The last
    micro-batch also sums each unit over the replicas, one after another.
    """
    units = layout.units
    reduced = layout.reduced
    gathers = [machine.ring(unit.gathered, layout.shards) for unit in units]
    again = gathers[: layout.freed]  # a second time, for backward, and so on
    scatters = [machine.ring(reduced * unit.padded, layout.shards) for unit in units]
    sums = [
        2 * machine.ring(reduced * layout.sharded(unit), layout.replicas, layout.shards, tree=True) for unit in units
    ]
    # FSDP2 copies gathered weights to where layers find them, and gradients to where they are reduced.
    copies = [machine.moving(2 * unit.gathered) for unit in units]
    evaluated = sum(machine.seconds(footprints[unit.kind].forward) for unit in units)
    first_forward = evaluated + sum(copies)
    later_forward = evaluated + sum(copies[: layout.freed])
    backwards = [
        machine.seconds(footprints[unit.kind].backward)
        + machine.moving((layout.item + reduced) * unit.padded + 2 * unit.gathered * (i < layout.freed))
        for i, unit in enumerate(units)
    ]
    backward = sum(backwards)

    # The optimizer reads and writes weights and moments. It reads the gradient, as the norm does; clipping reads and
    # writes it. An average of the weights reads the weight once more. The norm is summed over all ranks.
    per_weight = 2 * checkpoint_bytes(cfg) + 4 * (5 if cfg.optim.ema_half_life else 4)
    optimizer = machine.moving(per_weight * layout.sharded(*units)) + 2 * machine.ring(0, machine.gpus, tree=True)

    later = layout.micros - 1  # micro-batches
    forwards = max(gathers[-1] + gathers[0] + first_forward, sum(gathers))
    forwards += later * max(sum(again[:1]) + later_forward, sum(again))
    reduced_last = backward + scatters[0] + scatters[-1]
    one_backward = max(reduced_last, sum(again) + sum(scatters))
    summed = 0.0
    done = backwards[-1]
    for i in reversed(range(len(units) - 1)):
        done += backwards[i]
        summed = max(summed, done + scatters[i]) + sums[i]
    last_backward = max(one_backward, max(summed, reduced_last) + sums[-1])
    return Times(
        step=forwards + later * one_backward + last_backward + optimizer,
        compute=first_forward + later * later_forward + layout.micros * backward + optimizer,
        optimizer=optimizer,
        all_gather=sum(gathers) + (2 * later + 1) * sum(again),
        reduce_scatter=layout.micros * sum(scatters),
        all_reduce=sum(sums),
        validation=max(evaluated * cfg.eval.batch / layout.rows, sum(again)),
    )
