"""One device as a rank of a group whose other ranks do not exist, and its memory and collectives beside the plan's.

torch's fake process group answers every collective at once: each part of a gather holds this rank's values, and a
reduction returns this rank's part. So no byte travels, and values stay finite. What remains is what a rank does itself:
capture, memory, arithmetic, FSDP2's copies.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import ceil
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from flux_ref import config, ranks, sharding
from flux_ref.arithmetic import arithmetic_of
from flux_ref.config import Config
from flux_ref.data import allocate
from flux_ref.precision.fp8 import architecture
from flux_ref.ranks import World
from flux_ref.step import Health, train_step
from flux_ref.step_runner import State
from tools.plan import footprint, memory
from tools.plan.plan import GB
from tools.shared import communication

STEP = "a step to be measured"
COLLECTIVES = {  # functions that FSDP2 calls, and what they do; torch 2.14 calls those with new names
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
}
GLOO = ("c10d::", "gloo:")  # how the profiler names collectives, where they begin and in their threads


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
    """What a rank sends in an eager step and the memory of its tensors, counted, and as tools.plan expects them.

    On an accelerator the counted memory is peak_memory_gb of bench.step's report. GB are 1e9 bytes.
    """
    rows = config.micro_batch(cfg, world.size)
    layout = communication.layout(cfg, world.size, world.replicas)
    footprints = footprint.trace(cfg, architecture(world.device), rows)
    with counted(world) as sent:
        step()
    planned = communication.sent(cfg, layout, micros=ceil(config.rank_batch(cfg, world.size) / rows))
    report = {
        "note": f"{world.size} ranks of which one exists: no byte travelled, and nothing waited for links",
        "sent_gb": {name: size / GB for name, size in sent.items()},
        "planned_sent_gb": {name: planned[name] / GB for name in sent},
        "planned_memory_gb": memory.fullest(cfg, layout, footprints, world.size, rows).total / GB,
    }
    if world.device.type == "cpu":
        report["tensors_gb"] = tensor_bytes(cfg, world) / GB
    return report


def tensor_bytes(cfg: Config, world: World) -> int:
    """The most bytes of a rank's tensors in an eager step of an optimizer that has its moments, on a CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        state = State(sharding.build(cfg, world, None, arithmetic_of(cfg)), cfg, world)
        health = Health(world.device)
        batch, _ = (allocate(cfg.model, rows) for rows in (config.rank_batch(cfg, world.size), cfg.eval.batch))
        for _ in range(2):
            with record_function(STEP):
                train_step(state.net, state.opt, batch, health, cfg)
    return peaks(profiler)[1]


def peaks(profiler: profile) -> list[int]:
    """The most bytes that torch's allocator had handed out at a time, in each step that is marked STEP.

    The profiler does not hear of what other threads free. Memory that is handed out a second time was free, and nothing
    that a step makes outlives it. What else was not heard of can only raise a count, so that of equal steps the
    smallest is the nearest.
    """
    todo = [(event, False) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    events = []
    while todo:
        event, in_gloo = todo.pop()
        todo.extend((child, in_gloo or event.name.startswith(GLOO)) for child in event.children)
        if event.tag == _EventType.Allocation and not (in_gloo and event.extra_fields.alloc_size > 0):
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name == STEP:
            events.append((event.start_time_ns, None, 0))
    lasting, passing, found = {}, {}, []
    now = 0
    for _, address, size in sorted(events, key=lambda event: event[0]):
        if address is None:
            now -= sum(passing.values())
            passing.clear()
            found.append(now)
            continue
        now -= lasting.pop(address, 0) + passing.pop(address, 0)
        if size > 0:
            (passing if found else lasting)[address] = size
            now += size
        if found:
            found[-1] = max(found[-1], now)
    return found
