"""A GPU that is not there, but answers torch's questions, so that Inductor and Triton write code for it.

Inductor asks a device for its name, its size and its Triton target, and computes nothing on it. The answers replace
parts of `torch.cuda` and cannot be taken back: a process has one such GPU and should do nothing else.
"""

from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch._dynamo.device_interface
import torch._subclasses.fake_tensor
import torch.utils._triton

from flux_ref.errors import Refusal

OPTIN_KIB = {"cuda": 227, "hip": 64}


class Gpu(NamedTuple):
    """What Inductor asks of a device. units: SMs or CUs."""

    card: str  # its name in hardware.toml
    name: str
    major: int
    minor: int
    units: int
    kind: str  # Triton's backend: "cuda" or "hip"


# Sources: CUDA C++ Programming Guide, compute capabilities; AMD Instinct data sheets.
GPUS = {
    "sm90": Gpu("h200", "NVIDIA H200", 9, 0, 132, "cuda"),
    "sm100": Gpu("b200", "NVIDIA B200", 10, 0, 148, "cuda"),
    "gfx942": Gpu("mi300x", "AMD Instinct MI300X", 9, 4, 304, "hip"),
    "gfx950": Gpu("mi355x", "AMD Instinct MI355X", 9, 5, 256, "hip"),
}


def properties(arch: str) -> SimpleNamespace:
    """What torch.cuda.get_device_properties returns for an architecture."""
    gpu = GPUS[arch]
    shared = OPTIN_KIB[gpu.kind] * 1024
    return SimpleNamespace(
        name=gpu.name,
        major=gpu.major,
        minor=gpu.minor,
        multi_processor_count=gpu.units,
        warp_size=64 if gpu.kind == "hip" else 32,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        total_memory=141 << 30,
        L2_cache_size=50 << 20,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=shared,
        shared_memory_per_multiprocessor=shared,
        gcnArchName=f"{arch}:sramecc+:xnack-",
    )


class AbsentGpu:
    """Call once per process. `present` is True only while Inductor works: Dynamo would ask the driver for more.

    Raises: Refusal without Triton.
    """

    def __init__(self, arch: str):
        try:
            import triton
            from triton.backends.compiler import GPUTarget
        except ImportError as error:
            raise Refusal(
                "bench.static needs Triton; install a build of torch for GPUs (it runs without one)"
            ) from error
        gpu, self.arch, self.present = GPUS[arch], arch, False
        number = arch if gpu.kind == "hip" else gpu.major * 10 + gpu.minor
        self.target = GPUTarget(gpu.kind, number, 64 if gpu.kind == "hip" else 32)
        self.properties = properties(arch)
        if gpu.kind == "hip":
            torch.version.hip, torch.version.cuda = "7.2.0", None
        self._answer_torch()
        utils = SimpleNamespace(get_device_properties=self._triton_properties)
        driver = SimpleNamespace(get_current_target=lambda: self.target, get_current_device=lambda: 0, utils=utils)
        triton.runtime.driver.set_active(driver)
        self.present = True
        for question in ("has_triton", "triton_backend"):  # torch 2.11 remembers the first answer
            getattr(torch.utils._triton, question)()
        self.present = False

    def _answer_torch(self) -> None:
        cuda = torch.cuda
        cuda.is_available = cuda.is_initialized = lambda *_: self.present
        cuda.device_count, cuda.current_device, cuda._lazy_init = (lambda: 1), (lambda: 0), (lambda: None)
        cuda.get_device_properties = lambda device=None: self.properties
        cuda.get_device_capability = lambda device=None: (self.properties.major, self.properties.minor)
        cuda.get_device_name = lambda device=None: self.properties.name
        cuda.is_bf16_supported = lambda *_, **__: True
        cuda.get_rng_state, cuda.set_rng_state = (lambda *_: torch.empty(0)), (lambda *_: None)
        cuda.synchronize = lambda *_: None
        # Two functions, because Dynamo keeps a table of functions.
        cuda._exchange_device, cuda._maybe_exchange_device = (lambda index: 0), (lambda index: 0)
        torch._subclasses.fake_tensor.init_gpu_context = lambda device=None: None
        interface = torch._dynamo.device_interface.CudaInterface
        for name in ("is_available", "device_count", "current_device", "get_device_properties"):
            setattr(interface, name, staticmethod(getattr(cuda, name)))
        interface.Worker.get_device_properties = staticmethod(cuda.get_device_properties)

    def _triton_properties(self, index: int) -> dict[str, int]:
        own = self.properties
        shared = own.shared_memory_per_block_optin
        return {"max_shared_mem": shared, "multiprocessor_count": own.multi_processor_count, "warpSize": own.warp_size}
