"""Are the nodes fit for a run? Each node is measured against the median node, before the clock starts.

    torchrun --nproc-per-node 8 -m tools.preflight         this node
    torchrun --nnodes 8 ... -m tools.preflight             all nodes of a job, see launch/README.md

Every device multiplies matrices. Then the devices of a node sum with each other (all-reduce), then each node with its
neighbours; the better of the two counts. --slow=SHARE of the median (0.8): a slower node is unfit. --wait=S (120): a
measurement that fails or takes longer has speed 0.
Prints the median and the lowest speed, a line per complaint (which node, what is wrong, what to do), the bad nodes.
Exit codes of a rank: 0 all nodes are fit, 3 some are not, 2 refused. torchrun returns 1 in place of 2 and 3.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

from flux_ref import ranks
from flux_ref.alive import Alive
from flux_ref.config import ParallelConfig
from flux_ref.errors import Fault, Options, between, leave, run

TIMES = 50


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The mean time of a piece of work over a second or so, in which a device that is too hot slows down. sync."""
    for count in (1, TIMES):  # the first does not count
        begin = time.perf_counter()
        for _ in range(count):
            work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return (time.perf_counter() - begin) / TIMES


def multiply(device: torch.device, _: dist.ProcessGroup) -> float:
    """TFLOP/s of a square product, bf16 on an accelerator, fp32 on the CPU."""
    rows, dtype = (512, torch.float32) if device.type == "cpu" else (16384, torch.bfloat16)
    matrix = torch.ones(rows, rows, device=device, dtype=dtype)
    return 2 * rows**3 / seconds(lambda: matrix @ matrix, device) / 1e12


def all_reduce(device: torch.device, group: dist.ProcessGroup) -> float:
    """GB/s that a rank moves: 2 (n - 1) / n of the bytes over the time, the bus bandwidth."""
    tensor = torch.zeros((1 if device.type == "cpu" else 64) << 20, device=device)
    span = seconds(lambda: dist.all_reduce(tensor, group=group), device)
    return 2 * (1 - 1 / group.size()) * tensor.nbytes / span / 1e9


KINDS = {  # what is measured: how, its unit, the remedy
    "matrix product": (multiply, "TFLOP/s", "look at its devices' temperature, power limit, clocks and other programs"),
    "all-reduce inside the node": (all_reduce, "GB/s", "look at the links between its devices"),
    "all-reduce with a neighbour": (all_reduce, "GB/s", "look at its network cards, cables and switch ports"),
}


def rounds(size: int, per_node: int) -> list[tuple[str, list[list[int]]]]:
    """What is measured, and the ranks that take part together. No rank is in two groups of a round."""
    product, inside, with_neighbour = KINDS
    nodes = [[*range(first, first + per_node)] for first in range(0, size, per_node)]
    pairs = [one + other for one, other in pairwise(nodes)]
    found = [
        (product, [[*range(size)]]),
        (inside, nodes if per_node > 1 else []),
        (with_neighbour, pairs[::2]),
        (with_neighbour, pairs[1::2]),
    ]
    return [(what, groups) for what, groups in found if groups]


def limited(measure: Callable[[], float], device: torch.device, wait_s: float) -> float:
    """A speed; 0, with a line that says why, for what fails or hangs. What hangs is left behind in its thread."""

    def work() -> float:
        if device.type != "cpu":
            torch.accelerator.set_device_index(device.index)
        return measure()

    try:
        return ThreadPoolExecutor(1).submit(work).result(wait_s)
    except Exception as error:
        why = str(error).partition("\n")[0] or f"a measurement hangs for {wait_s:g} s"
        print(f"preflight: rank {os.environ.get('RANK', 0)} on {os.uname().nodename}: {why}", file=sys.stderr)
        return 0.0


def judge(names: list[str], what: str, speeds: list[float], slow: float) -> tuple[list[str], set[str]]:
    """What rank 0 prints, and the names of the unfit nodes.

    names, speeds: of the nodes of all ranks; a speed below 0 was not measured. slow: a share of the median speed.
    """
    _, unit, remedy = KINDS[what]
    measured = [speed for speed in speeds if speed >= 0]
    median = statistics.median_high(measured)
    bad = {name: speed for name, speed in zip(names, speeds) if 0 <= speed <= slow * median}
    lines = [f"{what}: the median {median:.3g} {unit}, the lowest {min(measured):.3g}"]
    for name, speed in bad.items():
        lines.append(f"preflight: {name}: {what} {speed:.3g} {unit}, the median {median:.3g}; {remedy}")
    return lines, {*bad}


def survey(world: ranks.World, wait_s: float, mark: Callable[[str], None]) -> dict[str, list[float]]:
    """Speeds of all ranks; -1 where a rank took no part. mark: called with what begins. Collective.

    Ends after a round with a speed of 0: a device may be blocked then.
    """
    host = ranks.host_group("preflight")
    found: dict[str, list[float]] = {}
    for what, groups in rounds(world.size, world.size // world.replicas):
        mark(what)
        measure, *_ = KINDS[what]
        speed = -1.0
        for members in groups:
            group = dist.new_group(members)
            if isinstance(group, dist.ProcessGroup):  # other ranks get a number
                speed = limited(partial(measure, world.device, group), world.device, wait_s)
        speeds = ranks.gather_objects(speed, host)
        found[what] = [*map(max, speeds, found.get(what, speeds))]
        if 0.0 in speeds:
            break
    return found


def check(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("torchrun -m tools.preflight", __doc__)
    parser.add_argument("--wait", type=between(1, 86400, float), default=120.0)
    parser.add_argument("--slow", type=between(0, 0.99, float), default=0.8)
    args = parser.parse_args(argv)
    with Alive("preflight", 3 * args.wait) as alive:  # a node that does not answer would let the others wait for ever
        world = ranks.start(ParallelConfig())
        alive.share(world.store)
        names = ranks.gather_objects(os.environ.get("SLURMD_NODENAME", os.uname().nodename))
        found = survey(world, args.wait, alive.mark)
    lines: list[str] = []
    bad: set[str] = set()
    for what, speeds in found.items():
        told, unfit = judge(names, what, speeds, args.slow)
        lines += told
        bad |= unfit
    verdict = f"bad nodes: {','.join(sorted(bad))}" if bad else "all nodes are fit"
    if world.rank == 0:
        print(*lines, f"preflight: {verdict}", sep="\n")
    return Fault.exit_code if bad else 0


if __name__ == "__main__":
    leave(run("preflight", check, sys.argv[1:]))  # at once: a measurement that hangs would keep the process
