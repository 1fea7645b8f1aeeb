"""What a region of blocks keeps for backward, needs while it computes, moves and multiplies: counted, not measured.

One region of each kind is traced on fake tensors, which have shapes and storages but no memory, into one graph of
forward and one of backward. A compiled region is partitioned as in torch.compile, with the config's activation budget.
What lies between products is fused into what consumes it, and consumers that need not wait for each other share what
they read. Otherwise each operation is a kernel of its own. The count does not look inside an operation, so it misses
the workspaces of kernels. It has the CPU's operations; a GPU's eager RMSNorm is one operation and keeps less.
"""

import operator
from collections.abc import Callable, Iterable
from functools import cache
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from flux_ref import flow, ranks, sharding
from flux_ref.config import Config
from flux_ref.dataloader import Batch, allocate
from flux_ref.model import Flux
from flux_ref.precision import fp8, linear, policy
from flux_ref.precision.fp8 import Codes, DelayedScaling, Scales
from flux_ref.precision.linear import PolicyLinear
from flux_ref.precision.recipe import DTYPES
from tools import flops_and_bytes
from tools.flops_and_bytes import ROOT, FsdpLayout

# What counts the arithmetic of products. Plans are traced on a CPU, whose attention torch cannot count. Its query, key
# and value come in the same order.
ATEN = torch.ops.aten
FORMULAS = flop_registry | {
    ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[ATEN._scaled_dot_product_flash_attention],
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        ATEN._scaled_dot_product_flash_attention_backward
    ],
}


class Product(NamedTuple):
    """A matrix product or attention."""

    flop: float
    moved: float  # bytes that it reads and writes
    is_fp8: bool


class Pass(NamedTuple):
    """Forward or backward of one micro-batch."""

    kept: float  # bytes of its outputs: in forward what stays until backward
    most: float  # bytes that live at most, above the inputs; in backward with gradients of unsharded weights
    moved: float  # bytes that all but products reads and writes
    products: tuple[Product, ...]
    kernels: int = 0  # products, too


class Extent(NamedTuple):
    """Where a tensor lies in a storage, up to its strides."""

    storage: int  # identity
    offset: int
    nbytes: int


class Footprint(NamedTuple):
    """What one region, or the ends of the net, needs for one micro-batch."""

    forward: Pass
    backward: Pass


Footprints = dict[str, Footprint]  # by the kind of a unit


def trace(cfg: Config, arch: str, rows: int) -> Footprints:
    """{"double 1": footprint of a region of one double block, ..., ROOT: of the embedders, the head and the loss}.

    It has every kind and length of region in the config, for micro-batches of so many rows. arch: the kind of device,
    as fp8.architecture names it; it decides the layouts of FP8.
    """
    model = cfg.model
    dtype = DTYPES[cfg.compute.dtype]
    text = model.text_tokens
    image = model.image_tokens
    footprints: Footprints = {}
    # The tensors claim to be on a CPU, which would decode FP8. The traced device has a kernel for it.
    with FakeTensorMode(), patch.object(fp8, "has_kernel", lambda device: True):
        net = _net(cfg, arch)
        for kind, module in flops_and_bytes.split(net, cfg):
            if kind == ROOT:  # it and the loss are never compiled
                footprints[ROOT] = _footprint(Ends(net, dtype), (allocate(model, rows),), cfg, compiled=False)
            elif kind not in footprints:
                streams = [(rows, n, model.hidden) for n in ([image, text] if "double" in kind else [text + image])]
                sizes = [*streams, (rows, model.hidden)]  # vec, too
                inputs = [torch.zeros(size, dtype=dtype, requires_grad=True) for size in sizes]
                footprints[kind] = _footprint(module, (*inputs, net.rope), cfg, cfg.compute.compile)
    return footprints


@cache  # hundreds of plans ask for a few layouts
def node_layout(cfg: Config, gpus: int, node: int) -> FsdpLayout:
    """How FSDP2 splits the net over so many GPUs, `node` of them to a host.

    Raises: Refusal if parallel.replicate does not fit.
    """
    hosts = [str(rank // node) for rank in range(gpus)]
    replicas = ranks.replica_count(cfg.parallel.replicate, hosts)
    return flops_and_bytes.fsdp_layout(cfg, gpus, replicas)


def _net(cfg: Config, arch: str) -> Flux:
    """A net in the compute dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[cfg.compute.dtype])  # fake tensors cannot be cast in place
    try:
        net = Flux(cfg.model)
    finally:
        torch.set_default_dtype(before)
    linear.convert(net, cfg, arch)
    return net


class Ends(nn.Module):
    """A net and the loss of a batch."""

    def __init__(self, net: Flux, dtype: torch.dtype):
        super().__init__()
        self.net = net
        self.dtype = dtype

    def forward(self, batch: Batch) -> Tensor:
        return flow.losses(self.net, batch, self.dtype).sum()


def _footprint(module: nn.Module, inputs: tuple, cfg: Config, compiled: bool) -> Footprint:
    """Trace a module, and its backward by all its parameters and inputs."""
    parameters = dict(module.named_parameters())
    linears = {name: one for name, one in module.named_modules() if isinstance(one, PolicyLinear)}
    given = {name: _given(linear, cfg) for name, linear in linears.items()}
    graphs: list[torch.fx.Graph] = []

    def run(parameters, given, *inputs):
        for name, values in given.items():
            for attribute, value in values.items():
                setattr(linears[name], attribute, value)
        return functional_call(module, parameters, inputs)

    def partition(joint, joint_inputs, **options):
        if compiled:
            joint_graph_passes(joint)
            # To keep a weight for backward costs nothing; to keep a copy in another layout does.
            options["static_lifetime_input_indices"] = [*range(len(tree_leaves((parameters, given))))]
            pair = min_cut_rematerialization_partition(joint, joint_inputs, compiler="inductor", **options)
        else:
            pair = default_partition(joint, joint_inputs, **options)
        graphs.extend(part.graph for part in pair)
        return pair

    with (
        torch._functorch.config.patch(sharding.partitioning(cfg)),
        patch.object(torch.compiler, "_is_compiling_flag", compiled),
    ):  # which torch.compile sets, too
        traced = aot_function(
            run,
            fw_compiler=lambda graph, _: graph.forward,
            partition_fn=partition,
            decompositions=select_decomp_table() if compiled else None,
        )
        outputs = _tensors(traced(parameters, given, *inputs))
    forward, backward = (_pass(graph, compiled) for graph in graphs)
    if getattr(module, "activation_checkpointing", "none") == "none":
        return Footprint(forward, backward)
    again = Pass(*map(operator.add, forward, backward))  # forward runs again in backward, which the trace leaves out
    kept = sum(output.nbytes for output in outputs)
    return Footprint(forward._replace(kept=kept), again._replace(kept=backward.kept))


def _given(linear: PolicyLinear, cfg: Config) -> dict[str, Codes | DelayedScaling]:
    """What training hands to a linear, by attribute: its weight in FP8, what it remembers of its input and gradient.

    Nothing stands for what is not given: torch's partitioner takes tensors only.
    """

    def scales() -> Scales:
        return torch.ones(()), torch.ones(())

    given: dict[str, Codes | DelayedScaling] = {}
    if linear.layer in policy.layers_gathered_in_fp8(cfg):
        given["gathered"] = Codes(torch.zeros(linear.weight.shape, dtype=linear.support.forward), scales())
    if linear.layer in policy.layers_with_delayed_scales(cfg):
        given |= {name: DelayedScaling(torch.zeros(()), scales()) for name in ("of_input", "of_grad")}
    return given


def _pass(graph: torch.fx.Graph, fused: bool) -> Pass:
    """How a traced graph uses memory. What was saved for backward is freed once it is used."""
    nodes = [node for node in graph.nodes if node.op != "output"]
    given = [node for node in nodes if node.op == "placeholder"]
    outputs = [node for node in tree_leaves(graph.output_node().args) if isinstance(node, torch.fx.Node)]
    ends = {node for node in nodes if counted(node) or _adds_rows(node)}
    real = _real({*given, *outputs}, ends) if fused else {*nodes}

    inputs = _storages(given)
    sizes = dict(inputs)  # of storages, in bytes
    first = dict.fromkeys(inputs, 0)  # moment of a storage
    last = dict.fromkeys(inputs, 0)
    moved = 0
    kernels = 0
    products = []
    sources: dict[torch.fx.Node, set[Extent]] = {}  # what a node is computed from, of real storages
    depths: dict[torch.fx.Node, int] = {}  # the number of ends, one after another, that lead to a node
    known: set[tuple[int, bool, Extent]] = set()  # what is read at a depth, by sums over rows or by others
    for moment, node in enumerate(nodes):
        own = _storages([node])
        read = set().union(*(sources[other] for other in node.all_input_nodes))
        depth = max((depths[other] + (other in ends) for other in node.all_input_nodes), default=0)
        depths[node] = depth
        is_real = node in real or own.keys() & sizes.keys()  # or a view of what is real
        sources[node] = _extents(node) if is_real else read
        if node not in real:
            continue
        new = own.keys() - sizes.keys()
        sizes |= own
        first |= dict.fromkeys(new, moment)
        last |= dict.fromkeys({extent.storage for extent in read} | own.keys(), moment)
        formula = counted(node)
        if formula:
            products.append(_product(node, formula))
        elif new:
            wanted = {(depth, node in ends, extent) for extent in read} - known
            moved += sum(own[key] for key in new)
            moved += sum(min(extent.nbytes, sizes[extent.storage]) for *_, extent in wanted)
            kernels += bool(wanted)
            if fused:
                known |= wanted | {(depth, node in ends, extent) for extent in _extents(node)}

    kept = _storages(outputs)
    # AOTAutograd calls what backward is given of weights and inputs primals, and gradients tangents.
    lent = _storages(node for node in given if node.name.startswith(("primals", "tangents")))
    last |= dict.fromkeys([*kept, *lent], len(nodes))
    alive = (sum(sizes[key] for key in sizes if first[key] <= moment <= last[key]) for moment in range(len(nodes)))
    saved = sum(size for key, size in kept.items() if key not in inputs)
    return Pass(saved, max(alive) - sum(inputs.values()), moved, tuple(products), kernels + len(products))


def _real(borders: set[torch.fx.Node], ends: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """The tensors that a compiler stores: inputs and outputs (borders), what products read and write, sums over rows.

    It fuses what lies between two ends, products or sums over rows. There each tensor is read once, and once more by
    the sums over rows.
    """
    real = borders | ends
    for node in ends:
        if counted(node) or node.meta["val"].numel() == 1:  # a compiler reduces a whole tensor in two passes
            real.update(node.all_input_nodes)
    return real


def counted(node: torch.fx.Node) -> Callable | None:
    """What counts the arithmetic of an operation; None if it is neither a matrix product nor attention."""
    return FORMULAS.get(getattr(node.target, "overloadpacket", None))


def _product(node: torch.fx.Node, formula: Callable) -> Product:
    """Operations and bytes of a product; attention's backward computes its scores again."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
    given = _tensors((args, kwargs))
    made = _tensors(node.meta["val"])
    flop = formula(*args, **kwargs, out_val=node.meta["val"])
    moved = sum(one.nbytes for one in given + made)
    return Product(flop, moved, is_fp8=any(one.itemsize == 1 for one in given))


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _adds_rows(node: torch.fx.Node) -> bool:
    """Whether a node reduces other dimensions than the last: its readers wait until the reduction is done."""
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or getattr(node.target, "is_view", True):
        return False
    given = _tensors([other.meta.get("val") for other in node.all_input_nodes])
    larger = [one.shape for one in given if one.numel() > made.numel()]
    return any(made.numel() == 1 or made.shape not in (shape[:-1], (*shape[:-1], 1)) for shape in larger)


def _extents(node: torch.fx.Node) -> set[Extent]:
    """Those of the values of a node."""
    return {
        Extent(tensor.untyped_storage()._cdata, int(tensor.storage_offset()), tensor.nbytes)
        for tensor in _tensors(node.meta.get("val"))
    }


def _storages(nodes: Iterable[torch.fx.Node]) -> dict[int, int]:
    """{identity: bytes} of the storages behind the values of nodes."""
    storages = [tensor.untyped_storage() for tensor in _tensors([node.meta.get("val") for node in nodes])]
    return {storage._cdata: storage.nbytes() for storage in storages}
