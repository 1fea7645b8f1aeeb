"""Are the nodes fit for a run? Each node is measured against the median node, before the clock starts.

    torchrun --nproc-per-node 8 -m tools.preflight         this node
    torchrun --nnodes 8 ... -m tools.preflight             all nodes of a job, see launch/README.md

Every device multiplies matrices. Then the devices of a node sum with each other (all-reduce), then each node with its
neighbours; the better of the two counts. --slow=SHARE of the median (0.8): a slower node is unfit. --wait=S (120): a
measurement that takes longer has speed 0, as one with a wrong result.
Prints the devices, a row per node, a line per complaint (which node, what is wrong, what to do), and the bad nodes.
Exit codes of a rank: 0 all nodes are fit, 3 some are not, 2 refused. torchrun returns 1 in place of 2 and 3.
"""

import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist

from flux_ref import ranks
from flux_ref.config import ParallelConfig
from flux_ref.errors import Fault, Options, between, leave, run

TIMES = 50
FREE = 0.9  # share of a device's memory that must be free
SPEEDS = {  # what is measured, its unit, the remedy
    "product": ("matrix product", "TFLOP/s", "look at its devices' temperature, power limit and clocks"),
    "inside": ("all-reduce inside the node", "GB/s", "look at the links between its devices"),
    "between": ("all-reduce with a neighbour", "GB/s", "look at its network cards, cables and switch ports"),
}


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """The mean time of a piece of work over a second or so, in which a device that is too hot slows down. sync."""
    for count in (1, TIMES):  # the first does not count
        begin = time.perf_counter()
        for _ in range(count):
            work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
    return (time.perf_counter() - begin) / TIMES


def multiply(device: torch.device) -> float:
    """TFLOP/s of a square product, bf16 on an accelerator, fp32 on the CPU.

    Raises: RuntimeError if other programs hold the memory.
    """
    rows, dtype = (512, torch.float32) if device.type == "cpu" else (16384, torch.bfloat16)
    if device.type != "cpu":
        free, total = torch.get_device_module(device).mem_get_info(device)
        if free < FREE * total:
            raise RuntimeError(f"only {free / total:.0%} of the device's memory is free; end what holds the rest")
    matrix = torch.ones(rows, rows, device=device, dtype=dtype)
    out = torch.empty_like(matrix)
    return 2 * rows**3 / seconds(lambda: torch.mm(matrix, matrix, out=out), device) / 1e12


def all_reduce(device: torch.device, group: dist.ProcessGroup) -> float:
    """GB/s that a rank moves: 2 (n - 1) / n of the bytes over the time, the bus bandwidth.

    Raises: RuntimeError if the sum is wrong.
    """
    size = group.size()
    count = (1 if device.type == "cpu" else 64) << 20  # of float32
    tensor = torch.full((count,), float(group.rank()), device=device)
    dist.all_reduce(tensor, group=group)
    if not bool((tensor == size * (size - 1) / 2).all()):
        raise RuntimeError("an all-reduce gives a wrong sum")
    tensor.zero_()
    span = seconds(lambda: dist.all_reduce(tensor, group=group), device)
    return 2 * (size - 1) / size * tensor.nbytes / span / 1e9


def limited(measure: Callable[[], float], device: torch.device, wait_s: float) -> float:
    """A speed; 0, with a line that says why, for what fails or hangs. What hangs is left behind in its thread."""
    future: Future[float] = Future()

    def work() -> None:
        try:
            if device.type != "cpu":
                torch.accelerator.set_device_index(device.index)
            future.set_result(measure())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        return future.result(wait_s)
    except Exception as error:
        why = str(error).partition("\n")[0] or f"a measurement hangs for {wait_s:g} s"
        print(
            f"preflight: rank {os.environ.get('RANK', 0)} on {os.uname().nodename}: {why}", file=sys.stderr, flush=True
        )
        return 0.0


def rounds(size: int, per_node: int) -> Iterator[tuple[str, list[list[int]]]]:
    """What is measured, and the ranks that take part together. No rank is in two groups of a round."""
    nodes = [[*range(first, first + per_node)] for first in range(0, size, per_node)]
    yield "product", [[*range(size)]]
    if per_node > 1:
        yield "inside", nodes
    for first in range(min(2, len(nodes) - 1)):
        yield "between", [one + other for one, other in zip(nodes[first::2], nodes[first + 1 :: 2])]


def survey(world: ranks.World, per_node: int, wait_s: float) -> dict[str, dict[int, float]]:
    """Speeds by kind and node. Collective. Ends after a round with a speed of 0: a device may be blocked then."""
    host = ranks.host_group("preflight")
    speeds: dict[str, dict[int, float]] = {}
    for kind, groups in rounds(world.size, per_node):
        own = None
        for members in groups:
            group = dist.new_group(members)
            if isinstance(group, dist.ProcessGroup):  # other ranks get a number
                measure = (
                    partial(all_reduce, world.device, group) if kind != "product" else partial(multiply, world.device)
                )
                own = limited(measure, world.device, wait_s)
        by_rank = ranks.gather_objects(own, host)
        known = speeds.setdefault(kind, {})
        for members in groups:
            for first in members[::per_node]:
                node = first // per_node
                known[node] = max(min(by_rank[first : first + per_node]), known.get(node, 0.0))
        if 0.0 in by_rank:
            break
    return speeds


def judge(names: list[str], speeds: dict[str, dict[int, float]], slow: float) -> tuple[list[str], list[str]]:
    """What rank 0 prints, and the names of the unfit nodes. names: of the nodes. slow: a share of the median speed."""
    rows = [f"{name}:" for name in names]
    complaints, bad = [], set()
    for kind, of_nodes in speeds.items():
        what, unit, remedy = SPEEDS[kind]
        median = statistics.median_high(of_nodes.values())
        for node, speed in of_nodes.items():
            rows[node] += f"  {what} {speed:.3g} {unit}"
            if speed <= slow * median:
                complaints.append(
                    f"preflight: {names[node]}: {what} {speed:.3g} {unit}, the median {median:.3g}; {remedy}"
                )
                bad.add(names[node])
    last = f"bad nodes: {','.join(sorted(bad))}" if bad else "all nodes are fit"
    return [*rows, *complaints, f"preflight: {last}"], sorted(bad)


def check(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("torchrun -m tools.preflight", __doc__)
    parser.add_argument("--wait", type=between(1, 86400, float), default=120.0)
    parser.add_argument("--slow", type=between(0, 0.99, float), default=0.8)
    args = parser.parse_args(argv)
    threading.Thread(target=give_up, args=(10 * args.wait,), daemon=True).start()
    world = ranks.start(ParallelConfig())
    per_node = world.size // ranks.replica_count(0, world.nodes)
    names = ranks.gather_objects(os.environ.get("SLURMD_NODENAME", os.uname().nodename))[::per_node]
    lines, bad = judge(names, survey(world, per_node, args.wait), args.slow)
    if world.rank == 0:
        kind = "CPU" if world.device.type == "cpu" else torch.get_device_module(world.device).get_device_name()
        print(f"{world.size} x {kind}", *lines, sep="\n")
    return Fault.exit_code if bad else 0


def give_up(limit_s: float) -> None:
    """A node that does not answer would let the others wait for ever."""
    time.sleep(limit_s)
    print(f"preflight: no end after {limit_s:g} s; a node does not answer", file=sys.stderr)
    leave(Fault.exit_code)


if __name__ == "__main__":
    leave(run("preflight", check, sys.argv[1:]))  # at once: a measurement that hangs would keep the process
