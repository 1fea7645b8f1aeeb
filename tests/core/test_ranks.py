"""Replicas by node."""

import pytest

from flux_ref.errors import Refusal
from flux_ref.ranks import replica_count
from flux_ref.run.reporter import describe_mesh


def on(*counts: int) -> list[str]:
    return [f"n{node}" for node, count in enumerate(counts) for _ in range(count)]


@pytest.mark.parametrize(
    "nodes, wanted, count, words",
    [
        (on(1), 0, 1, "one replica sharded over one node"),
        (on(8), 0, 1, "one replica sharded over one node"),
        (on(8, 8), 0, 2, "2 replicas, each sharded over 8 ranks of one node"),
        (on(*[8] * 64), 0, 64, "64 replicas, each sharded over 8 ranks of one node"),
        (on(8, 8), 1, 1, "one replica sharded over 2 nodes"),
        (on(8, 8, 8, 8), 2, 2, "2 replicas, each sharded over 16 ranks of 2 nodes"),
        (on(8), 2, 2, "2 replicas, each sharded over 4 ranks of one node"),
        (on(2, 4), 2, 2, "2 replicas, each sharded over 3 ranks of 1 or 2 nodes"),
        (on(1, 1, 1), 0, 3, "3 replicas, each on one rank"),
    ],
)
def test_replicas_and_what_they_are(nodes, wanted, count, words):
    assert replica_count(wanted, nodes) == count
    assert describe_mesh(count, nodes) == words


@pytest.mark.parametrize(
    "nodes, wanted, words",
    [
        (on(8), 3, "parallel.replicate=3 does not divide the 8 ranks"),
        (on(8, 4), 0, "8 on n0, 4 on n1"),
        (["a", "b", "a", "b"], 0, "do not follow each other"),
    ],
)
def test_what_cannot_be_is_refused(nodes, wanted, words):
    with pytest.raises(Refusal, match=words):
        replica_count(wanted, nodes)
    assert replica_count(1, nodes) == 1
