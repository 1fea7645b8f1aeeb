"""The golden values: what a small run computes, place by place, recorded from the code that trains.

`record` runs the product's own code on the CPU: shards, draws, batches, FSDP over one process, train_step, validation,
FP8. There is no second forward pass here: hooks on modules and wrappers around a few functions note the values. The
values come in order of computation.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from flux_ref import config_file, ranks
from flux_ref.config import Config
from flux_ref.ranks import World
from tools.golden.draws import draws, full_draws
from tools.golden.formats import formats, presets
from tools.golden.full_size import blocks, piece, rope
from tools.golden.inputs import write_data
from tools.golden.precision import bf16, fp8_edges, fp8_linear, fp8_order, operations
from tools.golden.training import CPU, init, on_two_ranks, schedules, training, validation


class Recorded(NamedTuple):
    """A value. dtype: the one that it was computed in: fp32, bf16 (the array is float32 then), int64, ..."""

    dtype: str
    array: np.ndarray


def record(cfg: Config, given: dict[str, np.ndarray]) -> dict[str, Recorded]:
    """All values but those of full_size.initial_norms, in order of computation. given: what `inputs` returns."""
    values: dict[str, np.ndarray | Tensor] = {}
    with tempfile.TemporaryDirectory() as folder, one_process() as world:
        write_data(Path(folder), given)
        cfg = config_file.replace(cfg, data__train=f"{folder}/train", data__val=f"{folder}/val")
        draws(values, cfg)
        full_draws(values, given)
        schedules(values, cfg, world, given)
        values |= given
        init(values, cfg, world)
        training(values, cfg, world, given)
        on_two_ranks(values, cfg, world, given)
        validation(values, cfg, world, given)
        operations(values, cfg, given)
        bf16(values, cfg, world, given)
        fp8_edges(values, given)
        fp8_linear(values, given)
        fp8_order(values, given)
        rope(values)
        piece(values)
        blocks(values)
        formats(values, given)
        presets(values, given)
    return {name: plain(value) for name, value in values.items()}


def plain(value: Tensor | np.ndarray) -> Recorded:
    """A value as a file holds it: bf16 becomes fp32, which is exact."""
    tensor = torch.as_tensor(value).detach()
    dtype = str(tensor.dtype).removeprefix("torch.")
    array = (tensor.float() if dtype == "bfloat16" else tensor).numpy()
    contiguous = np.array(array, order="C")  # safetensors writes the memory as it lies
    return Recorded({"bfloat16": "bf16", "float32": "fp32", "float64": "fp64"}.get(dtype, dtype), contiguous)


@contextmanager
def one_process() -> Iterator[World]:
    """A world of this process alone. It is on the CPU, also where there is an accelerator."""
    alone = ranks.is_apart()
    if alone:
        dist.init_process_group(ranks.BACKENDS["cpu"], store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(0, 1, CPU, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)), ["this"])
    finally:
        if alone:
            ranks.stop()
