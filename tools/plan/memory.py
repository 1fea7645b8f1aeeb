"""Memory of one rank through a training step, by part: what FSDP2, autograd and the optimizer hold.

flops_and_bytes.py says how the weights are split into shards, region_costs.py what the regions keep and need. A card
must hold the fullest instant.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from flux_ref.config import Config
from flux_ref.dataloader import fields
from flux_ref.model import parameter_table
from flux_ref.optim import state_kinds
from flux_ref.sharding import REDUCTIONS
from tools.flops_and_bytes import ROOT, FsdpLayout, Unit
from tools.plan.region_costs import Footprints

MASTER = 4  # bytes of a weight, of a moment and of a gradient on shards


def checkpoint_bytes(cfg: Config) -> int:
    """Bytes in a checkpoint of a weight with its moments and average, all fp32."""
    return MASTER * (1 + len(state_kinds(cfg.optim)))


@dataclass(frozen=True)
class Instant:
    """What a rank holds at one instant, by part."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def fullest(cfg: Config, layout: FsdpLayout, footprints: Footprints) -> Instant:
    """The fullest instant of a training step or a validation batch."""
    weights = MASTER * layout.sharded(*layout.units)
    sample = sum(prod(shape) * dtype.itemsize for shape, dtype in fields(cfg.model).values())
    always = {
        "weights": weights,
        "moments": weights * len(state_kinds(cfg.optim)),
        "gradients": 0.0,
        "gathered weights": 0.0,
        "activations": 0.0,
        "working set": 0.0,
        "buffers": sample * (layout.micros * layout.rows + cfg.eval.batch),
    }
    return max(
        (Instant(one.name, always | one.parts) for one in instants(cfg, layout, footprints)),
        key=lambda one: one.total,
    )


def instants(cfg: Config, layout: FsdpLayout, footprints: Footprints) -> Iterator[Instant]:
    """What is held beside what is always held.

    In the last micro-batch, for each region: its weights gathered for backward, its backward, its reduction. Then the
    optimizer, and a validation batch in each region.
    """
    *regions, root = layout.units
    model = cfg.model
    stream = layout.rows * (model.image_tokens + model.text_tokens) * model.hidden * layout.item  # between two regions
    saved = sum(footprints[unit.kind].forward.kept for unit in layout.units)
    accumulates = layout.micros > 1
    queue = [root, *regions] if accumulates else []  # whose reductions the micro-batch before has begun
    for i, unit in reversed([*enumerate(regions)]):
        need = footprints[unit.kind]
        done = regions[i + 1 :]
        held = gradients(layout, done) + layout.item * root.whole
        is_freed = i < layout.freed
        # Kept weights are freed in the last micro-batch only; the one before it needs more.
        whole = gathered(root, *regions[layout.freed : None if accumulates else i])
        parts = {
            "gradients": held + reducing(layout, done + queue),
            # FSDP2 copies weights out of the buffer of their gather, where layers find them. Then it frees the buffer.
            "gathered weights": whole + gathered(unit, unit) * is_freed,
            "activations": saved,
        }
        yield Instant(f"weights of region {i + 1}", parts)

        if 0 < i <= layout.freed and layout.shards > 1:
            whole += regions[i - 1].gathered  # the buffer of the gather that runs ahead
        own = unit.gathered * (is_freed or not accumulates)
        working = need.backward.most + stream
        yield Instant(f"backward of region {i + 1}", parts | {"gathered weights": whole + own, "working set": working})

        saved -= need.forward.kept
        # The region's weights are free. Its gradients are copied, and freed before the result is made.
        copied = max(layout.item * unit.whole, layout.reduced * layout.sharded(unit))
        parts = {
            "gradients": held + reducing(layout, [unit, *done, *queue]) + copied,
            "gathered weights": whole,
            "activations": saved,
            "working set": stream,
        }
        yield Instant(f"reduction of region {i + 1}", parts)
    yield Instant("the optimizer", {"gradients": gradients(layout, layout.units)})
    for unit in regions:
        working = cfg.eval.batch / layout.rows * (footprints[unit.kind].forward.most + footprints[ROOT].forward.most)
        whole = gathered(root, *regions[layout.freed :], unit, unit)
        yield Instant("validation", {"gathered weights": whole, "working set": working})


def graph_nodes(cfg: Config, layout: FsdpLayout, footprints: Footprints) -> int:
    """Kernels, copies and collectives of a training step, without the optimizer's.

    A gather has three: copies in, the collective, copies out. A micro-batch reduces each unit with a copy and a
    collective, and adds the gradient of each parameter.
    """
    units = layout.units
    computed = sum(work.kernels for unit in units for work in footprints[unit.kind])
    reduced = 2 * len(units) + len(parameter_table(cfg.model))
    gathers = len(units) + (2 * layout.micros - 1) * layout.freed
    return layout.micros * (computed + reduced) + 3 * gathers


def gradients(layout: FsdpLayout, done: list[Unit]) -> float:
    """Bytes of sharded gradients after these units were reduced in the last micro-batch."""
    replicated = layout.replicas > 1
    shards = layout.sharded(*done)
    size = MASTER * shards
    if replicated and layout.reduced != MASTER:  # FSDP2 also keeps what it summed over the replicas
        size += layout.reduced * shards
    if layout.micros > 1:  # from the micro-batches before; replicas are summed with the last one only
        size += (layout.reduced if replicated else MASTER) * (layout.sharded(*layout.units) - shards)
    return size


def reducing(layout: FsdpLayout, newest: list[Unit]) -> float:
    """Bytes of the inputs of reductions, the newest first: FSDP2 frees all but the newest REDUCTIONS."""
    return layout.reduced * sum(unit.padded for unit in newest[:REDUCTIONS])


def gathered(*units: Unit) -> float:
    return sum(unit.gathered for unit in units)
