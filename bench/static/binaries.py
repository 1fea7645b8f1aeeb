"""Registers, spills, shared memory and store widths of generated kernels: Triton compiles them without a device.

Source: cuobjdump's resource usage (it comes with Triton) and PTX for NVIDIA, the AMDGCN text for AMD.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from bench.static.absent_gpu import AbsentGpu

STORE = re.compile(r"st\.global(?:\.[A-Za-z_0-9:]+)*?(?:\.v(\d))?\.b(\d+)|(?:global|buffer)_store_(\w+)")
AMD_BYTES = {"byte": 1, "byte_d16_hi": 1, "short": 2, "short_d16_hi": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12}


class Binary(NamedTuple):
    """One configuration of a kernel. Autotuning on the device takes the fastest of all configurations.

    registers: per thread. spilled: bytes of stack per thread (NVIDIA) or spilled registers (AMD).
    stores: how many instructions store how many bytes.
    """

    warps: int
    registers: int
    spilled: int
    shared: int
    stores: dict[int, int]


def binaries(gpu: AbsentGpu, name: str, source: str) -> list[Binary]:
    """Every configuration that Triton compiles for a kernel. A configuration that it refuses is left out."""
    import triton
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.runtime import triton_helpers
    from triton.compiler import ASTSource

    triton_helpers.set_driver_to_gpu = lambda: None
    kernel, found = getattr(PyCodeCache.load(source), name), []
    for config in kernel.configs:
        meta = kernel._create_compile_meta(config)
        text = ASTSource(kernel.fn, meta["signature"], meta["constants"], meta["configs"][0])
        try:
            compiled = triton.compile(text, target=gpu.target, options=kernel._create_compile_options(config, meta))
        except triton.runtime.errors.OutOfResources:
            continue
        read = _amd if gpu.target.backend == "hip" else _nvidia
        found.append(read(compiled, config.num_warps))
    return found


def _nvidia(compiled, warps: int) -> Binary:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return Binary(warps, registers, stack, compiled.metadata.shared, _stores(compiled.asm["ptx"]))


def _amd(compiled, warps: int) -> Binary:
    text = compiled.asm["amdgcn"]
    names = ("vgpr_count", "vgpr_spill_count", "group_segment_fixed_size")
    registers, spilled, shared = (int(re.search(rf"\.{name}:\s+(\d+)", text)[1]) for name in names)
    return Binary(warps, registers, spilled, shared, _stores(text))


def _stores(text: str) -> dict[int, int]:
    counts = Counter()
    for vector, bits, amd in STORE.findall(text):
        counts[AMD_BYTES.get(amd, 16) if amd else int(vector or 1) * int(bits) // 8] += 1
    return dict(sorted(counts.items()))
