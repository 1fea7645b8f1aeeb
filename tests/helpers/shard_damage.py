"""Small shards, and damage at known places of them."""

import tarfile
from math import prod
from pathlib import Path

import numpy as np
from conftest import MICRO

from flux_ref import config_file, dataset
from flux_ref.dataset import BLOCK, MEMBERS, NPY_HEADER, Meta, ShardSet

LAYOUT = dataset.sample_layout(config_file.load(MICRO).model)
NAN = 0x7FC0  # as bf16 bits


def samples(count, seed=0, timesteps=True, layout=LAYOUT, prefix="some"):
    """Random samples. prefix: begins each key."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        bits = {name: dataset.to_bf16_bits(rng.standard_normal(shape)) for name, shape in layout.shapes.items()}
        found.append((Meta(dataset.key_of(prefix, i), i % 8 if timesteps else None, f"words {i}"), bits))
    return found


def write(folder, written, per_shard=3):
    for number, first in enumerate(range(0, len(written), per_shard)):
        dataset.write(dataset.shard_path(folder, number), written[first : first + per_shard])


def write_set(root, train, val):
    """train/ and val/ of so many samples, three in a shard, and empty_encodings/."""
    write(root / "train", samples(train, 0, False, prefix="train"))
    write(root / "val", samples(val, 1, prefix="val"))
    ones = {name: np.ones((1, *LAYOUT.shapes[name]), np.float16) for name in ("t5", "clip")}
    dataset.write_empty(root / "empty_encodings", ones)


def blob_bytes(member):
    return NPY_HEADER + 2 * prod(LAYOUT.shapes[member])


def opened(folder, layout=LAYOUT):
    stored = ShardSet(dataset.paths_of(Path(folder)), layout)
    stored.open()
    return stored


def every_sample(folder, layout=LAYOUT):
    stored = opened(folder, layout)
    return [stored.sample(index) for index in range(len(stored))]


def position(member, sample=1):
    """Where the tar header of a member begins within its shard. Its content begins BLOCK behind."""
    before = MEMBERS[: MEMBERS.index(member)] if member in MEMBERS else ()
    sizes = [1, *(blob_bytes(name) for name in before)]  # the json fills one block
    begins = sum(BLOCK - (-size // BLOCK) * BLOCK for size in sizes)
    return sample * LAYOUT.stride + (begins if member in MEMBERS else 0)


def overwrite(path, offset, content):
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def rename(path, member, name):
    """Change the name of a member of sample 1; the checksum of its tar header stays sound."""
    begin = position(member)
    entry = tarfile.TarInfo.frombuf(path.read_bytes()[begin : begin + BLOCK], "utf-8", "strict")
    entry.name = name
    overwrite(path, begin, entry.tobuf(tarfile.USTAR_FORMAT))


def overwrite_json(path, text):
    """Replace the json of sample 1."""
    encoded = text.encode("utf-8", "surrogateescape")
    overwrite(path, position("json") + BLOCK, encoded.ljust(BLOCK, b"\0"))


def overwrite_value(path, member, bits, place=0, sample=1):
    """Set one value of a member to bf16 bits."""
    overwrite(path, position(member, sample) + BLOCK + NPY_HEADER + 2 * place, np.array(bits, "<u2").tobytes())


def put_nan(folder, split, sample):
    """Make the first value of a sample's T5 encoding NaN, in the first shard of a split."""
    overwrite_value(folder / split / "shard_000000.tar", "t5", NAN, sample=sample)
