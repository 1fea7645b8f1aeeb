"""Recording device work as graphs, and kernels of attention: the second file that names a kind of device.

parallel.py is what every accelerator needs. Graphs are not: a port may leave this file with an `obstacle` for every
device, and all steps run eagerly.
"""

import os
from collections.abc import Callable

import torch

from flux_ref.errors import Fault

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
REGISTER = "NCCL_GRAPH_REGISTER"
HIP_SINCE = (2, 12)


def guard_expandable() -> None:
    """Keep NCCL from registering the buffers of graphs if they lie in segments that grow; before NCCL starts.

    Source: github.com/pytorch/pytorch issue 158029, wrong addresses and hangs.
    """
    if _expandable():
        os.environ.setdefault(REGISTER, "0")


def _expandable() -> bool:
    settings = ",".join(os.environ.get(name, "") for name in ALLOCATOR).replace(" ", "").lower()
    return "expandable_segments:true" in settings


def obstacle(device: torch.device, asked: bool) -> str:
    """Why steps cannot be captured on a device, or should not be unless asked for; "" if nothing is in the way."""
    if device.type != "cuda":
        return f"a device of type {device.type} captures no graphs"
    if torch.version.hip and torch.__version__ < HIP_SINCE:
        # github.com/pytorch/pytorch issue 177309: RCCL's watchdog, a thread of its own, breaks a capture.
        return f"torch {torch.__version__} cannot capture collectives on HIP; it takes torch 2.12"
    if torch.version.hip and not asked:
        return "on HIP graphs are captured only when asked for"
    if _expandable() and os.environ.get(REGISTER, "0") != "0":
        return f"{REGISTER}={os.environ[REGISTER]} does not go with expandable_segments; unset it"
    return ""


class Recorder:
    """Captures work as graphs that share one pool of memory; they run on the stream on which they were captured.

    From the moment it is made, its stream is the current one of this thread. So the copies that fill buffers, the
    warm-up, the replays and whatever reads their results come one after the other on the device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.synchronize()  # what the stream before has begun
        self.stream = torch.cuda.Stream(device)
        torch.cuda.set_stream(self.stream)
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The work as a graph with `replay` and `reset`; nothing of it is executed. Raises: Fault."""
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: NCCL's watchdog and other threads may go on calling the device.
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            root = error.__context__ or error  # the capture's end fails, too, and says less
            reason = str(root).partition("\n")[0]
            raise Fault(f"a step cannot be captured: {reason}; set graph.enabled=off", alone=True) from error
        return graph

    def synchronize(self) -> None:
        """sync: the host waits until the device has done all that it was given."""
        torch.cuda.synchronize(self.device)
