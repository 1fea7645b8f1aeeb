"""How long a step takes on given cards and links: arithmetic, memory traffic, and communication beside them.

A product takes the longer of two times: its operations at a share of the card's peak, and its bytes at a share of the
memory's bandwidth. Everything else takes its bytes. Three lanes run at the same time and wait for each other as in
FSDP2: compute; all-gathers and reduce-scatters; all-reduces of replicas. Not modelled: lanes that slow each other down,
launches, and ranks that wait for a slow rank.
"""

from dataclasses import dataclass
from math import ceil, log2

from flux_ref.config import Config, OptimConfig
from flux_ref.optim import bytes_per_parameter
from flux_ref.sharding import REDUCTIONS
from tools.plan.footprint import Footprint, Work
from tools.shared.communication import ITEM_BYTES, Layout, Unit, freed, sent
from tools.shared.hardware import Assumed, Gpu

MICRO = 1e-6


@dataclass(frozen=True)
class Times:
    """Times of one optimizer step, and what a rank sends in it."""

    step: float
    compute: float  # forward, backward and the optimizer, if nothing waited for communication
    optimizer: float
    all_gather: float
    reduce_scatter: float
    all_reduce: float
    sent: dict[str, float]  # by all_gather, reduce_scatter, all_reduce, scalars

    @property
    def exposed(self) -> float:
        """The part of the step in which compute waits for communication."""
        return max(0.0, self.step - self.compute)  # rounding would give -0


@dataclass(frozen=True)
class Machine:
    """Some cards of one kind."""

    gpu: Gpu
    assumed: Assumed
    gpus: int

    def seconds(self, work: Work) -> float:
        """Of one pass of a region."""
        spent = self.moving(work.moved)
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
        if (ranks - 1) * stride < gpu.domain:
            speed = gpu.scale_up_gb_s
        else:
            speed = min(gpu.scale_up_gb_s, max(1, gpu.domain // stride) * gpu.scale_out_gb_s)
        share = self.assumed.link_share * 1e9
        hops = ceil(log2(ranks)) if tree else ranks - 1
        return moved * (ranks - 1) / ranks / (share * speed) + hops * self.assumed.hop_us * MICRO


def optimizer_bytes(cfg: OptimConfig) -> int:
    """Bytes that the optimizer moves per weight: it reads and writes the weight and its moments.

    It reads the gradient, as the norm does. An average of the weights reads the weight once more.
    """
    return 2 * bytes_per_parameter(cfg) + 4 * (3 if cfg.ema else 2)


def step(cfg: Config, layout: Layout, footprints: dict[str, Footprint], machine: Machine, rows: int) -> Times:
    """One optimizer step with micro-batches of so many rows."""
    micros = ceil(cfg.train.global_batch / (machine.gpus * rows))
    pace = _Pace(cfg, layout, footprints, machine)
    for micro in range(micros):
        pace.micro_batch(last=micro == micros - 1)
    optimizer = machine.moving(optimizer_bytes(cfg.optim) * sum(unit.shard for unit in layout.units))
    optimizer += 2 * machine.ring(0, machine.gpus, tree=True)  # the gradient norm, a sum over all
    passes = 0.0
    for i, unit in enumerate(layout.units):
        passes += micros * (pace.forward(unit) + pace.backward(i))
    return Times(
        step=max(pace.free.values()) + optimizer,
        compute=passes + optimizer,
        optimizer=optimizer,
        all_gather=micros * sum(map(pace.gather, (*layout.units, *layout.units[: pace.freed]))),
        reduce_scatter=micros * sum(map(pace.scatter, layout.units)),
        all_reduce=sum(map(pace.sum_replicas, layout.units)),
        sent=sent(cfg, layout, micros),
    )


class _Pace:
    """Seconds of the parts of a step. free: the moments at which compute and each kind of collective are next free."""

    def __init__(self, cfg: Config, layout: Layout, footprints: dict[str, Footprint], machine: Machine):
        self.layout = layout
        self.machine = machine
        self.item = ITEM_BYTES[cfg.parallel.dtype]
        self.reduced = ITEM_BYTES[cfg.parallel.reduce_dtype]
        self.freed = freed(cfg.parallel, len(layout.units) - 1)  # regions that are gathered again for backward
        self.free = {"compute": 0.0, "all_gather": 0.0, "all_reduce": 0.0}
        self.computing = {
            kind: (machine.seconds(region.forward_work), machine.seconds(region.backward_work))
            for kind, region in footprints.items()
        }

    def forward(self, unit: Unit) -> float:
        """With the copy of its gathered weights to where layers find them."""
        return self.computing[unit.kind][0] + self.machine.moving(2 * unit.gathered)

    def backward(self, i: int) -> float:
        """With the copy of a unit's gradients to where they are reduced, and of its weights if gathered again."""
        unit = self.layout.units[i]
        moved = (self.item + self.reduced) * unit.padded
        if i < self.freed:
            moved += 2 * unit.gathered
        return self.computing[unit.kind][1] + self.machine.moving(moved)

    def gather(self, unit: Unit) -> float:
        return self.machine.ring(unit.gathered, self.layout.shards)

    def scatter(self, unit: Unit) -> float:
        return self.machine.ring(self.reduced * unit.padded, self.layout.shards)

    def sum_replicas(self, unit: Unit) -> float:
        shards = self.layout.shards
        return 2 * self.machine.ring(self.reduced * unit.padded / shards, self.layout.replicas, shards, tree=True)

    def put(self, lane: str, seconds: float, after: float = 0.0) -> float:
        """Begin when the lane is free and `after` has passed; returns the end."""
        self.free[lane] = max(self.free[lane], after) + seconds
        return self.free[lane]

    def micro_batch(self, last: bool) -> None:
        """Forward and backward; replicas are summed with the last micro-batch only.

        The next region is gathered while one computes. Gathers and reductions share a communicator.
        Backward may be ahead of the reductions by REDUCTIONS regions.
        """
        *regions, root = self.layout.units
        begun = self.put("compute", self.forward(root), self.put("all_gather", self.gather(root)))
        for unit in regions:
            ready = self.put("all_gather", self.gather(unit), begun)
            begun = max(self.free["compute"], ready)
            self.put("compute", self.forward(unit), ready)
        begun = self.free["compute"]
        self.put("compute", self.backward(len(regions)))
        ready = self.put("all_gather", self.gather(regions[-1]), begun) if self.freed == len(regions) else 0.0
        ends: list[float] = []  # of reductions
        for i in reversed(range(len(regions))):
            begun = max(self.free["compute"], ready)
            if len(ends) > REDUCTIONS:
                begun = max(begun, ends[-1 - REDUCTIONS])
            if 0 < i <= self.freed:
                ready = self.put("all_gather", self.gather(regions[i - 1]), begun)
            ends.append(self._reduce(regions[i], self.put("compute", self.backward(i), begun), last))
        self._reduce(root, self.free["compute"], last)
        self.free["all_gather"] = max(self.free["all_gather"], self.free["compute"])  # none before the next forward

    def _reduce(self, unit: Unit, after: float, last: bool) -> float:
        """Returns when the gradients of a unit are reduced inside a replica."""
        end = self.put("all_gather", self.scatter(unit), after)
        if last:
            self.put("all_reduce", self.sum_replicas(unit), end)
        return end


def evaluation(
    cfg: Config, layout: Layout, footprints: dict[str, Footprint], machine: Machine, rows: int, samples: int
) -> float:
    """Seconds of the validation of so many samples; rows: those of the footprints."""
    batches = ceil(samples / (machine.gpus * cfg.eval.batch))
    pace = _Pace(cfg, layout, footprints, machine)
    compute = sum(pace.computing[unit.kind][0] for unit in layout.units) * cfg.eval.batch / rows
    again = sum(map(pace.gather, layout.units[: pace.freed]))
    once = sum(map(pace.gather, layout.units[pace.freed :]))
    return batches * max(compute, again) + once
