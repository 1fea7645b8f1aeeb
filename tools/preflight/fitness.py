"""How fast one device multiplies and sums with others: nodes.py starts it once per device.

python -m tools.preflight.fitness RANK SIZE DEVICE HOST:PORT NAME        SIZE such processes form the group NAME
"""

import json
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from flux_ref import ranks

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


def multiply(device: torch.device) -> float:
    """TFLOP/s of a square product, bf16 on an accelerator, fp32 on the CPU."""
    rows, dtype = (512, torch.float32) if device.type == "cpu" else (16384, torch.bfloat16)
    matrix = torch.ones(rows, rows, device=device, dtype=dtype)
    out = torch.empty_like(matrix)
    return 2 * rows**3 / seconds(lambda: torch.mm(matrix, matrix, out=out), device) / 1e12


def all_reduce(device: torch.device) -> float:
    """GB/s that a rank moves: 2 (n - 1) / n of the bytes over the time, the bus bandwidth; 0 for one rank.

    Raises: RuntimeError if the sum is wrong.
    """
    size = dist.get_world_size()
    count = (1 if device.type == "cpu" else 64) << 20  # of float32
    tensor = torch.full((count,), float(dist.get_rank()), device=device)
    dist.all_reduce(tensor)
    if not bool((tensor == size * (size - 1) / 2).all()):
        raise RuntimeError("an all-reduce gave a wrong sum; the device or the network corrupts data")
    tensor.zero_()
    span = seconds(lambda: dist.all_reduce(tensor), device)
    return 2 * (size - 1) / size * tensor.nbytes / span / 1e9


def measure(rank: int, size: int, number: int, address: str, name: str) -> dict[str, object]:
    """What the process on device `number` of its node finds. Raises: RuntimeError."""
    device = torch.device("cpu")
    found = {"device": "CPU"}
    if torch.accelerator.is_available():
        if number >= torch.accelerator.device_count():
            raise RuntimeError(f"device {number} is missing: there are {torch.accelerator.device_count()}")
        device = torch.device(torch.accelerator.current_accelerator().type, number)
        torch.accelerator.set_device_index(number)
        of_kind = torch.get_device_module(device)
        free, total = of_kind.mem_get_info(number)
        found = {"device": of_kind.get_device_name(number), "free_gb": free / 1e9, "total_gb": total / 1e9}
    host, _, port = address.rpartition(":")
    store = dist.PrefixStore(name, dist.TCPStore(host, int(port), timeout=timedelta(seconds=600)))
    ranks.join(device, store, rank, size)
    return found | {"tflops": multiply(device), "gb_per_s": all_reduce(device)}


if __name__ == "__main__":
    rank, size, number, address, name = sys.argv[1:]
    print(json.dumps(measure(int(rank), int(size), int(number), address, name)), flush=True)
    dist.destroy_process_group()
