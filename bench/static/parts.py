"""The parts of a training step of one rank, counted: blocks, ends, optimizer, FSDP2's copies."""

from dataclasses import replace
from functools import partial
from math import prod
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.static import inductor
from bench.static.absent_gpu import AbsentGpu
from bench.static.inductor import Count, is_row_times_column
from bench.static.predicted import ADAMW_BYTES
from flux_ref import flow, sharding
from flux_ref.config import Config, ModelConfig, micro_batch
from flux_ref.data import allocate
from flux_ref.model import Flux, parameter_table
from flux_ref.speed import fp8_product, linear, policy, regions
from flux_ref.speed.precision import Precision
from tools.shared.communication import ITEM_BYTES, gathered_bytes


def counts(gpu: AbsentGpu, cfg: Config, ranks: int) -> dict[str, dict[str, Count]]:
    """{part: {direction: its count}} of one micro-batch; the blocks once each. ranks: that shard the weights."""
    small = replace(cfg, model=replace(cfg.model, double_blocks=1, single_blocks=1))
    dtype, rows = sharding.DTYPES[cfg.parallel.dtype], micro_batch(cfg, ranks)
    traced_for_a_gpu = mock.patch.object(fp8_product, "has_kernel", lambda device: True)
    with FakeTensorMode(), traced_for_a_gpu:
        net = _net(small.model, dtype)
        linear.convert(net, small, gpu.arch)
        Precision(net, small, torch.device("cpu")).begin(cfg.precision.dynamic_steps)  # as in all but the first steps
        for name in policy.layers_gathered_in_fp8(small):
            net.get_submodule(name).encode()
        found = {}
        for kind in ("double", "single"):
            region = regions.regions(getattr(net, f"{kind}_blocks"), cfg.parallel)[0]
            inputs = _inputs(kind, cfg, rows)
            found[kind] = _compiled(gpu, region, inputs, cfg) if cfg.parallel.compile else _eager(region, inputs)
        found["ends"] = _ends(cfg, rows, dtype)
    return found | _sharded(cfg, ranks)


def _net(model: ModelConfig, dtype: torch.dtype) -> Flux:
    """A net whose weights are gathered, so that they have the compute dtype."""
    torch.set_default_dtype(dtype)  # fake weights cannot be converted
    try:
        return Flux(model)
    finally:
        torch.set_default_dtype(torch.float32)


def _inputs(kind: str, cfg: Config, rows: int) -> tuple:
    """What a region is called with."""
    model = cfg.model
    tensor = partial(torch.empty, dtype=sharding.DTYPES[cfg.parallel.dtype], requires_grad=True)
    lengths = (model.image_tokens, model.text_tokens)
    streams = tuple(tensor(rows, length, model.hidden) for length in lengths)
    if kind == "single":
        streams = tensor(rows, sum(lengths), model.hidden)
    rope = torch.empty(sum(lengths), model.head_dim // 2, 2)
    return streams, tensor(rows, model.hidden), rope


def _compiled(gpu: AbsentGpu, region: nn.Module, inputs: tuple, cfg: Config) -> dict[str, Count]:
    options = regions.options(cfg, inductor.DEVICE)
    passes = inductor.compile_for(gpu, region, inputs, options, cfg.parallel.activation_budget)
    if fp8_product.arithmetic(gpu.arch).row_times_column:
        wrong = [product for one in passes for product in one.products if not is_row_times_column(product)]
        assert not wrong, f"{gpu.arch} refuses these products: {wrong}"
    return dict(zip(("forward", "backward"), passes))


class _Eager(TorchDispatchMode):
    """Counts every operation that is not a view as one kernel that reads its inputs and writes its outputs."""

    def __init__(self):
        super().__init__()
        self.count = Count()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        name = func._schema.name.partition("::")[2]
        if name in inductor.PRODUCTS:
            self.count.products[inductor.product(name, given)] += 1
        elif "scaled_dot_product" in name:
            self.count.attentions[(name, tuple(given[0].shape))] += 1
        elif made and not func.is_view and name not in ("empty", "detach", "empty_like"):
            self.count.add(f"{name} {len(self.count.sizes)}", sum(tensor.nbytes for tensor in (*given, *made)))
        return result


def _eager(region: nn.Module, inputs: tuple) -> dict[str, Count]:
    """A region without a compiler."""
    with inductor.one_attention():
        with _Eager() as forward:
            out = region(*inputs)
        streams = out if isinstance(out, tuple) else (out,)
        with _Eager() as backward:
            torch.autograd.backward(streams, [torch.empty_like(stream) for stream in streams])
    return {"forward": forward.count, "backward": backward.count}


def _ends(cfg: Config, rows: int, dtype: torch.dtype) -> dict[str, Count]:
    """Embedders, head and loss, which run eagerly: a net without blocks."""
    net = _net(replace(cfg.model, double_blocks=0, single_blocks=0), dtype)
    batch = allocate(cfg.model, rows, "cpu")
    with _Eager() as forward:
        loss = flow.losses(net, batch, dtype).mean()
    with _Eager() as backward:
        loss.backward()
    return {"forward": forward.count, "backward": backward.count}


def _sharded(cfg: Config, ranks: int) -> dict[str, dict[str, Count]]:
    """By closed form: the optimizer on a rank's shards, and FSDP2's copies of one micro-batch on the compute stream.

    A gather's result is copied out (read and written); a gradient is copied into the reduction, in its dtype.
    """
    shapes = parameter_table(cfg.model)
    weights = sum(map(prod, shapes.values()))
    gathered = sum(prod(shape) * gathered_bytes(cfg, name) for name, shape in shapes.items())
    forward, backward, step = Count(), Count(), Count()
    forward.add("copy out", 2 * gathered / len(shapes), len(shapes))
    if cfg.parallel.reshard_after_forward:
        backward.add("copy out", 2 * gathered / len(shapes), len(shapes))
    reduced = weights * (ITEM_BYTES[cfg.parallel.dtype] + ITEM_BYTES[cfg.parallel.reduce_dtype])
    backward.add("copy in", reduced / len(shapes), len(shapes))
    step.add("norm and AdamW", weights / ranks * ADAMW_BYTES)
    return {"fsdp": {"forward": forward, "backward": backward}, "optimizer": {"step": step}}
