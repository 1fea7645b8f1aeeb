"""Writing shards of the layout that shards.py reads: each appears under its name once it is whole and on the disk.

A data set grows in FOLDER.partial and is renamed to FOLDER when its last shard is there, so whoever was interrupted
can go on with the first shard that is missing.
"""

import io
import json
import os
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flux_ref.formats.shards import BLOCK, END_BYTES, MEMBERS, npy_header

PER_SHARD = 10_000  # samples, as in the public conversions: 21.7 GB


@dataclass(frozen=True)
class Sample:
    """Members as uint16 bf16 bits."""

    members: dict[str, np.ndarray]
    timestep: int | None = None
    caption: str = ""


class ShardWriter:
    """One shard, to be used in a `with`: it gets its name when that ends without an error."""

    def __init__(self, path: Path):
        self.path, self.partial = path, path.with_name(f".{path.name}.partial")

    def __enter__(self) -> "ShardWriter":
        self.archive = tarfile.open(self.partial, "w", format=tarfile.USTAR_FORMAT)
        return self

    def add(self, key: str, blobs: dict[str, bytes], timestep: int | None, caption: str = "") -> None:
        """A sample. blobs: the .npy file of every member. Captions are cut to what a tar block holds."""
        self._add(f"{key}.json", description(key, timestep, caption))
        for name in MEMBERS:
            self._add(f"{key}.{name}.bytes", blobs[name])

    def _add(self, name: str, content: bytes) -> None:
        entry = tarfile.TarInfo(name)  # owner, mode and time stay fixed: the same samples give the same bytes
        entry.size = len(content)
        self.archive.addfile(entry, io.BytesIO(content))

    def __exit__(self, kind: type | None, *_: object) -> None:
        end = self.archive.offset + END_BYTES
        self.archive.close()
        if kind is not None:
            self.partial.unlink()
            return
        os.truncate(self.partial, end)  # no padding: the size then tells the number of samples
        with self.partial.open("rb") as file:
            os.fsync(file.fileno())
        self.partial.rename(self.path)


def description(key: str, timestep: int | None, caption: str) -> bytes:
    """The json member, in one tar block. Raises: ValueError if the key alone is too long."""
    while True:
        content = {"key": key, "timestep": timestep} | ({"caption": caption} if caption else {})
        text = json.dumps(content, ensure_ascii=False).encode()
        if len(text) <= BLOCK:
            return text
        if not caption:
            raise ValueError(f"key {key!r} is too long")
        caption = caption[: max(0, len(caption) - max(1, (len(text) - BLOCK) // 4))]


def npy_blob(bits: np.ndarray) -> bytes:
    """bf16 bits in uint16 as a .npy file."""
    return npy_header(bits.shape) + np.ascontiguousarray(bits, dtype=np.uint16).tobytes()


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard_{number:06d}.tar"


def key_of(prefix: str, index: int) -> str:
    """Unique across splits, given the split as prefix."""
    return f"{prefix}_{index:08d}"


def write(folder: Path, samples: Iterable[Sample], prefix: str, per_shard: int = PER_SHARD) -> int:
    """Write samples into a new folder, one shard after the other; returns their number.

    The folder is the caller's to make visible under its final name once all is written.
    """
    folder.mkdir(parents=True)
    samples, count = iter(samples), 0
    sample = next(samples, None)
    while sample is not None:
        with ShardWriter(shard_path(folder, count // per_shard)) as shard:
            while sample is not None:
                blobs = {name: npy_blob(sample.members[name]) for name in MEMBERS}
                shard.add(key_of(prefix, count), blobs, sample.timestep, sample.caption)
                count, sample = count + 1, next(samples, None)
                if count % per_shard == 0:
                    break
    return count
