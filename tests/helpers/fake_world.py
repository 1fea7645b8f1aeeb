"""One rank of a group whose other ranks do not exist: collectives return at once."""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from flux_ref import ranks


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0, node: int = 8) -> Iterator[ranks.World]:
    """node: ranks of a host."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        nodes = [str(number // node) for number in range(size)]
        mesh = ranks.make_mesh("cpu", size, ranks.replica_count(0, nodes))
        yield ranks.World(rank, size, torch.device("cpu"), mesh)
    finally:
        ranks.stop()
