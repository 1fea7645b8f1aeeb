"""Device memory of one rank through a training step, by part: what FSDP2, autograd and AdamW hold at each moment.

The units and their shards are those of the real net, sharded on the meta device over a fake process group; what the
regions keep and need comes from footprint.py. The largest moment is the one that a card must hold.
"""

from dataclasses import dataclass, replace
from math import ceil, prod

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from flux_ref import ranks, sharding
from flux_ref.config import Config
from flux_ref.data import fields
from flux_ref.model import Flux
from flux_ref.plan.footprint import Footprint, lengths
from flux_ref.sharding import DTYPES

MASTER = 4  # bytes of a weight, a moment and a gradient on shards
PARTS = ("weights", "moments", "gradients", "gathered weights", "activations", "working set", "buffers")


@dataclass(frozen=True)
class Unit:
    """What FSDP2 gathers at once: a region, or the root with all that no region holds. Numbers of parameters."""

    kind: str  # of its footprint, "ends" for the root
    whole: int
    padded: int  # whole, with the padding that makes all shards equal
    shard: int  # of rank 0, which has the most


@dataclass(frozen=True)
class Layout:
    """The units of a net over all ranks, in the order of forward, the root last."""

    units: tuple[Unit, ...]
    shards: int  # ranks that hold one copy together
    replicas: int

    @property
    def parameters(self) -> int:
        return sum(unit.whole for unit in self.units)


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment, in bytes by part."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def layout(cfg: Config, gpus: int, node: int) -> Layout:
    """How FSDP2 splits the net over so many ranks, node of them to a host; no memory is used.

    Raises: Refusal if parallel.replicate does not fit. Not while a process group is open.
    """
    assert ranks.is_apart(), "a process group is open"
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=gpus)
    try:
        device = torch.device("cpu")
        nodes = [str(rank // node) for rank in range(gpus)]
        mesh = ranks.make_mesh(device.type, gpus, ranks.replica_count(cfg.parallel.replicate, nodes))
        world = ranks.World(0, gpus, device, mesh, nodes)
        plain = replace(cfg.parallel, compile=False, activation_budget=1.0, separate_reduce_scatter=False)
        with torch.device("meta"):
            net = Flux(cfg.model)
        net = sharding.shard(net, plain, world)
        shards = mesh.size(-1)
        units = []
        for kind in ("double", "single"):
            for length, region in zip(lengths(cfg)[kind], getattr(net, f"{kind}_blocks")):
                units.append(_unit(f"{kind} {length}", region.parameters(), shards))
        inside = {id(p) for blocks in (net.double_blocks, net.single_blocks) for p in blocks.parameters()}
        units.append(_unit("ends", (p for p in net.parameters() if id(p) not in inside), shards))
        return Layout(tuple(units), shards, world.replicas)
    finally:
        ranks.stop()


def _unit(kind: str, parameters, shards: int) -> Unit:
    found = [(tuple(p.shape), p.to_local().numel()) for p in parameters]
    padded = sum(shards * ceil(shape[0] / shards) * prod(shape[1:]) for shape, _ in found)
    return Unit(kind, sum(prod(shape) for shape, _ in found), padded, sum(local for _, local in found))


def moments(cfg: Config, layout: Layout, footprints: dict[str, Footprint], gpus: int, rows: int) -> list[Moment]:
    """Everything worth looking at in a step and a validation batch, in order. rows: those of the footprints."""
    return _Step(cfg, layout, footprints, gpus, rows).run()


def fullest(found: list[Moment]) -> Moment:
    return max(found, key=lambda moment: moment.total)


class _Step:
    """One training step and one validation batch, region by region."""

    def __init__(self, cfg: Config, layout: Layout, footprints: dict[str, Footprint], gpus: int, rows: int):
        self.cfg, self.layout, self.footprints, self.rows = cfg, layout, footprints, rows
        *self.regions, self.root = layout.units
        self.gathered, self.reduced = DTYPES[cfg.parallel.dtype].itemsize, DTYPES[cfg.parallel.reduce_dtype].itemsize
        self.accumulates = gpus * rows < cfg.train.global_batch
        self.kept = not cfg.parallel.reshard_after_forward
        self.in_flight = 2 if cfg.parallel.separate_reduce_scatter else 1  # inputs of reductions, at most
        self.saved = [footprints[unit.kind].saved for unit in self.regions]
        self.ends = footprints["ends"].saved
        tokens = cfg.model.image_tokens + cfg.model.text_tokens
        self.stream = rows * tokens * cfg.model.hidden * self.gathered  # its gradient, between two regions
        self.found: list[Moment] = []
        sample = sum(prod(shape) * dtype.itemsize for shape, dtype in fields(cfg.model).values())
        self.always = dict.fromkeys(PARTS, 0.0) | {
            "weights": MASTER * self._shards(layout.units),
            "moments": 2 * MASTER * sum(unit.shard for unit in layout.units),
            "buffers": sample * (cfg.train.global_batch // gpus + cfg.eval.batch),
        }

    def run(self) -> list[Moment]:
        for i in range(len(self.regions)):
            self._forward(i)
        for i in reversed(range(len(self.regions))):
            self._backward(i)
            self._reduce(i)
        self._note("the optimizer", gradients=self._gradients(self.layout.units))
        self._validate()
        return self.found

    def _forward(self, i: int) -> None:
        ahead = range(i, min(len(self.regions), i + 1 + self.cfg.parallel.forward_prefetch))
        self._note(
            f"forward of region {i + 1}",
            gradients=self._gradients(()),
            gathered=self._gathered(range(i + 1) if self.kept else [i]) + sum(map(self._flat, ahead)),
            activations=self.ends + sum(self.saved[:i]),
            working=self._at(i).forward,
        )

    def _backward(self, i: int) -> None:
        """The region before is being gathered, those behind are being reduced."""
        waiting = self.regions[i + 1 : i + 1 + self.in_flight]
        self._note(
            f"backward of region {i + 1}",
            gradients=self._gradients(self.regions[i + 1 :]) + self._unreduced(waiting),
            gathered=self._gathered(range(i + 1)) if self.kept else self._gathered([i]) + self._flat(i - 1),
            activations=self.ends + sum(self.saved[: i + 1]),
            working=self._at(i).backward + self.stream,
        )

    def _reduce(self, i: int) -> None:
        """Its weights and activations are gone; its gradients are copied for reduction."""
        waiting = self.regions[i : i + self.in_flight]
        # They are let go of before the result is made.
        own = max(self.gathered * self.regions[i].whole, self.reduced * self._shards([self.regions[i]]))
        self._note(
            f"reduction of region {i + 1}",
            gradients=self._gradients(self.regions[i + 1 :]) + self._unreduced(waiting) + own,
            gathered=self._gathered(range(i)) if self.kept else self._gathered([]) + self._flat(i - 1),
            activations=self.ends + sum(self.saved[:i]),
            working=self.stream,
        )

    def _validate(self) -> None:
        factor = self.cfg.eval.batch / self.rows
        largest = max(range(len(self.regions)), key=lambda i: factor * self._at(i).evaluate + self._flat(i))
        everywhere = range(len(self.regions)) if self.kept else [largest]
        self._note(
            "validation",
            gathered=self._gathered(everywhere) + self._flat(largest),
            working=factor * (self._at(largest).evaluate + self.footprints["ends"].evaluate),
        )

    def _note(self, name: str, gathered: float = 0.0, working: float = 0.0, **parts: float) -> None:
        parts |= {"gathered weights": gathered, "working set": working}
        self.found.append(Moment(name, self.always | parts))

    def _at(self, i: int) -> Footprint:
        return self.footprints[self.regions[i].kind]

    def _shards(self, units) -> int:
        return sum(unit.padded // self.layout.shards for unit in units)

    def _gathered(self, regions) -> float:
        """The weights of the root and of some regions as layers use them."""
        return self.gathered * (self.root.padded + sum(self.regions[i].padded for i in regions))

    def _flat(self, i: int) -> float:
        """The buffer that a region is gathered into, before it is copied out."""
        return self.gathered * self.regions[i].padded if self.layout.shards > 1 and i >= 0 else 0.0

    def _unreduced(self, units) -> float:
        """Inputs of reductions, and the root's gradients, which are reduced last."""
        return self.reduced * sum(unit.padded for unit in units) + self.gathered * self.root.whole

    def _gradients(self, done) -> float:
        """Gradients on shards when in a step's last micro-batch these units are reduced."""
        fresh, rest = self._shards(done), self._shards(self.layout.units) - self._shards(done)
        replicated = self.layout.replicas > 1
        size = MASTER * fresh
        if replicated and self.reduced != MASTER:  # FSDP2 keeps what it has summed over the replicas, too
            size += self.reduced * fresh
        if self.accumulates:  # of the micro-batches before; replicas are summed with the last only
            size += (self.reduced if replicated else MASTER) * rest
        return size
