"""What this code computes at every place, compared with tests/golden or written there.

    python -m tools.golden.record [--write]

The product's own functions run on the CPU: shards, draws, batches, FSDP over one process, train_step, validation, FP8.
A new value gets its bits when it is written. A value that agrees with the old one keeps the old bits: another kind of
CPU rounds otherwise.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import save
from torch.distributed.device_mesh import init_device_mesh

from flux_ref import config_file, errors, ranks
from flux_ref.errors import Options
from flux_ref.files import whole, write_whole
from flux_ref.ranks import World
from tools.golden import places
from tools.golden.check import is_off, report
from tools.golden.draws import draws, full_draws, full_net
from tools.golden.files import CONFIG, DATA, FOLDER, INDEX, VALUES, Golden, Value, Values, checksum
from tools.golden.forward import Recorded
from tools.golden.precision import bf16, delayed_scales, fp8_edges, fp8_linear, operations
from tools.golden.training import (
    BATCH,
    CPU,
    clipping,
    far,
    init,
    later_validation,
    on_two_ranks,
    step_in_bf16,
    training,
    validation,
)

DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}  # others: as torch names them


def record(given: Values) -> dict[str, tuple[str, np.ndarray]]:
    """dtype and array of all values in order of computation, from the config and the data set in FOLDER."""
    cfg = config_file.load(FOLDER / CONFIG)
    cfg = config_file.replace(cfg, data__train=f"{FOLDER / DATA}/train", data__val=f"{FOLDER / DATA}/val")
    values: Recorded = draws(cfg) | full_draws(given)
    with one_process() as world:
        values |= clipping(cfg, world, given)
        values |= given
        values |= init(cfg, world)
        values |= training(cfg, world, given)
        values |= far(cfg)
        values |= on_two_ranks(cfg, world, given)
        values |= validation(cfg, world, given)
        values |= later_validation(cfg, world, given)
        values |= operations(cfg, given)
        values |= bf16(cfg, given, {name: values[f"batch.{name}"] for name in BATCH})
        values |= step_in_bf16(cfg, world, given)
        values |= fp8_edges(given)
        values |= fp8_linear(given)
        values |= delayed_scales(cfg)
    values |= full_net()
    return plainly(values)


def plainly(values: Recorded) -> dict[str, tuple[str, np.ndarray]]:
    """dtype and array of each value. The array of a value in bf16 is fp32, which is exact."""
    found = {}
    for name, value in values.items():
        tensor = torch.as_tensor(value).detach()
        dtype = DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        found[name] = dtype, np.array(tensor.numpy(), order="C")  # safetensors writes the memory as it lies
    return found


@contextmanager
def one_process() -> Iterator[World]:
    """A world of this process alone. It is on the CPU, also where there is an accelerator."""
    alone = not dist.is_initialized()
    if alone:
        dist.init_process_group(ranks.BACKENDS["cpu"], store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield World(0, 1, CPU, init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)))
    finally:
        if alone:
            ranks.stop()


def write(folder: Path) -> None:
    """Record all values but the given ones, which stay as they are, into a folder. Raises: Refusal."""
    golden = Golden(FOLDER)
    given = golden.given()
    rate = config_file.load(FOLDER / CONFIG).optim.lr
    arrays = {}
    entries = []
    for name, (dtype, array) in record(given).items():
        place = places.place(name)
        old = golden.arrays.get(name, array)
        if (old.shape, old.dtype) == (array.shape, array.dtype):
            array = array if is_off(array, old, *place.tolerances(array, rate)).any() else old
        arrays[name] = array
        about = place.meaning, *place.tolerances(array, rate), place.why, places.inputs_of(name)
        value = Value(name, list(array.shape), dtype, name in given, *about)
        entries.append(json.dumps(asdict(value)))

    with whole(folder / VALUES) as partial:
        partial.write_bytes(save(arrays))
    head = json.dumps({"sha256": checksum(folder / VALUES), "parameters": golden.parameters})
    lines = ",\n".join(entries)
    write_whole(folder / INDEX, f'{head[:-1]}, "values": [\n{lines}\n]}}\n')
    print(f"{folder}: {len(entries)} values")


def main(argv: list[str]) -> int:
    """Returns the exit code. Raises: Refusal."""
    parser = Options("python -m tools.golden.record", __doc__)
    parser.add_argument("--write", action="store_true", help="write the files anew")
    if parser.parse_args(argv).write:
        write(FOLDER)
        return 0
    golden = Golden(FOLDER)
    recorded = {name: array for name, (_, array) in record(golden.given()).items()}
    return int(any(report(golden, recorded)))


if __name__ == "__main__":
    sys.exit(errors.run("golden", main, sys.argv[1:]))
