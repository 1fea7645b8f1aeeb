"""What a kernel should have written: its part of Inductor's graph, evaluated in fp32 from what the kernel read."""

import torch
from torch import Tensor, fx
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import Buffer, ConcatKernel, ExternKernel
from torch.utils._pytree import tree_leaves, tree_map

CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
MOVES = {"cat", "clone", "copy_", "flip", "convert_element_type", "_to_copy"}  # besides views
SUMS = 2.0**-18  # what another order of fp32 sums may change, relative to a tensor's largest value


def origins(lowering: GraphLowering) -> dict[str, fx.Node]:
    """The node that a buffer holds, by the buffer's name. An input that is changed in place holds what it becomes.

    Inductor names no node for a part of a joint tensor and for the copy of a product's side. Both are arguments of a
    node.
    """
    found = {buffer.get_name(): buffer.get_origin_node() for buffer in lowering.buffers}
    for buffer in reversed(lowering.buffers):
        node = found[buffer.get_name()]
        if node and isinstance(buffer, ConcatKernel | ExternKernel):
            for part, argument in zip(buffer.inputs, _arguments(node, len(buffer.inputs)), strict=True):
                if isinstance(part, Buffer):
                    found[part.get_name()] = found.get(part.get_name()) or argument
    changes = [node for node in lowering.module.graph.nodes if node.target is torch.ops.aten.copy_.default]
    found |= {node.args[0].target: node for node in changes}
    return {name: node for name, node in found.items() if node}


def _arguments(node: fx.Node, count: int) -> list[fx.Node]:
    """Those of an operation of `count` tensors. Inductor may name the last view of the result in its place."""
    found = [leaf for leaf in tree_leaves(node.args) if isinstance(leaf, fx.Node)]
    return found if len(found) == count else _arguments(found[0], count)


class Reference:
    """The value of one node. buffers: names of the buffers that hold a node. held: what buffers and inputs hold.

    All floats are fp32. Only a conversion from FP8 rounds on the way, as in Inductor's kernels.
    is_move: whether nothing but moves and casts was evaluated.
    """

    def __init__(self, buffers: dict[fx.Node, str], held: dict[str, Tensor]):
        self.buffers, self.held, self.is_move = buffers, held, True
        self.known: dict[fx.Node, object] = {}

    def value(self, node: fx.Node) -> object:
        """What earlier kernels wrote or the graph was given; else evaluated."""
        if node not in self.known:
            name = node.target if node.op == "placeholder" else self.buffers.get(node)
            held = self.held.get(name)
            self.known[node] = self.evaluated(node) if held is None else _in_fp32(held).reshape(node.meta["val"].shape)
        return self.known[node]

    def evaluated(self, node: fx.Node) -> object:
        """The node's own operation on the values of its arguments."""
        name = getattr(node.target, "_schema", None) and node.target._schema.name.partition("::")[2]
        is_view = getattr(node.target, "is_view", False)
        self.is_move &= is_view or name in MOVES
        args, kwargs = tree_map(self._argument, (node.args, node.kwargs))
        if name == "copy_":
            return args[1]
        if node.target in CASTS or node.target is torch.ops.aten.view.dtype:
            return self._converted(node, args[0])
        return tree_map(_in_fp32, node.target(*args, **kwargs))

    def _argument(self, argument: object) -> object:
        if isinstance(argument, fx.Node):
            return self.value(argument)
        return torch.device("cpu") if isinstance(argument, torch.device) else argument

    def _converted(self, node: fx.Node, x: Tensor) -> Tensor:
        before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
        if node.target is torch.ops.aten.view.dtype:
            return _in_fp32(x.to(before).view(after))
        if before.itemsize == 1 and before.is_floating_point:
            x = x.to(before)
        return x.float() if after.is_floating_point else x.to(after)


def _in_fp32(x: object) -> object:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def distance(found: Tensor, want: Tensor, is_move: bool) -> float:
    """The largest |found - want| relative to its bound. want: of `Reference`, not yet rounded to found's dtype.

    The bound is half a step of the stored dtype, which one rounding to nearest may change, and SUMS. What is only moved
    or cast must be equal.
    """
    want = want.reshape(found.shape)
    if is_move or not found.is_floating_point():
        same = torch.eq(*(x.float().nan_to_num(nan=torch.pi) for x in (found, want.to(found.dtype))))
        return 0.0 if same.all() else torch.inf
    kind, size = torch.finfo(found.dtype), want.abs().nan_to_num(nan=0.0)
    step = torch.exp2(torch.floor(torch.log2(size.clamp(min=kind.smallest_normal)))) * kind.eps
    error = (found.float() - want).abs() / (step / 2 + SUMS * size.max())
    is_equal = (found.float() == want) | (found.isnan() & want.isnan())
    return float(error.nan_to_num(nan=torch.inf).where(~is_equal, 0.0).max())
