"""The given values: weights, data and operands from which the golden run starts. A port reads or draws them.

An element is (2 u - 1) * width, u being uniforms of stream INIT with seed 0 and the key of the value's name. Scales of
norms add 1. Values that are bf16 in a data set, and operands in bf16 and FP8, are then rounded to bf16.
"""

from pathlib import Path

import numpy as np
import torch

from flux_ref import data, model, rng
from flux_ref.benchmark.facts import TRAIN_SAMPLES
from flux_ref.config import Config
from flux_ref.formats import shard_writer, shards
from flux_ref.speed.number_formats import FORMATS, Format
from tools.golden import places

SEED = 0
VAL_TIMESTEPS = (0, 1, 2, 3, 4, 5, 6, 7, 3)  # uneven, so that means in the wrong order show
# Inputs are uniform in -width .. width. Powers of two keep them exact in every arithmetic. Inputs of norms are small:
# then a wrong epsilon shows. Weights that are not listed have the width at which a linear keeps magnitudes.
WIDTHS = {
    "t5": 2.0,
    "clip": 2.0,
    "mean": 4.0,
    "logvar": 2.0,
    "x": 8.0,
    "grad": 2.0**-7,
    "img_in.weight": 2.0**-5,
    "txt_in.weight": 2.0**-5,
    "img_in.bias": 2.0**-4,
    "txt_in.bias": 2.0**-4,
    "qkv.weight": 2.0**-6,
    "qkv.bias": 2.0**-6,
    "bias": 0.25,
    "scale": 0.25,
}
FULL_BATCH, AROUND = 512, 8  # positions of the first batch, and on both sides of the start of a full-size epoch
ABOVE = slice(1, 12, 2)  # of the largest magnitudes of blocks: those that become the next number of fp32
FP8_FORMATS = ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")
FED = places.TABLES["operands"]  # of single operations in bf16: shape, width and centre


def drawn(name: str, shape: tuple[int, ...], width: float, centre: float = 0.0) -> np.ndarray:
    """(2 u - 1) * width + centre in fp32: one uniform per element, of the name's key."""
    u = rng.uniform(rng.words(SEED, rng.INIT, int(np.prod(shape)), sample=rng.name_key(name))).reshape(shape)
    return ((2 * u - 1) * width + centre).astype(np.float32)


def to_bf16(array: np.ndarray) -> np.ndarray:
    return torch.from_numpy(array).bfloat16().float().numpy()


def width_of(name: str, shape: tuple[int, ...]) -> float:
    """The width of a weight or of a value of the data."""
    for end, width in WIDTHS.items():
        if name.endswith(f".{end}"):
            return width
    return 2.0 ** -round(np.log2(shape[1]) / 2)


def inputs(cfg: Config) -> dict[str, np.ndarray]:
    """The given values by name, all exact in fp32 but the timesteps, which are whole numbers."""
    given = {}
    for name, shape in model.parameter_table(cfg.model).items():
        given[f"weights.{name}"] = drawn_as(f"weights.{name}", shape)
    fields = data.fields(cfg.model)
    shapes = {}
    for part, count in (("train", cfg.data.train_count), ("val", cfg.data.val_count)):
        shapes |= {f"data.{part}.{name}": (count, *fields[name][0]) for name in shards.MEMBERS}
    shapes |= {f"data.empty.{name}": fields[name][0] for name in ("t5", "clip")}
    shapes |= {name: tuple(shape) for name, shape in places.TABLES["shapes"].items()}
    for name, shape in shapes.items():
        given[name] = to_bf16(drawn_as(name, shape))
    given["data.val.timestep"] = np.resize(VAL_TIMESTEPS, cfg.data.val_count)
    for name, numbers in places.TABLES["numbers"].items():
        given[name] = np.array(numbers, np.float32)
    starts = [epoch * TRAIN_SAMPLES + i for epoch in (1, 2) for i in range(-AROUND, AROUND)]
    given["full.positions"] = np.array([*range(FULL_BATCH), *starts])
    for kind in FP8_FORMATS:
        given[f"fp8.edge.{kind}.x"] = edges(FORMATS[kind.removesuffix("fn")])
    for kind in ("e3m2", "e2m3", "e2m1"):
        given[f"formats.edge.{kind}.x"] = edges(FORMATS[kind])
    for name, (shape, width, centre) in FED.items():
        given[f"bf16.fed.{name}"] = to_bf16(drawn(f"bf16.fed.{name}", shape, width, centre))
    given["bf16.fed.attention.q"][:, :, 1] /= 64  # flat scores in one head: a long sum; in the other large ones
    target = drawn("bf16.fed.loss.target", FED["loss.prediction"][0], 2.0**-5)
    given["bf16.fed.loss.target"] = given["bf16.fed.loss.prediction"] + target  # close to it: its rounding shows
    amax = given["formats.blocks.amax"][:, None]
    amax[ABOVE] = np.nextafter(amax[ABOVE], np.sign(amax[ABOVE]) * np.float32(np.inf))
    given["formats.blocks.x"] = np.where(np.arange(32) == 7, amax, given["formats.blocks.x"] / 8 * amax)
    given["formats.stochastic.x"] = np.arange(-128, 127, dtype=np.float32).reshape(51, 5) / 64
    return given


def drawn_as(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A weight or a value of the data. Scales of norms lie around 1."""
    return drawn(name, shape, width_of(name, shape), float(name.endswith(".scale")))


def edges(form: Format) -> np.ndarray:
    """Values at the edges of a format, in fp32, of both signs: (count,).

    Zeros; all subnormals and the first normals; the middle between each two of them, and its neighbours in fp32; the
    four largest values, and the middles between them; beyond the largest, up to infinity. NaN is left out, because some
    formats have several.
    """
    grid = np.array([value for value in form.table()[: form.sign] if np.isfinite(value)], np.float32)
    small = grid[grid <= 2.0 ** (2 - form.bias)]
    large = grid[-4:]
    middles = np.concatenate(((small[1:] + small[:-1]) / 2, (large[1:] + large[:-1]) / 2))
    below = np.nextafter(middles, np.float32(0))
    above = np.nextafter(middles, np.float32(np.inf))
    gap = grid[-1] - grid[-2]
    beyond = np.array((grid[-1] + gap / 4, grid[-1] + gap / 2, 2 * grid[-1], np.inf), np.float32)
    positive = np.concatenate((small, large, grid[1:2] / 4, middles, below, above, beyond))
    return np.concatenate((positive, -positive))


def write_data(folder: Path, given: dict[str, np.ndarray]) -> None:
    """Write the given data as the shards of a data set: training in two shards, which differ in length."""
    for part in ("train", "val"):
        bits = {name: shards.to_bf16_bits(given[f"data.{part}.{name}"]) for name in shards.MEMBERS}
        count = len(bits["t5"])
        samples = []
        for i in range(count):
            timestep = int(given["data.val.timestep"][i]) if part == "val" else None
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
