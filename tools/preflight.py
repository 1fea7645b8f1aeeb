"""Are the nodes fit for a run? Each node is measured against the median node, before the clock starts.

    torchrun --nproc-per-node 8 -m tools.preflight         this node
    torchrun --nnodes 8 ... -m tools.preflight             all nodes of a job, see launch/README.md

Every device multiplies matrices as FLUX does, in bf16 and in FP8 where it can, and copies memory. Then the devices of a
node sum with each other (all-reduce), then each node with its neighbours; the better of the two counts.
--slow=SHARE of the median (0.8): a slower node is unfit. --wait=S (120): a measurement that fails or takes longer has
speed 0. --json=FILE: the medians, for `python -m tools.plan --measured=FILE`.
Prints the median and the lowest speed, a line per complaint (which node, what is wrong, what to do), the bad nodes.
Exit codes of a rank: 0 all nodes are fit, 3 some are not, 2 refused. torchrun returns 1 in place of 2 and 3.
"""

import math
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from statistics import median_high

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

from flux_ref import ranks
from flux_ref.cli import Fault, Options, Refusal, exit_now, run
from flux_ref.config import ParallelConfig
from flux_ref.precision.fp8 import architecture, has_kernel, scaled_mm, support
from flux_ref.watchdog import Watchdog
from tools.figures import between, json_option, show

LONG_S = 1.0  # of a measurement, in which a device that is too hot slows down
TIMES = 50  # of a collective, alike on all ranks


def seconds(work: Callable[[], object], times: int = 0) -> float:
    """The mean time of a piece of work that is done so many times, by default for LONG_S. sync."""
    timer = Timer("work()", globals={"work": work})
    times = times or max(1, round(LONG_S / timer.timeit(1).mean))
    return timer.timeit(times).mean


def multiply(device: torch.device, _: dist.ProcessGroup, in_fp8: bool = False) -> float:
    """TFLOP/s of a product of an MLP of FLUX.1-schnell for 16 samples. On a CPU it is smaller and in fp32.

    in_fp8: with one scale per tensor, else in bf16.
    """
    M, K, N = 8192, 3072, 12288
    dtype = torch.bfloat16
    if device.type == "cpu":
        M, K, N = 512, 512, 2048
        dtype = torch.float32
    x, weight = (torch.randn(rows, K, device=device, dtype=dtype) for rows in (M, N))
    if in_fp8:
        x, weight = (side.to(support(architecture(device)).forward) for side in (x, weight))
    one = torch.ones((), device=device)

    def product() -> torch.Tensor:
        return scaled_mm(x, weight.t(), one, one, fast=True) if in_fp8 else x @ weight.t()

    return 2 * M * K * N / seconds(product) / 1e12


def copy(device: torch.device, _: dist.ProcessGroup) -> float:
    """TB/s that a copy reads and writes."""
    source = torch.zeros((64 if device.type == "cpu" else 1024) << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source)) / 1e12


def all_reduce(device: torch.device, group: dist.ProcessGroup) -> float:
    """GB/s that a rank moves: 2 (n - 1) / n of the bytes over the time, the bus bandwidth."""
    tensor = torch.zeros((1 if device.type == "cpu" else 64) << 20, device=device)
    span = seconds(lambda: dist.all_reduce(tensor, group=group), TIMES)
    return 2 * (1 - 1 / group.size()) * tensor.nbytes / span / 1e9


DEVICES = "look at its devices' temperature, power limit, clocks and other programs"
KINDS: dict[str, tuple[Callable[..., float], str, str]] = {  # what is measured: how, its unit, the remedy
    "matrix product": (multiply, "TFLOP/s", DEVICES),
    "matrix product in FP8": (partial(multiply, in_fp8=True), "TFLOP/s", DEVICES),
    "copy of memory": (copy, "TB/s", DEVICES),
    "all-reduce inside the node": (all_reduce, "GB/s", "look at the links between its devices"),
    "all-reduce with a neighbour": (all_reduce, "GB/s", "look at its network cards, cables and switch ports"),
}


def rounds(size: int, per_node: int, has_fp8: bool = False) -> list[tuple[str, list[list[int]]]]:
    """What is measured, and the ranks that take part together. No rank is in two groups of a round."""
    product, in_fp8, copied, inside, with_neighbour = KINDS
    everyone = [[*range(size)]]
    nodes = [[*range(first, first + per_node)] for first in range(0, size, per_node)]
    pairs = [one + other for one, other in pairwise(nodes)]
    found = [
        (product, everyone),
        (in_fp8, everyone if has_fp8 else []),
        (copied, everyone),
        (inside, nodes if per_node > 1 else []),
        (with_neighbour, pairs[::2]),
        (with_neighbour, pairs[1::2]),
    ]
    return [(what, groups) for what, groups in found if groups]


def limited(measure: Callable[[], float], device: torch.device, wait_s: float) -> float:
    """A speed; 0, with a line that says why, for what fails or hangs. What hangs is left behind in its thread."""

    def work() -> float:
        torch.get_device_module(device).set_device(device)
        return measure()

    try:
        return ThreadPoolExecutor(1).submit(work).result(wait_s)
    except Exception as error:
        why = str(error).partition("\n")[0] or f"a measurement hangs for {wait_s:g} s"
        print(f"preflight: rank {os.environ.get('RANK', 0)} on {os.uname().nodename}: {why}", file=sys.stderr)
        return 0.0


def has_fp8(device: torch.device) -> bool:
    """Whether a device multiplies in FP8."""
    with suppress(Refusal):
        return has_kernel(device) and bool(support(architecture(device)))
    return False


def rates(world: ranks.World, medians: dict[str, float]) -> dict[str, object]:
    """What tools/plan/plan.py knows of a card, as measured. A link that no round has measured has rate 0."""
    if world.device.type == "cpu":
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        memory = torch.get_device_module(world.device).get_device_properties(world.device).total_memory
    product, in_fp8, copied, inside, with_neighbour = (medians.get(what, 0.0) for what in KINDS)
    node = world.size // world.replicas
    return {
        "arch": architecture(world.device),
        "memory_gb": memory / 1e9,
        "memory_tb_s": copied,
        "bf16_tflops": product,
        "fp8_tflops": in_fp8,
        "node": node,
        "domain": node,
        "scale_up_gb_s": inside,
        "scale_out_gb_s": with_neighbour / node,
    }


def judge(names: list[str], what: str, speeds: np.ndarray, median: float, slow: float) -> tuple[str, dict[str, str]]:
    """A line for the median and the lowest speed, and a complaint about each unfit node, by its name.

    names, speeds: of the nodes of all ranks; NaN was not measured. slow: a share of the median speed.
    """
    _, unit, remedy = KINDS[what]
    line = f"{what}: the median {median:.3g} {unit}, the lowest {np.nanmin(speeds):.3g}"
    complaints = {
        name: f"preflight: {name}: {what} {speed:.3g} {unit}, the median {median:.3g}; {remedy}"
        for name, speed in zip(names, speeds)
        if speed <= slow * median
    }
    return line, complaints


def survey(world: ranks.World, wait_s: float, mark: Callable[[str], None]) -> dict[str, np.ndarray]:
    """Speeds of all ranks; NaN where a rank took no part. mark: called with what begins. Collective.

    Ends after a round with a speed of 0: a device may be blocked then.
    """
    host = ranks.host_group("preflight")
    found: dict[str, np.ndarray] = {}
    for what, groups in rounds(world.size, world.size // world.replicas, has_fp8(world.device)):
        mark(what)
        measure, *_ = KINDS[what]
        speed = math.nan
        for members in groups:
            group = dist.new_group(members)
            if isinstance(group, dist.ProcessGroup):  # other ranks get a number
                speed = limited(partial(measure, world.device, group), world.device, wait_s)
        speeds = ranks.gather_objects(speed, host)
        found[what] = np.fmax(speeds, found.get(what, speeds))
        if 0.0 in speeds:
            break
    return found


def check(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("torchrun -m tools.preflight", __doc__)
    parser.add_argument("--wait", type=between(1, 86400, float), default=120.0)
    parser.add_argument("--slow", type=between(0, 0.99, float), default=0.8)
    json_option(parser)
    args = parser.parse_args(argv)
    with Watchdog("preflight", 3 * args.wait) as alive:  # else all would wait for ever for a node that hangs
        world = ranks.start(ParallelConfig())
        alive.share(world.store)
        names = ranks.gather_objects(os.environ.get("SLURMD_NODENAME", os.uname().nodename))
        found = survey(world, args.wait, alive.mark)
    medians = {what: median_high(speeds[~np.isnan(speeds)]) for what, speeds in found.items()}
    lines: list[str] = []
    bad: set[str] = set()
    for what, speeds in found.items():
        line, complaints = judge(names, what, speeds, medians[what], args.slow)
        lines += [line, *complaints.values()]
        bad |= complaints.keys()
    lines.append(f"preflight: bad nodes: {','.join(sorted(bad))}" if bad else "preflight: all nodes are fit")
    if world.rank == 0:
        show("\n".join(lines), rates(world, medians), args.json)
    return Fault.exit_code if bad else 0


if __name__ == "__main__":
    exit_now(run("preflight", check, sys.argv[1:]))  # at once: a measurement that hangs would keep the process
