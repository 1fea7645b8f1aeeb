"""One device as a rank of a group whose other ranks do not exist, and what it sends and holds beside the plan.

torch's fake process group answers every collective at once: each part of a gather holds this rank's values, and a
reduction returns this rank's part. So no byte travels, and values stay finite. What remains is what a rank does itself:
capture, memory, arithmetic, FSDP2's copies.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from flux_ref import ranks
from flux_ref.config import Config
from flux_ref.precision.fp8 import architecture
from flux_ref.ranks import World
from tools.flops_and_bytes import fsdp_layout, sent
from tools.plan import memory, region_costs
from tools.plan.plan import GB

COLLECTIVES = {  # functions that FSDP2 calls, and what they do; torch 2.14 calls those with new names
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
}


@contextmanager
def fake_world(size: int, rank: int = 0, node: int = 8, replicate: int = 0) -> Iterator[World]:
    """The world of one rank. node: ranks of a host. replicate: as parallel.replicate."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = torch.device(accelerator.type, 0) if accelerator else torch.device("cpu")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        nodes = [str(number // node) for number in range(size)]
        mesh = ranks.make_mesh(device.type, size, ranks.replica_count(replicate, nodes))
        with patch.dict(ranks.BACKENDS, {device.type: "fake"}):
            yield World(rank, size, device, mesh)
    finally:
        ranks.stop()


@contextmanager
def counted(world: World) -> Iterator[Counter[str]]:
    """The bytes that a rank would send in rings, by collective."""
    found = Counter[str](dict.fromkeys(COLLECTIVES.values(), 0))
    shards = world.mesh.size(-1)

    def counting(kind: str, collective: Callable) -> Callable:
        def call(*args: object, **keys: object) -> object:
            whole = max(one.nbytes for one in (*args, *keys.values()) if isinstance(one, Tensor))
            found[kind] += whole * (shards - 1) // shards
            return collective(*args, **keys)

        return call

    functions = {name: counting(kind, getattr(dist, name)) for name, kind in COLLECTIVES.items() if hasattr(dist, name)}
    with patch.multiple(dist, **functions):
        yield found


def beside_plan(cfg: Config, world: World, step: Callable[[], object]) -> dict:
    """What a rank sends in an eager step, counted, and what tools.plan expects that it sends and holds.

    The plan's memory is to be compared with peak_memory_gb of bench.step's report. GB are 1e9 bytes.
    """
    layout = fsdp_layout(cfg, world.size, world.replicas)
    footprints = region_costs.trace(cfg, architecture(world.device), layout.rows)
    with counted(world) as found:
        step()
    planned = sent(layout)
    return {
        "note": f"{world.size} ranks of which one exists: no byte travelled, and nothing waited for links",
        "sent_gb": {name: size / GB for name, size in found.items()},
        "planned_sent_gb": {name: planned[name] / GB for name in found},
        "planned_memory_gb": memory.fullest(cfg, layout, footprints).total / GB,
    }
