"""Memory of one rank through a training step, by part: what FSDP2, autograd and the optimizer hold.

communication.py says how the weights are split into shards, footprint.py what the regions keep and need. A card must
hold the fullest moment.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from flux_ref.config import Config
from flux_ref.data import fields
from flux_ref.optim import BYTES_PER_PARAMETER
from flux_ref.speed.regions import REDUCTIONS
from tools.plan.footprint import Footprint
from tools.shared.communication import ITEM_BYTES, ROOT, Layout, Unit, freed

MASTER = 4  # bytes of a weight and of a gradient on shards
PARTS = ("weights", "moments", "gradients", "gathered weights", "activations", "working set", "buffers")


@dataclass(frozen=True)
class Moment:
    """What a rank holds at one moment, by part."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def fullest(moments: list[Moment]) -> Moment:
    return max(moments, key=lambda moment: moment.total)


def moments(cfg: Config, layout: Layout, footprints: dict[str, Footprint], gpus: int, rows: int) -> list[Moment]:
    """Everything worth looking at in a step and a validation batch, in order. rows: those of the footprints."""
    step = _Step(cfg, layout, footprints, gpus, rows)
    count = len(step.regions)
    for i in range(count):
        step.forward(i)
    for i in reversed(range(count)):
        step.backward(i)
        step.reduce(i)
    step.note("the optimizer", gradients=step.gradients(layout.units))
    for i in range(count):
        step.validate(i, cfg.eval.batch / rows)
    return step.moments


class _Step:
    """One training step and one validation batch, region by region."""

    def __init__(self, cfg: Config, layout: Layout, footprints: dict[str, Footprint], gpus: int, rows: int):
        self.parallel = cfg.parallel
        self.layout = layout
        *self.regions, self.root = layout.units
        self.needs = [footprints[unit.kind] for unit in self.regions]
        self.needs_of_ends = footprints[ROOT]
        self.item = ITEM_BYTES[cfg.parallel.dtype]
        self.reduced = ITEM_BYTES[cfg.parallel.reduce_dtype]
        self.accumulates = gpus * rows < cfg.train.global_batch
        self.freed = freed(cfg.parallel, len(self.regions))  # the regions behind these stay gathered until backward
        tokens = cfg.model.image_tokens + cfg.model.text_tokens
        self.stream = rows * tokens * cfg.model.hidden * self.item  # its gradient, between two regions
        self.moments: list[Moment] = []
        sample = sum(prod(shape) * dtype.itemsize for shape, dtype in fields(cfg.model).values())
        self.always = dict.fromkeys(PARTS, 0.0)
        self.always["weights"] = MASTER * self._shards(layout.units)
        self.always["moments"] = (BYTES_PER_PARAMETER - MASTER) * sum(unit.shard for unit in layout.units)
        self.always["buffers"] = sample * (cfg.train.global_batch // gpus + cfg.eval.batch)

    def forward(self, i: int) -> None:
        ahead = range(i, min(len(self.regions), i + 1 + self.parallel.forward_prefetch))
        self.note(
            f"forward of region {i + 1}",
            gradients=self.gradients([]) + self._reducing(len(self.regions)),
            gathered=self._gathered({i, *range(self.freed, i)}) + sum(map(self._flat, ahead)),
            activations=self._saved(i),
            working=self.needs[i].forward,
        )

    def backward(self, i: int) -> None:
        """While regions before are gathered, and the regions behind are reduced."""
        of_root = self.item * self.root.whole
        self.note(
            f"backward of region {i + 1}",
            gradients=self.gradients(self.regions[i + 1 :]) + self._reducing(i + 1) + of_root,
            gathered=self._gathered({i, *range(self.freed, i)}) + self._prefetched(i),
            activations=self._saved(i + 1),
            working=self.needs[i].backward + self.stream,
        )

    def reduce(self, i: int) -> None:
        """The region's weights and activations are free; its gradients are copied for reduction."""
        # The gradients are freed before the result is made.
        gradients = self.item * self.regions[i].whole
        result = self.reduced * self._shards([self.regions[i]])
        unreduced = self.item * self.root.whole + max(gradients, result)
        self.note(
            f"reduction of region {i + 1}",
            gradients=self.gradients(self.regions[i + 1 :]) + self._reducing(i) + unreduced,
            gathered=self._gathered(range(self.freed, i)) + self._prefetched(i),
            activations=self._saved(i),
            working=self.stream,
        )

    def validate(self, i: int, factor: float) -> None:
        """While region i computes. factor: samples of a validation batch over those of the footprints."""
        self.note(
            "validation",
            gathered=self._gathered({i, *range(self.freed, len(self.regions))}) + self._flat(i),
            working=factor * (self.needs[i].evaluate + self.needs_of_ends.evaluate),
        )

    def note(self, name: str, gathered: float = 0.0, working: float = 0.0, **parts: float) -> None:
        parts |= {"gathered weights": gathered, "working set": working}
        self.moments.append(Moment(name, self.always | parts))

    def gradients(self, done: list[Unit]) -> float:
        """Bytes of sharded gradients after these units were reduced in the last micro-batch."""
        reduced = self._shards(done)
        replicated = self.layout.replicas > 1
        size = MASTER * reduced
        if replicated and self.reduced != MASTER:  # FSDP2 also keeps what it summed over the replicas
            size += self.reduced * reduced
        if self.accumulates:  # from the micro-batches before; replicas are summed with the last one only
            size += (self.reduced if replicated else MASTER) * (self._shards(self.layout.units) - reduced)
        return size

    def _saved(self, count: int) -> float:
        """The activations of the ends and of the first regions."""
        return self.needs_of_ends.saved + sum(need.saved for need in self.needs[:count])

    def _shards(self, units: Iterable[Unit]) -> int:
        return sum(unit.padded // self.layout.shards for unit in units)

    def _gathered(self, regions: Iterable[int]) -> float:
        """The weights of the root and of some regions as layers use them."""
        return self.root.gathered + sum(self.regions[i].gathered for i in regions)

    def _flat(self, i: int) -> float:
        """The buffer that a region is gathered into, before it is copied out."""
        return self.regions[i].gathered if self.layout.shards > 1 else 0.0

    def _prefetched(self, i: int) -> float:
        """The buffers of the regions that are gathered during backward of a region."""
        first = i - max(1, self.parallel.backward_prefetch)
        return sum(map(self._flat, range(max(0, first), min(i, self.freed))))

    def _reducing(self, i: int) -> float:
        """Inputs of reductions, region i's being the newest. The last ones of a micro-batch stay into the next."""
        newest = self.regions[i:]
        if self.accumulates:
            newest = [*newest, self.root, *self.regions]
        return self.reduced * sum(unit.padded for unit in newest[:REDUCTIONS])
