"""What a region of blocks keeps for backward, needs while it computes, moves and multiplies: counted, not measured.

One region of each kind is traced on fake tensors, which have shapes and storages but no memory, into one graph of
forward and one of backward. A compiled region is partitioned as in torch.compile, with the config's activation budget.
What lies between products is fused into what consumes it, and consumers that need not wait for each other share what
they read. Otherwise each operation is a kernel of its own. The count does not look inside an operation, so it misses
the workspaces of kernels. It has the CPU's operations; a GPU's eager RMSNorm is one operation and keeps less.
"""

import operator
from collections.abc import Callable, Iterable, Iterator
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
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from flux_ref import flow, ranks
from flux_ref.config import Config
from flux_ref.dataloader import Batch, allocate
from flux_ref.model import Flux
from flux_ref.precision import fp8, linear, policy
from flux_ref.precision.fp8 import Codes, DelayedScaling
from flux_ref.precision.linear import PolicyLinear
from flux_ref.precision.recipe import DTYPES
from flux_ref.sharding import Region, partitioning
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


class Storage(NamedTuple):
    """Memory that tensors share."""

    identity: int
    nbytes: int


class Extent(NamedTuple):
    """Where a tensor lies in a storage, up to its strides."""

    storage: Storage
    offset: int
    nbytes: int


class Footprint(NamedTuple):
    """What one region, or the ends of the net, needs for one micro-batch."""

    forward: Pass
    backward: Pass


Footprints = dict[str, Footprint]  # by the kind of a unit


@cache  # public systems share a few
def trace(cfg: Config, arch: str, rows: int) -> Footprints:
    """{"double 1": footprint of a region of one double block, ..., ROOT: of the embedders, the head and the loss}.

    It has every kind and length of region in the config, for micro-batches of so many rows. arch: the kind of device,
    as fp8.architecture names it; it decides the layouts of FP8.
    """
    model = cfg.model
    dtype = DTYPES[cfg.compute.dtype]
    tokens = {  # of the streams
        "double": (model.image_tokens, model.text_tokens),
        "single": (model.text_tokens + model.image_tokens,),
    }
    footprints: Footprints = {}

    def loss(net: Callable, batch: Batch) -> Tensor:
        return flow.losses(net, batch, dtype).sum()

    # The tensors claim to be on a CPU, which would decode FP8. The traced device has a kernel for it.
    with FakeTensorMode(), patch.object(fp8, "has_kernel", lambda device: True):
        net = Flux(model)
        linear.convert(net, cfg, arch)
        for kind, module in flops_and_bytes.split(net, cfg):
            if kind == ROOT:  # it and the loss are never compiled
                footprints[ROOT] = _footprint(net, loss, (allocate(model, rows),), cfg, compiled=False)
            elif kind not in footprints:
                sizes = [*((n, model.hidden) for n in tokens[kind.split()[0]]), (model.hidden,)]  # streams and vec
                inputs = [torch.zeros((rows, *size), dtype=dtype, requires_grad=True) for size in sizes]
                footprints[kind] = _footprint(module, operator.call, (*inputs, net.rope), cfg, cfg.compute.compile)
    return footprints


@cache  # hundreds of plans ask for a few layouts
def node_layout(cfg: Config, gpus: int, node: int) -> FsdpLayout:
    """How FSDP2 splits the net over so many GPUs, `node` of them to a host.

    Raises: Refusal if parallel.replicate does not fit.
    """
    hosts = [str(rank // node) for rank in range(gpus)]
    return flops_and_bytes.fsdp_layout(cfg, gpus, ranks.replica_count(cfg.parallel.replicate, hosts))


def _footprint(module: nn.Module, task: Callable, inputs: Iterable, cfg: Config, compiled: bool) -> Footprint:
    """Trace a task in compute.dtype, and its backward by all parameters of a module and the inputs.

    task: it is given the module as a function, and the inputs.
    """
    parameters = {
        name: one.detach().to(DTYPES[cfg.compute.dtype]).requires_grad_() for name, one in module.named_parameters()
    }
    linears = [one for one in module.modules() if isinstance(one, PolicyLinear)]
    given = [dict(_given(linear, cfg)) for linear in linears]
    graphs: list[Graph] = []

    def run(parameters, given, *inputs):
        for one, values in zip(linears, given):
            vars(one).update(values)
        return task(lambda *args: functional_call(module, parameters, args), *inputs)

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
        torch._functorch.config.patch(partitioning(cfg)),
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
    if not isinstance(module, Region) or module.activation_checkpointing == "none":
        return Footprint(forward, backward)
    again = Pass(*map(operator.add, forward, backward))  # forward runs again in backward, which the trace leaves out
    kept = sum(output.nbytes for output in outputs)
    return Footprint(forward._replace(kept=kept), again._replace(kept=backward.kept))


def _given(linear: PolicyLinear, cfg: Config) -> Iterator[tuple[str, Codes | DelayedScaling]]:
    """What training hands to a linear, by attribute: its weight in FP8, what it remembers of its input and gradient.

    Nothing stands for what is not given: torch's partitioner takes tensors only.
    """
    if linear.layer in policy.layers_gathered_in_fp8(cfg):
        codes = torch.zeros(linear.weight.shape, dtype=linear.support.forward)
        yield "gathered", Codes(codes, (torch.ones(()), torch.ones(())))
    if linear.layer in policy.layers_with_delayed_scales(cfg):
        for name in ("of_input", "of_grad"):
            yield name, DelayedScaling(torch.zeros(()), (torch.ones(()), torch.ones(())))


def _pass(graph: Graph, fused: bool) -> Pass:
    """How a traced graph uses memory. What was saved for backward is freed once it is used."""
    *nodes, output = graph.nodes
    outputs = output.all_input_nodes
    given = graph.find_nodes(op="placeholder")
    products = {node: product for node in nodes if (product := _product(node))}
    ends = {node for node in nodes if node in products or _adds_rows(node)}
    real = {*nodes}
    if fused:
        # A compiler stores inputs and outputs, what products read and write, and sums over rows. It fuses what lies
        # between two of these ends. There each tensor is read once, and once more by the sums over rows.
        real = {*given, *outputs, *ends}
        for node in ends:
            if node in products or node.meta["val"].numel() == 1:  # it reduces a whole tensor in two passes
                real.update(node.all_input_nodes)

    inputs = _storages(given)
    first = dict.fromkeys(inputs, 0)  # moment of a storage
    last = dict.fromkeys(inputs, 0)
    moved = 0
    kernels = len(products)
    sources: dict[Node, set[Extent]] = {}  # what a node is computed from, of real storages
    depths: dict[Node, int] = {}  # the number of ends, one after another, that lead to a node
    known: set[tuple[int, bool, Extent]] = set()  # what is read at a depth, by sums over rows or by others
    for moment, node in enumerate(nodes):
        extents = _extents(node)
        own = _storages([node])
        read = set().union(*(sources[other] for other in node.all_input_nodes))
        depth = max((depths[other] + (other in ends) for other in node.all_input_nodes), default=0)
        depths[node] = depth
        is_real = node in real or own & first.keys()  # or a view of what is real
        sources[node] = extents if is_real else read
        if node not in real:
            continue
        new = own - first.keys()
        first |= dict.fromkeys(new, moment)
        last |= dict.fromkeys(own | {extent.storage for extent in read}, moment)
        if new and node not in products:
            wanted = {(depth, node in ends, extent) for extent in read} - known
            moved += _nbytes(new) + sum(min(extent.nbytes, extent.storage.nbytes) for *_, extent in wanted)
            kernels += bool(wanted)
            if fused:
                known |= wanted | {(depth, node in ends, extent) for extent in extents}

    kept = _storages(outputs)
    # AOTAutograd calls what backward is given of weights and inputs primals, and gradients tangents.
    lent = _storages(node for node in given if node.name.startswith(("primals", "tangents")))
    last |= dict.fromkeys(kept | lent, len(nodes))
    most = max(_nbytes(one for one in first if first[one] <= moment <= last[one]) for moment in range(len(nodes)))
    return Pass(_nbytes(kept - inputs), most - _nbytes(inputs), moved, tuple(products.values()), kernels)


def _product(node: Node) -> Product | None:
    """Operations and bytes of a matrix product or attention, whose backward computes its scores again; else None."""
    formula = FORMULAS.get(getattr(node.target, "overloadpacket", None))
    if not formula:
        return None
    args, kwargs = map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
    given = _tensors((args, kwargs))
    flop = formula(*args, **kwargs, out_val=node.meta["val"])
    moved = sum(one.nbytes for one in given + _tensors(node.meta["val"]))
    return Product(flop, moved, is_fp8=any(one.itemsize == 1 for one in given))


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _adds_rows(node: Node) -> bool:
    """Whether a node reduces other dimensions than the last: its readers wait until the reduction is done."""
    made = node.meta.get("val")
    if not isinstance(made, Tensor) or getattr(node.target, "is_view", True):
        return False
    given = _tensors([other.meta.get("val") for other in node.all_input_nodes])
    larger = [one.shape for one in given if one.numel() > made.numel()]
    return any(made.numel() == 1 or made.shape not in (shape[:-1], (*shape[:-1], 1)) for shape in larger)


def _extents(node: Node) -> set[Extent]:
    """Those of the values of a node."""
    values = _tensors(node.meta.get("val"))
    storages = [value.untyped_storage() for value in values]
    return {
        Extent(Storage(storage._cdata, storage.nbytes()), int(value.storage_offset()), value.nbytes)
        for value, storage in zip(values, storages)
    }


def _storages(nodes: Iterable[Node]) -> set[Storage]:
    """Those behind the values of nodes."""
    return {extent.storage for node in nodes for extent in _extents(node)}


def _nbytes(storages: Iterable[Storage]) -> int:
    return sum(storage.nbytes for storage in storages)
