"""Which ranks share a node, and what follows for sharding.

With 64 nodes of 8 ranks the mesh is 64 x 8, (replicate, shard): ranks 0 to 7, one node, are the first replica.
parallel.py makes the mesh; weights are gathered along its second dimension, gradients also summed along the first.
"""

from itertools import groupby

from flux_ref.errors import Refusal


def replicas(wanted: int, nodes: list[str]) -> int:
    """Full copies of the model. wanted: parallel.replicate, 0 for one per node; nodes: the node of each rank, by rank.

    Raises: Refusal where the ranks cannot be arranged so.
    """
    if wanted:
        if len(nodes) % wanted:
            raise Refusal(f"parallel.replicate={wanted} does not divide the {len(nodes)} ranks")
        return wanted
    runs = [(node, len(list(ranks))) for node, ranks in groupby(nodes)]
    again = next((node for i, (node, _) in enumerate(runs) if node in [other for other, _ in runs[:i]]), None)
    if again is not None:
        raise Refusal(
            f"the ranks of {again} do not follow each other, so a replica per node is impossible;"
            " start with torchrun or number the ranks node by node"
        )
    if len({count for _, count in runs}) > 1:
        counts = ", ".join(f"{count} on {node}" for node, count in runs)
        raise Refusal(f"nodes differ in their ranks ({counts}); start equally many on each or set parallel.replicate=1")
    return len(runs)


def describe(count: int, nodes: list[str]) -> str:
    """What the mesh is, in words."""
    size = len(nodes) // count
    spans = {len(set(nodes[first : first + size])) for first in range(0, len(nodes), size)}
    where = "one node" if spans == {1} else f"{' or '.join(map(str, sorted(spans)))} nodes"
    if count == 1:
        return f"one replica sharded over {where}"
    if size == 1:
        return f"{count} replicas, each on one rank"
    return f"{count} replicas, each sharded over {size} ranks of {where}"
