"""What this code computes at every place, compared with tests/golden or written there.

    python -m tools.golden.record [--write]

The product's own functions run on the CPU: shards, draws, batches, FSDP over one process, train_step, validation, FP8.
A new value gets its bits when it is written. A value that agrees with the old one keeps the old bits: another kind of
CPU rounds otherwise.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import save_file

from flux_ref import cli, config_file, ranks
from flux_ref.cli import Options
from flux_ref.files import whole, write_whole
from flux_ref.ranks import World
from tools.golden.check import compare, report
from tools.golden.draws import draws, full_draws, full_net
from tools.golden.files import CONFIG, DATA, FOLDER, INDEX, VALUES, Golden, Values, checksum, entry
from tools.golden.precision import bf16, delayed_scales, fp8_edges, fp8_linear, operations
from tools.golden.training import (
    CPU,
    Recorded,
    Replay,
    clipping,
    far,
    init,
    on_two_ranks,
    step_in_bf16,
    training,
    validation,
)

Part = Callable[[Replay], Recorded]
PARTS: tuple[Part, ...] = (  # all values, in order of computation
    draws,
    full_draws,
    clipping,
    lambda run: run.given,
    init,
    training,
    far,
    on_two_ranks,
    validation,
    operations,
    bf16,
    step_in_bf16,
    fp8_edges,
    fp8_linear,
    delayed_scales,
    full_net,
)


def record(*parts: Part, **keys: Any) -> dict[str, tuple[str, np.ndarray]]:
    """dtype and array of the values of some parts; of all without any. keys: others of the config, as section__key.

    They are computed on the CPU, also where there is an accelerator.
    """
    data_set = {f"data__{split}": f"{FOLDER / DATA}/{split}" for split in ("train", "val")}
    cfg = config_file.replace(config_file.load(FOLDER / CONFIG), **data_set, **keys)
    values: Recorded = {}
    dist.init_process_group(ranks.BACKENDS["cpu"], store=dist.HashStore(), rank=0, world_size=1)
    try:
        world = World(0, 1, CPU, ranks.make_mesh("cpu", size=1, replicate=1))
        run = Replay(cfg, world, Golden(FOLDER).given())
        for part in parts or PARTS:
            values |= part(run)
    finally:
        ranks.stop()
    return {name: plainly(value) for name, value in values.items()}


def arrays(*parts: Part, **keys: Any) -> Values:
    """The arrays of `record`."""
    return {name: array for name, (_, array) in record(*parts, **keys).items()}


def plainly(value: Any) -> tuple[str, np.ndarray]:
    """dtype and array of a value. The array of a value in bf16 is fp32, which is exact."""
    tensor = torch.as_tensor(value).detach().contiguous()  # safetensors writes the memory as it lies
    dtype = str(tensor.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
    return dtype, (tensor.float() if dtype == "bf16" else tensor).numpy()


def write(folder: Path) -> None:
    """Record all values but the given ones, which stay as they are, into a folder. Raises: Refusal."""
    golden = Golden(FOLDER)
    given = golden.given()
    arrays = {}
    entries = []
    for name, (dtype, array) in record().items():
        value = entry(name, dtype, array, name in given)
        entries.append(json.dumps(asdict(value)))
        is_known = name in golden.arrays and not compare(value, golden.arrays[name], array)
        arrays[name] = golden.arrays[name] if is_known else array

    with whole(folder / VALUES) as partial:
        save_file(arrays, partial)
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
    return report(Golden(FOLDER), arrays(), demands_all=True)


if __name__ == "__main__":
    sys.exit(cli.run("golden", main, sys.argv[1:]))
