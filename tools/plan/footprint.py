"""What a region of blocks keeps for backward, needs while it computes, moves and multiplies: counted, not measured.

One region of each kind runs on fake tensors, which have shapes and storages but no memory. Eager regions run operation
by operation. Compiled regions are traced and partitioned as in torch.compile, with the config's activation budget. The
count does not look inside an operation, so it misses the workspaces of kernels. It runs the CPU's operations; a GPU's
eager RMSNorm is one operation and keeps less.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from flux_ref import flow, ranks, sharding
from flux_ref.config import Config, ModelConfig
from flux_ref.data import fields
from flux_ref.model import Flux, parameter_table
from flux_ref.pictures import autoencoder
from flux_ref.precision import fp8, linear, policy
from flux_ref.sharding import DTYPES
from tools.shared import communication
from tools.shared.communication import Layout

# Plans are traced on a CPU, whose attention torch 2.11 cannot count. Query, key and value come in the same order.
COUNTED = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}


class Product(NamedTuple):
    """A matrix product or attention."""

    flop: float
    moved: float  # bytes that it reads and writes
    is_fp8: bool


@dataclass(frozen=True)
class Work:
    """What one pass computes: its products, and the bytes that everything else reads and writes."""

    moved: float
    products: tuple[Product, ...]


@dataclass(frozen=True)
class Footprint:
    """What one region, or the ends of the net, needs for one micro-batch."""

    saved: float  # stays from forward until backward; includes the output
    forward: float  # most memory in forward, above the inputs
    backward: float  # most memory in backward, above all that is saved; includes gradients of unsharded weights
    evaluate: float  # most memory without gradients, above the inputs
    draw: float  # the same without the compiler, as pictures are drawn
    forward_work: Work
    backward_work: Work


def trace(cfg: Config, arch: str, rows: int) -> dict[str, Footprint]:
    """{"double 1": footprint of a region of one double block, ..., "ends": of the embedders, the head and the loss}.

    It has every kind and length of region in the config, for micro-batches of so many rows. arch: the kind of device,
    as fp8.architecture names it; it decides the layouts of FP8.
    """
    model = cfg.model
    dtype = DTYPES[cfg.parallel.dtype]
    image = model.image_tokens
    text = model.text_tokens
    footprints = {}
    # The tensors claim to be on a CPU, which would decode FP8. The traced device has a kernel for it.
    with FakeTensorMode(), patch.object(fp8, "has_kernel", lambda device: True):
        for kind, lengths in communication.region_lengths(cfg).items():
            for length in sorted(set(lengths)):
                net = _net(cfg, arch, length)
                region = getattr(net, f"{kind}_blocks")[0]
                sizes = (image, text) if kind == "double" else (text + image,)
                streams = tuple(torch.zeros(rows, n, model.hidden, dtype=dtype, requires_grad=True) for n in sizes)
                vec = torch.zeros(rows, model.hidden, dtype=dtype, requires_grad=True)
                inputs = (*streams, vec, net.rope)
                compiled = cfg.parallel.compile
                found = _compiled(region, inputs, cfg) if compiled else _run(region, *inputs)
                footprints[f"{kind} {length}"] = found
        batch = {}
        for name, (shape, kind) in fields(model).items():
            batch[name] = torch.zeros((rows, *shape), dtype=kind)
        ends = _net(cfg, arch, 0)  # without blocks; it and the loss are never compiled
        footprints["ends"] = _run(lambda: flow.losses(ends, batch, dtype).sum())
    return footprints


@cache
def decoding(model: ModelConfig) -> float:
    """Bytes of the autoencoder, and of what it needs to decode one latent. It is on the card only meanwhile."""
    with FakeTensorMode(), torch.no_grad():
        net = autoencoder.Autoencoder().to_empty(device="cpu")
        z_1CYX = torch.zeros(1, *model.latent_shape)
        with Live() as live:
            _, _, most, _ = live.above(lambda: net.decode(z_1CYX))
        return _nbytes(list(net.parameters())) + most


def layout(cfg: Config, gpus: int, node: int) -> Layout:
    """How FSDP2 splits the net over so many GPUs, `node` of them to a host.

    Raises: Refusal if parallel.replicate does not fit.
    """
    hosts = [str(rank // node) for rank in range(gpus)]
    replicas = ranks.replica_count(cfg.parallel.replicate, hosts)
    return communication.layout(cfg, parameter_table(cfg.model), gpus, replicas)


def _net(cfg: Config, arch: str, length: int) -> Flux:
    """A net in the compute dtype with one region of each kind, of so many blocks."""
    before = torch.get_default_dtype()
    # Delayed scales differ by scalars only, and by a reduction per tensor that is not fused with its cast.
    preset = "fp8" if policy.layers_with_delayed_scales(cfg) else cfg.precision.preset
    model = dataclasses.replace(cfg.model, double_blocks=length, single_blocks=length)
    cfg = dataclasses.replace(cfg, model=model, precision=dataclasses.replace(cfg.precision, preset=preset))
    torch.set_default_dtype(DTYPES[cfg.parallel.dtype])  # fake tensors cannot be cast in place
    try:
        net = Flux(model)
    finally:
        torch.set_default_dtype(before)
    linear.convert(net, cfg, arch)
    coded = () if cfg.parallel.compile else policy.layers_gathered_in_fp8(cfg)  # aot_function counts a cast instead
    for name in coded:
        net.get_submodule(name).encode()
    parallel = dataclasses.replace(cfg.parallel, region_blocks=max(1, length))
    net.double_blocks = sharding.regions(net.double_blocks, parallel)
    net.single_blocks = sharding.regions(net.single_blocks, parallel)
    return net


class Live(TorchDispatchMode):
    """Counts the bytes of storages that operations made and that still live, what they move and what they multiply."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = self.moved = 0
        self.products: list[Product] = []
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = _tensors(result)
        given = _tensors((args, kwargs))
        old = _identities(given)
        if is_product(func):
            self.products.append(count(func, args, kwargs, result))
        elif func._schema.is_mutable or not _identities(made) <= old:
            self.moved += _nbytes(given) + _nbytes(made)
        for tensor in made:
            if tensor.untyped_storage()._cdata not in old:  # else a view, or changed in place
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = storage.nbytes()
            self.now += storage.nbytes()
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def above(self, task: Callable[[], object]) -> tuple[object, int, int, Work]:
        """Run a task: (its result, how much more lives after it, how much more lived at most meanwhile, its work)."""
        before = self.peak = self.now
        self.moved = 0
        self.products = []
        result = task()
        return result, self.now - before, self.peak - before, Work(self.moved, tuple(self.products))


def is_product(func: object) -> bool:
    """Whether torch counts the arithmetic of an operation: it is a matrix product or attention."""
    return isinstance(func, torch._ops.OpOverload) and _counted(func) in flop_registry


def _counted(func: torch._ops.OpOverload) -> torch._ops.OpOverloadPacket:
    return COUNTED.get(func.overloadpacket, func.overloadpacket)


def count(func: torch._ops.OpOverload, args: tuple, kwargs: dict, result: object) -> Product:
    """Operations and bytes of a product; attention's backward computes its scores again."""
    flop = flop_registry[_counted(func)](*args, **kwargs, out_val=result)
    given = _tensors((args, kwargs))
    is_fp8 = any(tensor.itemsize == 1 for tensor in given)
    return Product(flop, _nbytes(given) + _nbytes(_tensors(result)), is_fp8)


def _nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _identities(tensors: Iterable[Tensor]) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in tensors}


def _run(forward: Callable[..., object], *inputs: object) -> Footprint:
    """Eager: once without gradients, then forward and backward."""
    with Live() as live:
        with torch.no_grad():
            _, _, evaluate, _ = live.above(lambda: forward(*inputs))
        outputs, saved, most_forward, forward_work = live.above(lambda: _tensors(forward(*inputs)))
        gradients = [torch.ones_like(output) for output in outputs]
        _, _, most_backward, backward_work = live.above(lambda: torch.autograd.backward(outputs, gradients))
        return Footprint(saved, most_forward, most_backward, evaluate, evaluate, forward_work, backward_work)


def _compiled(region: nn.Module, inputs: tuple, cfg: Config) -> Footprint:
    graphs = []

    def partition(joint, joint_inputs, **options):
        joint_graph_passes(joint)
        pair = min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **options)
        graphs.extend(module.graph for module in pair)
        return pair

    def run(parameters: dict[str, Tensor], *inputs):
        return functional_call(region, parameters, inputs)

    budget = torch._functorch.config.patch(activation_memory_budget=cfg.parallel.activation_budget)
    with budget, patch.object(torch.compiler, "_is_compiling_flag", True):  # which torch.compile sets, too
        compiled = aot_function(
            run,
            fw_compiler=lambda graph, _: graph.forward,
            partition_fn=partition,
            decompositions=select_decomp_table(),
        )
        compiled(dict(region.named_parameters()), *inputs)
    (kept, most_forward, forward_work), (_, most_backward, backward_work) = map(_fused, graphs)
    with Live() as live, torch.no_grad():
        _, _, unfused, _ = live.above(lambda: region(*inputs))
    evaluate = min(unfused, most_forward)
    return Footprint(kept, most_forward, most_backward, evaluate, unfused, forward_work, backward_work)


def _fused(graph: torch.fx.Graph) -> tuple[int, int, Work]:
    """How a traced graph uses memory if all that lies between products is fused into what consumes it.

    Real tensors are the graph's inputs and outputs, and what products read and write. Returns the bytes of the outputs
    that are no inputs; the largest sum of real tensors above the inputs, what was saved for backward being freed once
    it is used; and the graph's work.
    """
    nodes = [node for node in graph.nodes if node.op != "output"]
    given = [node for node in nodes if node.op == "placeholder"]
    outputs = [node for node in tree_leaves(graph.output_node().args) if isinstance(node, torch.fx.Node)]
    real = {*outputs, *given}
    for node in nodes:
        if is_product(node.target):
            real.update((node, *node.all_input_nodes))
    inputs = _storages(given)
    sizes = dict(inputs)  # of storages, in bytes
    first = dict.fromkeys(inputs, 0)  # moment of a storage
    last = dict.fromkeys(inputs, 0)
    moved = 0
    products = []
    sources: dict[torch.fx.Node, set[int]] = {}  # the real storages that a node is computed from
    for moment, node in enumerate(nodes):
        own = _storages([node])
        read = set().union(*(sources[other] for other in node.all_input_nodes))
        sources[node] = set(own) if node in real else read
        if node not in real:
            continue
        new = own.keys() - sizes.keys()
        sizes |= own
        first |= dict.fromkeys(new, moment)
        last |= dict.fromkeys(read | own.keys(), moment)
        if is_product(node.target):
            args, kwargs = map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
            products.append(count(node.target, args, kwargs, node.meta["val"]))
        else:
            moved += sum(sizes[key] for key in read | new if new)
    kept = _storages(outputs)
    # AOTAutograd calls what backward is given of weights and inputs primals, and gradients tangents.
    lent = _storages(node for node in given if node.name.startswith(("primals", "tangents")))
    last |= dict.fromkeys([*kept, *lent], len(nodes))
    most = 0
    for moment in range(len(nodes)):
        most = max(most, sum(size for key, size in sizes.items() if first[key] <= moment <= last[key]))
    saved = sum(size for key, size in kept.items() if key not in inputs)
    return saved, most - sum(inputs.values()), Work(moved, tuple(products))


def _storages(nodes: Iterable[torch.fx.Node]) -> dict[int, int]:
    """{identity: bytes} of the storages behind the values of nodes."""
    storages = [tensor.untyped_storage() for tensor in _tensors([node.meta.get("val") for node in nodes])]
    return {storage._cdata: storage.nbytes() for storage in storages}
