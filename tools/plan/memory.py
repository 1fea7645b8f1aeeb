"""Memory of one rank through a training step, by part: what FSDP2, autograd and the optimizer hold.

communication.py says how the weights are split into shards, footprint.py what the regions keep and need. A card must
hold the fullest instant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from flux_ref.config import Config
from flux_ref.data import fields
from flux_ref.optim import moment_kinds
from flux_ref.sharding import REDUCTIONS
from tools.plan.footprint import Footprint
from tools.shared.communication import ITEM_BYTES, ROOT, Layout, Unit, freed

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


def fullest(cfg: Config, layout: Layout, footprints: dict[str, Footprint], gpus: int, rows: int) -> Instant:
    """The fullest instant of a training step or a validation batch. rows: those of the footprints."""
    always = dict.fromkeys(PARTS, 0.0) | _always(cfg, layout, gpus)
    instants = [*_training(cfg, layout, footprints, gpus * rows < cfg.train.global_batch, rows)]
    *regions, root = layout.units
    kept = regions[freed(cfg.parallel, len(regions)) :]
    for unit in regions:
        working = footprints[unit.kind].forward.most + footprints[ROOT].forward.most
        gathered = _gathered(root, *kept) + 2 * unit.gathered
        own = {"gathered weights": gathered, "working set": cfg.eval.batch / rows * working}
        instants.append(Instant("validation", own))
    return max((Instant(one.name, always | one.parts) for one in instants), key=lambda one: one.total)


def _always(cfg: Config, layout: Layout, gpus: int) -> dict[str, float]:
    sample = sum(prod(shape) * dtype.itemsize for shape, dtype in fields(cfg.model).values())
    return {
        "weights": MASTER * _shards(layout, layout.units),
        "moments": MASTER * len(moment_kinds(cfg.optim)) * sum(unit.shard for unit in layout.units),
        "buffers": sample * (cfg.train.global_batch // gpus + cfg.eval.batch),
    }


def _training(
    cfg: Config, layout: Layout, footprints: dict[str, Footprint], accumulates: bool, rows: int
) -> list[Instant]:
    """The last micro-batch from the end of forward on: backward and reduction of each region, then the optimizer."""
    *regions, root = layout.units
    item = ITEM_BYTES[cfg.parallel.dtype]
    reduced = ITEM_BYTES[cfg.parallel.reduce_dtype]
    tokens = cfg.model.image_tokens + cfg.model.text_tokens
    stream = rows * tokens * cfg.model.hidden * item  # its gradient, between two regions
    first_kept = freed(cfg.parallel, len(regions))
    saved = footprints[ROOT].forward.kept + sum(footprints[unit.kind].forward.kept for unit in regions)
    queue = [root, *regions] if accumulates else []  # whose reductions the micro-batch before has begun
    instants = []
    for i in reversed(range(len(regions))):
        unit = regions[i]
        need = footprints[unit.kind]
        done = regions[i + 1 :]
        gradients = _gradients(cfg, layout, done, accumulates) + item * root.whole
        gathered = _gathered(root, *regions[first_kept:i])
        if 0 < i <= first_kept and layout.shards > 1:
            gathered += regions[i - 1].gathered  # the buffer of the gather that runs ahead
        backward = {
            "gradients": gradients + _reducing(reduced, done + queue),
            "gathered weights": gathered + unit.gathered,
            "activations": saved,
            "working set": need.backward.most + stream,
        }
        saved -= need.forward.kept
        # The region's weights are free. Its gradients are copied, and freed before the result is made.
        copied = max(item * unit.whole, reduced * _shards(layout, [unit]))
        reduction = {
            "gradients": gradients + _reducing(reduced, [unit, *done, *queue]) + copied,
            "gathered weights": gathered,
            "activations": saved,
            "working set": stream,
        }
        instants += [
            Instant(f"backward of region {i + 1}", backward),
            Instant(f"reduction of region {i + 1}", reduction),
        ]
    return [*instants, Instant("the optimizer", {"gradients": _gradients(cfg, layout, layout.units, accumulates)})]


def _gradients(cfg: Config, layout: Layout, done: Sequence[Unit], accumulates: bool) -> float:
    """Bytes of sharded gradients after these units were reduced in the last micro-batch."""
    reduced = ITEM_BYTES[cfg.parallel.reduce_dtype]
    shards = _shards(layout, done)
    replicated = layout.replicas > 1
    size = MASTER * shards
    if replicated and reduced != MASTER:  # FSDP2 also keeps what it summed over the replicas
        size += reduced * shards
    if accumulates:  # from the micro-batches before; replicas are summed with the last one only
        size += (reduced if replicated else MASTER) * (_shards(layout, layout.units) - shards)
    return size


def _reducing(item: int, newest: Sequence[Unit]) -> float:
    """Bytes of the inputs of reductions, the newest first: FSDP2 frees all but the newest REDUCTIONS."""
    return item * sum(unit.padded for unit in newest[:REDUCTIONS])


def _gathered(*units: Unit) -> float:
    return sum(unit.gathered for unit in units)


def _shards(layout: Layout, units: Sequence[Unit]) -> int:
    """Elements of a rank's shards."""
    return sum(unit.padded // layout.shards for unit in units)
