"""Recording device work as graphs, and what stands in the way of it. step_runner.py decides what is recorded.

A port to another device may answer every `obstacle` with a reason: then all steps run eagerly.
"""

import os
import warnings
from collections.abc import Callable

import torch

from flux_ref.config import Config
from flux_ref.errors import Fault

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
REGISTER = "NCCL_GRAPH_REGISTER"
HIP_SINCE = (2, 12)  # version of torch
# AdamW can be captured on a device. Eager steps are no mistake, but every rank would warn of them.
warnings.filterwarnings("ignore", message="This instance was constructed with capturable=True")


def guard_expandable() -> None:
    """Turn off NCCL's registration of graph buffers if the allocator uses expandable segments. Call before NCCL starts.

    Source: github.com/pytorch/pytorch issue 158029, wrong addresses and hangs.
    """
    if _is_expandable():
        os.environ.setdefault(REGISTER, "0")


def _is_expandable() -> bool:
    settings = ",".join(os.environ.get(name, "") for name in ALLOCATOR).replace(" ", "").lower()
    return "expandable_segments:true" in settings


def obstacle(device: torch.device, cfg: Config) -> str:
    """Why the steps of a run cannot be captured on a device; "" if they can."""
    if device.type != "cuda":
        return f"a device of type {device.type} captures no graphs"
    if torch.version.hip and torch.__version__ < HIP_SINCE:
        # github.com/pytorch/pytorch issue 177309: the thread of RCCL's watchdog breaks a capture.
        return f"torch {torch.__version__} cannot capture collectives on HIP; it takes torch 2.12"
    if torch.version.hip and cfg.graph.enabled != "on":
        return "on HIP graphs are captured only when asked for"
    if _is_expandable() and os.environ.get(REGISTER, "0") != "0":
        return f"{REGISTER}={os.environ[REGISTER]} does not go with expandable_segments; unset it"
    return ""


class Recorder:
    """Captures work as graphs that share one pool of memory, on a stream of its own.

    From its creation on, its stream is the current stream of this thread. Copies into buffers, the warm-up, replays and
    reads of results therefore follow one another on the device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.synchronize()  # the previous stream may still be at work
        self.stream = torch.cuda.Stream(device)
        torch.cuda.set_stream(self.stream)
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The work as a graph with `replay` and `reset`. The device executes nothing of it.

        Raises: Fault, torch.OutOfMemoryError.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: NCCL's watchdog and other threads may go on calling the device.
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            root = error.__context__ or error  # the end of the capture fails too, with a vaguer message
            if isinstance(root, torch.OutOfMemoryError):
                raise root from None
            reason = str(root).partition("\n")[0]
            raise Fault(f"a step cannot be captured: {reason}; set graph.enabled=off", alone=True) from error
        return graph

    def bytes_of(self, work: Callable[[], None]) -> int:
        """Do eager work. Returns the bytes that the allocator takes from the device for it."""
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_reserved()
        work()
        return torch.accelerator.max_memory_reserved() - before

    def free_bytes(self) -> int:
        """Bytes of the device that eager work may take. It cannot use the memory of graphs."""
        torch.accelerator.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def synchronize(self) -> None:
        """sync: the host waits until the device has done all its work."""
        torch.cuda.synchronize(self.device)
