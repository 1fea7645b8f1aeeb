"""Memory of one rank through a training step, by part: what FSDP2, autograd and the optimizer hold.

flops_and_bytes.py says how the weights are split into shards, region_costs.py what the regions keep and need. A card
must hold the fullest instant.
"""

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
PARTS = ("weights", "moments", "gradients", "gathered weights", "activations", "working set", "buffers")


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
    *regions, root = layout.units
    sample = sum(prod(shape) * dtype.itemsize for shape, dtype in fields(cfg.model).values())
    always = dict.fromkeys(PARTS, 0.0)
    always["weights"] = MASTER * layout.sharded(*layout.units)
    always["moments"] = always["weights"] * len(state_kinds(cfg.optim))
    always["buffers"] = sample * (layout.micros * layout.rows + cfg.eval.batch)

    instants = training(cfg, layout, footprints)
    kept = regions[layout.freed :]
    for unit in regions:
        working = cfg.eval.batch / layout.rows * (footprints[unit.kind].forward.most + footprints[ROOT].forward.most)
        own = {"gathered weights": gathered(root, *kept, unit, unit), "working set": working}
        instants.append(Instant("validation", own))
    return max((Instant(one.name, always | one.parts) for one in instants), key=lambda one: one.total)


def training(cfg: Config, layout: FsdpLayout, footprints: Footprints) -> list[Instant]:
    """The last micro-batch from the end of forward on: backward and reduction of each region, then the optimizer."""
    *regions, root = layout.units
    item = layout.item
    tokens = cfg.model.image_tokens + cfg.model.text_tokens
    stream = layout.rows * tokens * cfg.model.hidden * item  # between two regions
    saved = sum(footprints[unit.kind].forward.kept for unit in layout.units)
    accumulates = layout.micros > 1
    queue = [root, *regions] if accumulates else []  # whose reductions the micro-batch before has begun
    done: list[Unit] = []
    instants = []
    for i in reversed(range(len(regions))):
        unit = regions[i]
        need = footprints[unit.kind]
        held = gradients(layout, done) + item * root.whole
        is_freed = i < layout.freed
        # Kept weights are freed in the last micro-batch only; the one before it needs more.
        whole = gathered(root, *regions[layout.freed : None if accumulates else i])
        # FSDP2 copies weights out of the buffer of their gather, where layers find them. Then it frees the buffer.
        copies = {
            "gradients": held + reducing(layout, done + queue),
            "gathered weights": whole + gathered(unit, unit) * is_freed,
            "activations": saved,
        }
        if 0 < i <= layout.freed and layout.shards > 1:
            whole += regions[i - 1].gathered  # the buffer of the gather that runs ahead
        backward = copies | {
            "gathered weights": whole + unit.gathered * (is_freed or not accumulates),
            "working set": need.backward.most + stream,
        }

        saved -= need.forward.kept
        # The region's weights are free. Its gradients are copied, and freed before the result is made.
        copied = max(item * unit.whole, layout.reduced * layout.sharded(unit))
        done.insert(0, unit)
        reduction = {
            "gradients": held + reducing(layout, done + queue) + copied,
            "gathered weights": whole,
            "activations": saved,
            "working set": stream,
        }
        instants += [
            Instant(f"weights of region {i + 1}", copies),
            Instant(f"backward of region {i + 1}", backward),
            Instant(f"reduction of region {i + 1}", reduction),
        ]
    return [*instants, Instant("the optimizer", {"gradients": gradients(layout, layout.units)})]


def graph_nodes(cfg: Config, layout: FsdpLayout, footprints: Footprints) -> int:
    """Kernels, copies and collectives of a training step, without the optimizer's.

    A gather has three: copies in, the collective, copies out. A micro-batch reduces each unit with a copy and a
    collective, and adds the gradient of each parameter.
    """
    units = layout.units
    forward = sum(footprints[unit.kind].forward.kernels for unit in units)
    backward = sum(footprints[unit.kind].backward.kernels for unit in units)
    reduced = 2 * len(units) + len(parameter_table(cfg.model))
    gathers = len(units) + (2 * layout.micros - 1) * layout.freed
    return layout.micros * (forward + backward + reduced) + 3 * gathers


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
