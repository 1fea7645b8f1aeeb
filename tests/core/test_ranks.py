"""Replicas by node; what ranks send to each other."""

import pytest

from flux_ref import ranks
from flux_ref.config import ParallelConfig
from flux_ref.errors import Refusal
from flux_ref.ranks import replica_count


def on(*counts: int) -> list[str]:
    return [f"n{node}" for node, count in enumerate(counts) for _ in range(count)]


# the node of each rank, parallel.replicate, full copies of the model
COPIES = [
    (on(1), 0, 1),
    (on(8), 0, 1),
    (on(8, 8), 0, 2),
    (on(*[8] * 64), 0, 64),
    (on(8, 8), 1, 1),
    (on(8, 8, 8, 8), 2, 2),
    (on(8), 2, 2),
    (on(2, 4), 2, 2),
    (on(1, 1, 1), 0, 3),
]


def test_one_copy_per_node_unless_asked_otherwise():
    assert [(nodes, wanted) for nodes, wanted, count in COPIES if replica_count(wanted, nodes) != count] == []


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


def test_values_travel_as_json_and_never_as_pickles():
    ranks.start(ParallelConfig())
    try:
        for value in (None, 1.5, float("inf"), 2**70, "é\udcff\n", {"a": [1, "x" * 5000, {}]}, [], ""):
            assert ranks.gather_objects(value) == [value]
        assert ranks.gather_objects({1: (2, 3)}) == [{"1": [2, 3]}]
        for value in (object(), b"bytes", {1, 2}):
            with pytest.raises(TypeError):
                ranks.gather_objects(value)
    finally:
        ranks.stop()
