"""What Inductor makes of a module for a GPU that is not there: kernels as text, matrix products, attention, memory.

The module is traced on the CPU with fake tensors, as autograd would ask a driver for "cuda". Then every tensor of the
graph moves to "cuda:0", and Inductor writes its code. Here the code is read; tests interpret it.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.graph import GraphLowering
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from bench.static.absent_gpu import AbsentGpu
from bench.static.traffic import traffic

DEVICE = torch.device("cuda:0")
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "scaled_mm"}
CALL = re.compile(r"(triton_\w+)\.run\(")


@dataclass
class Count:
    """What one direction of a part does. Matrix products and attention are apart from kernels.

    launches: of each kernel. sizes: bytes that one launch reads and writes.
    products: (operator, left side, right side) and how often.
    """

    launches: Counter = field(default_factory=Counter)
    sizes: dict[str, float] = field(default_factory=dict)
    products: Counter = field(default_factory=Counter)
    attentions: Counter = field(default_factory=Counter)

    @property
    def bytes(self) -> float:
        return sum(self.sizes[name] * times for name, times in self.launches.items())

    def add(self, name: str, size: float, times: int = 1) -> None:
        """Kernels without a text, known by what they move."""
        self.launches[name] += times
        self.sizes[name] = size


def compile_for(gpu: AbsentGpu, module: nn.Module, inputs: tuple, options: dict, budget: float) -> list[Count]:
    """[forward, backward] of a module of fake CPU tensors, called with fake inputs, of which some need gradients.

    options: of torch.compile, as training gives them. budget: parallel.activation_budget.
    """
    passes: list[Count] = []
    codes: list[str] = []
    sources: dict[str, str] = {}

    def inner(graph: fx.GraphModule, example_inputs: list, **rest):
        passes.append(_read(graph))
        return lower(gpu, graph, example_inputs, **rest)

    with collecting(lambda lowering, code: codes.append(code), sources, budget):
        try:
            compiled(module, inner, options)(*inputs)
        except Exception:  # the code is written; calling it fails at the absent driver
            if len(codes) < 2:
                raise
    for one, code in zip(passes, codes, strict=True):
        calls = Counter(CALL.findall(code[code.index("def call(") :]))
        one.launches |= calls
        one.sizes |= {name: traffic(sources[name]) for name in calls}
    return passes


def compiled(module: nn.Module, inner: Callable, options: dict) -> Callable:
    """torch.compile as training calls it, but for what makes code of the graph of a direction: `inner`."""

    def backend(graph: fx.GraphModule, example_inputs: list):
        return compile_fx.compile_fx(graph, example_inputs, inner_compile=inner, config_patches=options)

    torch._dynamo.reset()  # it limits how often one function is compiled
    return torch.compile(module, fullgraph=True, dynamic=False, backend=backend)


def lower(gpu: AbsentGpu, graph: fx.GraphModule, example_inputs: list, **rest):
    """What Inductor makes of a direction's graph on an absent GPU. The graph changes."""
    mode = next(value.fake_mode for value in example_inputs if isinstance(value, FakeTensor))
    _move(graph, mode)
    gpu.present = True
    try:
        return compile_fx.compile_fx_inner(graph, [_moved(value, mode) for value in example_inputs], **rest)
    finally:
        gpu.present = False


def one_attention() -> contextlib.AbstractContextManager:
    """While inside, attention is one call on every device."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True)[0]

    return mock.patch.object(F, "scaled_dot_product_attention", attention)


@contextlib.contextmanager
def collecting(keep: Callable[[GraphLowering, str], None], sources: dict[str, str], budget: float) -> Iterator[None]:
    """While inside, Inductor keeps its kernels as text, and writes the backward with the forward.

    keep: is given each direction's graph of buffers and its code. sources: receives the texts of Triton kernels.
    """
    generate = GraphLowering.codegen

    def codegen(self):
        result = generate(self)
        keep(self, result[0].value)
        return result

    def keep_kernel(self, name: str, source: str, device_str: str = "cuda"):
        sources[name] = source
        return SimpleNamespace(run=lambda *_, **__: None)

    with contextlib.ExitStack() as stack:
        for target, name, replacement in (
            (AsyncCompile, "triton", keep_kernel),
            (AsyncCompile, "warm_pool", classmethod(lambda cls: None)),
            (AsyncCompile, "use_process_pool", classmethod(lambda cls: False)),
            (GraphLowering, "codegen", codegen),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        stack.enter_context(one_attention())
        stack.enter_context(torch._inductor.config.patch(force_disable_caches=True, compile_threads=1))
        later = {"activation_memory_budget": budget, "force_non_lazy_backward_lowering": True}
        stack.enter_context(torch._functorch.config.patch(later))
        yield


def _moved(value: object, mode) -> object:
    if not isinstance(value, FakeTensor) or value.device.type != "cpu":
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)


def _move(graph: fx.GraphModule, mode) -> None:
    """Put every tensor and device argument of a graph on DEVICE."""

    def device(value: object) -> object:
        return DEVICE if isinstance(value, torch.device) and value.type == "cpu" else value

    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(lambda value: _moved(value, mode), node.meta["val"])
        node.args, node.kwargs = (tuple(map(device, node.args)), {k: device(v) for k, v in node.kwargs.items()})


def product(name: str, given: list[Tensor]) -> tuple:
    """(operator, left side, right side) of a matrix product; a side is (shape, strides, dtype)."""
    sides = [tensor for tensor in given if tensor.ndim > 1][-2:]
    return (name, *((tuple(side.shape), side.stride(), str(side.dtype).removeprefix("torch.")) for side in sides))


def is_row_times_column(product: tuple) -> bool:
    """Whether an H200 takes a product: in FP8 it multiplies rows by columns alone."""
    name, (_, left, _), (_, right, _) = product
    return name != "scaled_mm" or (left[1], right[0]) == (1, 1)


def _read(graph: fx.GraphModule) -> Count:
    """The products and the attention calls of a direction."""
    found = Count()
    for node in graph.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        name = schema.name.partition("::")[2] if schema else ""
        if name in PRODUCTS:
            given = [arg.meta["val"] for arg in node.args if isinstance(arg, fx.Node)]
            found.products[product(name, given)] += 1
        elif "scaled_dot_product" in name:
            found.attentions[(name, tuple(node.args[0].meta["val"].shape))] += 1
    return found
