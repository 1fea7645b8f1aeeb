"""Writing shards in the layout that shards.py reads, and the encodings of the empty caption.

Each of them gets its name once it is whole and on the disk. The members stand in the order of NVIDIA's converter, which
writes with Python's tarfile, too; webdataset's TarWriter would sort them by name.
"""

import json
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flux_ref import files
from flux_ref.formats.shards import BLOCK, END_BYTES, MEMBERS, npy_header

PER_SHARD = 10_000  # samples, as in the public conversions: 21.7 GB
Buffer = bytes | memoryview


@dataclass(frozen=True)
class Sample:
    """Members as uint16 bf16 bits."""

    members: dict[str, np.ndarray]
    timestep: int | None = None
    caption: str = ""


@dataclass(frozen=True)
class ShardWriter:
    """A shard that is being written."""

    file: BinaryIO

    def add(self, key: str, blobs: Mapping[str, Buffer], timestep: int | None, caption: str = "") -> None:
        """Append a sample. blobs: the .npy file of every member. Captions are cut to what a tar block holds."""
        self._add(f"{key}.json", description(key, timestep, caption))
        for name in MEMBERS:
            self._add(f"{key}.{name}.bytes", blobs[name])

    def _add(self, name: str, content: Buffer) -> None:
        entry = tarfile.TarInfo(name)  # owner, mode and time stay fixed: the same samples give the same bytes
        entry.size = len(content)
        # tarfile's own addfile would copy the content, and hold up other threads while a mapped file is read.
        for part in (entry.tobuf(tarfile.USTAR_FORMAT), content, bytes(-len(content) % BLOCK)):
            self.file.write(part)


@contextmanager
def new_shard(path: Path) -> Iterator[ShardWriter]:
    """Write a shard. The file gets its name if the block ends without an error, else it is removed."""
    with files.whole(path) as partial, partial.open("wb") as file:
        yield ShardWriter(file)
        file.write(bytes(END_BYTES))  # no padding as tar's: the size then tells the number of samples


def description(key: str, timestep: int | None, caption: str) -> bytes:
    """The json member, in one tar block. Raises: ValueError if the key alone is too long."""
    content: dict[str, str | int] = {"key": key}
    if timestep is not None:  # NVIDIA's reader takes no null
        content["timestep"] = timestep
    if caption:
        content["caption"] = caption
    text = json.dumps(content, ensure_ascii=False).encode()
    excess = len(text) - BLOCK
    if excess <= 0:
        return text
    if not caption:
        raise ValueError(f"key {key!r} is too long")
    return description(key, timestep, caption[: -max(1, excess // 4)])  # a character takes 4 bytes at most


def npy_blob(bits: np.ndarray) -> bytes:
    """bf16 bits in uint16 as a .npy file."""
    return npy_header(bits.shape) + np.ascontiguousarray(bits, dtype=np.uint16).tobytes()


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard_{number:06d}.tar"


def key_of(split: str, index: int) -> str:
    """The key of a sample, unique across splits."""
    return f"{split}_{index:08d}"


def write(folder: Path, samples: Iterable[Sample], prefix: str, per_shard: int = PER_SHARD) -> int:
    """Write samples into a new folder, one shard after the other; returns their number. prefix: begins each key.

    Each shard is whole, but the folder is whole only when this returns: give it its name then.
    """
    folder.mkdir(parents=True)
    samples = iter(samples)
    count = 0
    for first in samples:
        with new_shard(shard_path(folder, count // per_shard)) as shard:
            for sample in chain([first], islice(samples, per_shard - 1)):
                blobs = {name: npy_blob(sample.members[name]) for name in MEMBERS}
                shard.add(key_of(prefix, count), blobs, sample.timestep, sample.caption)
                count += 1
    return count


def write_empty(folder: Path, encodings: dict[str, np.ndarray]) -> None:
    """Write the encodings of the empty caption, {"t5", "clip"}, as shards.read_empty reads them."""
    with files.whole(folder, is_new=True) as partial:
        partial.mkdir(parents=True)
        for name, array in encodings.items():
            np.save(partial / f"{name}_empty.npy", array)
            files.sync(partial / f"{name}_empty.npy")
