"""Memory of one rank through a training step, by part: what FSDP2, autograd and the optimizer hold.

communication.py says how the weights are split into shards, footprint.py what the regions keep and need. A card must
hold the fullest instant.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

from flux_ref.config import Config
from flux_ref.data import fields
from flux_ref.optim import moment_kinds
from flux_ref.precision import policy
from flux_ref.sharding import REDUCTIONS
from tools.plan.footprint import Footprint, decoding
from tools.shared.communication import ITEM_BYTES, ROOT, Layout, Unit, freed

TILE = 2048  # bytes that a block of threads copies, as FSDP2's kernels count blocks
BESIDE = 8192  # bytes of a table beside its blocks: seven numbers per parameter, for up to 140 parameters of a unit
GATHERED = 1 << 17  # bytes of a table for gathered weights: at most 32 blocks of 8 bytes for each multiprocessor
MASTER = 4  # bytes of a weight, of a moment and of a gradient on shards
PARTS = ("weights", "moments", "gradients", "gathered weights", "activations", "working set", "buffers")


@dataclass(frozen=True)
class Instant:
    """What a rank holds at one instant, by part."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def fullest(instants: list[Instant]) -> Instant:
    return max(instants, key=lambda instant: instant.total)


def instants(
    cfg: Config, layout: Layout, footprints: dict[str, Footprint], gpus: int, rows: int, captured: bool
) -> list[Instant]:
    """Everything worth looking at in a step and a validation batch, in order.

    rows: those of the footprints. captured: whether steps are. A drawing during the run cannot use the memory of their
    graphs. So every instant then has the part "drawing", of rank 0.
    """
    step = _Step(cfg, layout, footprints, gpus, rows)
    count = len(step.regions)
    ends = footprints[ROOT]
    alone = [step.gathered({i, *step.kept(count)}) + step.flat(i) for i in range(count)]  # without gradients
    if captured and cfg.sample.every_samples:  # beside the graphs: the most of a sampling step and of the autoencoder
        share = min(cfg.sample.count, cfg.eval.batch) / rows
        sampling = (gathered + share * (need.draw + ends.draw) for gathered, need in zip(alone, step.needs))
        step.always["drawing"] = max(*sampling, 0.0 if cfg.data.kind == "shapes" else decoding(cfg.model))
    root = step.item * step.root.whole  # bytes of its gradient
    tokens = cfg.model.image_tokens + cfg.model.text_tokens
    stream = rows * tokens * cfg.model.hidden * step.item  # its gradient, between two regions
    for i, need in enumerate(step.needs):
        step.note(f"forward of region {i + 1}", count, count, {i, *step.kept(i)}, [i], i, need.forward)
    for i, need in reversed([*enumerate(step.needs)]):
        ahead = step.prefetched(i)
        working = need.backward + stream
        step.note(f"backward of region {i + 1}", i + 1, i + 1, {i, *step.kept(i)}, ahead, i + 1, working, root)
        # The region's weights and activations are free. Its gradients are copied, and freed before the result is made.
        unit = step.regions[i]
        copied = max(step.item * unit.whole, step.reduced * step.shards([unit]))
        step.note(f"reduction of region {i + 1}", i + 1, i, step.kept(i), ahead, i, stream, root + copied)
    step.instants.append(Instant("the optimizer", step.always | {"gradients": step.gradients(layout.units)}))
    for gathered, need in zip(alone, step.needs):
        working = cfg.eval.batch / rows * (need.evaluate + ends.evaluate)
        parts = {"gathered weights": gathered, "working set": working}
        step.instants.append(Instant("validation", step.always | parts))
    return step.instants


def pinned(cfg: Config, layout: Layout, gpus: int, rows: int) -> float:
    """Bytes of host memory that the captured graphs of one rank keep pinned, at most.

    FSDP2 copies gradients and gathered weights with kernels that read a table from pinned memory: 8 bytes for each
    TILE. torch rounds a table up to a power of two. A graph keeps the tables of all its copies.
    Sources: pytorch's TensorShape.cu (get_chunk_cat_metadata, pack_vecs) and CachingHostAllocator.h (free).
    """
    reduced = ITEM_BYTES[cfg.parallel.reduce_dtype]
    tables = (8 * (unit.padded // layout.shards) * reduced // TILE + BESIDE for unit in layout.units)
    gathers = len(layout.units) + freed(cfg.parallel, len(layout.units) - 1)
    micro = sum(1 << (size - 1).bit_length() for size in tables) + GATHERED * gathers
    graphs = 2 if policy.layers_with_delayed_scales(cfg) and cfg.precision.dynamic_steps else 1
    return graphs * micro * (cfg.train.global_batch // (gpus * rows)) + GATHERED * len(layout.units)


class _Step:
    """What a rank holds of one training step, region by region."""

    def __init__(self, cfg: Config, layout: Layout, footprints: dict[str, Footprint], gpus: int, rows: int):
        self.layout = layout
        *self.regions, self.root = layout.units
        self.needs = [footprints[unit.kind] for unit in self.regions]
        self.saved_by_ends = footprints[ROOT].saved
        self.item = ITEM_BYTES[cfg.parallel.dtype]
        self.reduced = ITEM_BYTES[cfg.parallel.reduce_dtype]
        self.accumulates = gpus * rows < cfg.train.global_batch
        self.freed = freed(cfg.parallel, len(self.regions))  # the regions behind these stay gathered until backward
        self.instants: list[Instant] = []
        sample = sum(prod(shape) * dtype.itemsize for shape, dtype in fields(cfg.model).values())
        self.always = dict.fromkeys(PARTS, 0.0)
        self.always["weights"] = MASTER * self.shards(layout.units)
        self.always["moments"] = MASTER * len(moment_kinds(cfg.optim)) * sum(unit.shard for unit in layout.units)
        self.always["buffers"] = sample * (cfg.train.global_batch // gpus + cfg.eval.batch)

    def note(
        self,
        name: str,
        done: int,
        reducing: int,
        gathered: Iterable[int],
        ahead: Iterable[int],
        saved: int,
        working: float,
        unreduced: float = 0.0,
    ) -> None:
        """An instant of forward or backward.

        done: the first region with gradients of the last micro-batch. reducing: the newest region in reduction.
        gathered, ahead: regions that are gathered, and that are on their way. saved: regions that hold activations.
        """
        gradients = self.gradients(self.regions[done:]) + self._reducing(reducing) + unreduced
        parts = {
            "gradients": gradients,
            "gathered weights": self.gathered(gathered) + sum(map(self.flat, ahead)),
            "activations": self.saved_by_ends + sum(need.saved for need in self.needs[:saved]),
            "working set": working,
        }
        self.instants.append(Instant(name, self.always | parts))

    def gradients(self, done: Sequence[Unit]) -> float:
        """Bytes of sharded gradients after these units were reduced in the last micro-batch."""
        reduced = self.shards(done)
        replicated = self.layout.replicas > 1
        size = MASTER * reduced
        if replicated and self.reduced != MASTER:  # FSDP2 also keeps what it summed over the replicas
            size += self.reduced * reduced
        if self.accumulates:  # from the micro-batches before; replicas are summed with the last one only
            size += (self.reduced if replicated else MASTER) * (self.shards(self.layout.units) - reduced)
        return size

    def shards(self, units: Iterable[Unit]) -> int:
        """Elements of a rank's shards."""
        return sum(unit.padded // self.layout.shards for unit in units)

    def kept(self, i: int) -> range:
        """The regions before region i that stay gathered until backward."""
        return range(self.freed, i)

    def prefetched(self, i: int) -> range:
        """The region that is gathered during backward of a region."""
        return range(max(0, i - 1), min(i, self.freed))

    def gathered(self, regions: Iterable[int]) -> float:
        """The weights of the root and of some regions as layers use them."""
        return self.root.gathered + sum(self.regions[i].gathered for i in regions)

    def flat(self, i: int) -> float:
        """The buffer that a region is gathered into, before it is copied out."""
        return self.regions[i].gathered if self.layout.shards > 1 else 0.0

    def _reducing(self, i: int) -> float:
        """Inputs of reductions, region i's being the newest. The last ones of a micro-batch stay into the next."""
        newest = self.regions[i:]
        if self.accumulates:
            newest = [*newest, self.root, *self.regions]
        return self.reduced * sum(unit.padded for unit in newest[:REDUCTIONS])
