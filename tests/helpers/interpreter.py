"""Triton kernels that Inductor wrote for a GPU, executed on CPU tensors by Triton's interpreter.

Import this with TRITON_INTERPRET=1 in the environment: Triton then never compiles. The interpreter shows indices,
masks and arithmetic. It does not show the rounding of a GPU's instructions, races, or autotuned configurations.
"""

import inspect
import itertools
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as triton_interpreter
from torch import Tensor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime import triton_helpers, triton_heuristics

FLOATS = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp8e4b8": torch.float8_e4m3fnuz,
    "fp8e5b16": torch.float8_e5m2fnuz,
}
BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
LINE, TILE, AREA, STEP = 4096, 128, 16384, 64  # elements of a block: 1-D; a side in 2-D; a reduction; its loop's step
MARGIN = 1 << 16  # bytes behind a tensor
FILLS = itertools.cycle(range(0x70, 0x80))  # huge floats; neighbours differ, so that a copy of a margin is seen, too


def install() -> None:
    """Make the interpreter round as torch does, and Inductor's decorators leave functions alone."""
    triton_interpreter._convert_float = converted  # its own truncates bf16 and rounds FP8 without a carry
    triton_helpers.set_driver_to_gpu = lambda: None
    for name in ("pointwise", "reduction", "persistent_reduction"):
        setattr(triton_heuristics, name, lambda *_, **__: lambda function: function)


def converted(data: np.ndarray, source, target, rounding: object = None) -> np.ndarray:
    """Floats of a Triton type as those of another; both are arrays of any type of their width."""
    before, after = FLOATS[str(source)], FLOATS[str(target)]
    bits = torch.from_numpy(np.array(data)).view(BITS[before.itemsize])
    return bits.view(before).to(after).view(BITS[after.itemsize]).numpy()


class Libdevice:
    """Inductor's calls of CUDA's or HIP's mathematics, by torch in fp32, so that a reference has the same roundings."""

    def __getattr__(self, name: str) -> Callable:
        function = torch.round if name == "nearbyint" else getattr(torch, name)

        def call(x: tl.tensor) -> tl.tensor:
            data = function(torch.from_numpy(np.array(x.handle.data))).numpy()
            return tl.tensor(triton_interpreter.TensorHandle(data, tl.float32), x.type)

        return call


class Kernel:
    """One kernel. source: the text that Inductor gave to Triton."""

    def __init__(self, name: str, source: str):
        self.name, self.source = name, source
        module = PyCodeCache.load(source)
        module.libdevice = Libdevice()
        self.function = getattr(module, name)
        self.parameters = list(inspect.signature(self.function.fn).parameters)

    def outputs(self, names: list[str]) -> list[str]:
        """Those of the arguments' names that are written."""
        return [name for name, own in zip(names, self.parameters) if own.startswith(("out_ptr", "in_out_ptr"))]

    def __call__(self, *args: object) -> None:
        given = dict(zip(self.parameters, args))
        most = {"XBLOCK": TILE if "YBLOCK" in self.parameters else LINE, "YBLOCK": TILE, "R0_BLOCK": STEP}
        if "r0_numel" in given:
            columns = STEP if "R0_BLOCK" in self.parameters else triton.next_power_of_2(given["r0_numel"])
            rows = TILE if "YBLOCK" in self.parameters else 1
            most["XBLOCK"] = max(1, AREA // (columns * rows))
        blocks = {name: size for name, size in most.items() if name in self.parameters}
        grid = [triton.cdiv(given.get(f"{axis}numel", 1), blocks.get(f"{axis.upper()}BLOCK", 1)) for axis in "xyz"]
        self.function[tuple(grid)](*args, **blocks)


def guarded(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An unwritten tensor before a margin that no kernel may write. Both read as huge numbers or NaN."""
    elements = 1 + sum((length - 1) * step for length, step in zip(size, stride))
    storage = torch.full((elements * dtype.itemsize + MARGIN,), next(FILLS), dtype=torch.uint8).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, size, stride)


def is_intact(tensor: Tensor) -> bool:
    """Whether the margin of a `guarded` tensor, or of a view of one, is unwritten. No block reaches its last byte."""
    margin = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[-MARGIN:]
    return bool((margin == margin[-1]).all())


def copied(value: object) -> object:
    """A `guarded` copy of a tensor; what is no tensor stays."""
    if not isinstance(value, Tensor):
        return value
    return guarded(value.shape, value.stride(), value.dtype).copy_(value)
