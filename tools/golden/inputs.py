"""The given values: weights, data and operands from which the golden run starts. A port reads or draws them.

An element of weights and data is (2 u - 1) * width, u being uniforms of stream INIT with seed 0 and the key of the
value's name. Scales of norms add 1. Data are then rounded to bf16. Operands do not depend on the config, and stay.
"""

from pathlib import Path

import numpy as np
import torch

from flux_ref import data, model, rng
from flux_ref.config import Config
from flux_ref.formats import shard_writer, shards
from tools.golden import places

SEED = 0
VAL_TIMESTEPS = (0, 1, 2, 3, 4, 5, 6, 7, 3)  # uneven, so that means in the wrong order show
BY_CONFIG = ("weights.", "data.")  # the other given values are operands


def drawn(name: str, shape: tuple[int, ...], width: float, centre: float = 0.0) -> np.ndarray:
    """(2 u - 1) * width + centre in fp32: one uniform per element, of the name's key."""
    words = rng.words(SEED, rng.INIT, int(np.prod(shape)), sample=rng.name_key(name))
    u = rng.uniform(words).reshape(shape)
    return ((2 * u - 1) * width + centre).astype(np.float32)


def drawn_as(name: str, shape: tuple[int, ...], period: int = 2**62) -> np.ndarray:
    """A weight or a value of the data. Scales of norms lie around 1. Numbers repeat after a period."""
    known = [width for end, width in places.TABLES["widths"].items() if name.endswith(f".{end}")]
    width = known[0] if known else 2.0 ** -round(np.log2(shape[1]) / 2)
    count = min(period, int(np.prod(shape)))
    return np.resize(drawn(name, (count,), width, float(name.endswith(".scale"))), shape)


def inputs(cfg: Config, kept: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The given values by name, all exact in fp32 but whole numbers. kept: those of any config, for the operands."""
    given = {}
    for name, shape in model.parameter_table(cfg.model).items():
        given[f"weights.{name}"] = drawn_as(f"weights.{name}", shape)
    fields = data.fields(cfg.model)
    shapes = {}
    for part, count in (("train", cfg.data.train_count), ("val", cfg.data.val_count)):
        shapes |= {f"data.{part}.{name}": (count, *fields[name][0]) for name in shards.MEMBERS}
    shapes |= {f"data.empty.{name}": fields[name][0] for name in ("t5", "clip")}
    for name, shape in shapes.items():
        rounded = torch.from_numpy(drawn_as(name, shape)).bfloat16()
        given[name] = rounded.float().numpy()
    given["data.val.timestep"] = np.resize(VAL_TIMESTEPS, cfg.data.val_count)
    return given | {name: array for name, array in kept.items() if not name.startswith(BY_CONFIG)}


def write_data(folder: Path, given: dict[str, np.ndarray]) -> None:
    """Write the given data as the shards of a data set: training in two shards, which differ in length."""
    for part in ("train", "val"):
        bits = {name: shards.to_bf16_bits(given[f"data.{part}.{name}"]) for name in shards.MEMBERS}
        count = len(bits["t5"])
        timesteps = given["data.val.timestep"].tolist() if part == "val" else [None] * count
        samples = []
        for i, timestep in enumerate(timesteps):
            samples.append(shard_writer.Sample({name: array[i] for name, array in bits.items()}, timestep))
        per_shard = count if part == "val" else count // 2 + 1
        shard_writer.write(folder / part, samples, part, per_shard=per_shard)
    # Foreign tools fill an archive up to whole records. Not where a sample would fit in: then the number is unsure.
    last = max((folder / "train").glob("*.tar"))
    filling = -last.stat().st_size % shards.RECORD
    if filling < shards.Layout({name: array.shape[1:] for name, array in bits.items()}).stride:
        with last.open("ab") as file:
            file.write(bytes(filling))
    empty = {name: given[f"data.empty.{name}"][None] for name in ("t5", "clip")}
    shard_writer.write_empty(folder / "empty_encodings", empty)
