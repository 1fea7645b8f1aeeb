"""The data set on disk, read and written: tar shards of samples in the layout of the public MLPerf submissions.

A sample is five tar members of one key, one after the other: KEY.json, KEY.t5.bytes, KEY.clip.bytes, KEY.mean.bytes,
KEY.logvar.bytes, in any order. The json holds {"key"}, in validation "timestep": 0..7. Each .bytes is a .npy blob of
bf16 bits as uint16, without a batch axis. The sizes for FLUX.1-schnell, in bytes:

    json               512 tar header + 512 the text, filled up with zeros
    each of the four   512 tar header + 128 .npy header + payload, filled up to a multiple of 512
    payload            t5 2,097,152 (256 x 4096)   clip 1,536 (768)   mean, logvar 32,768 each (16 x 32 x 32)
    sample             2,169,344, without a gap to the next

Every member has a fixed size, so sample i of a shard begins at i * stride, and the file's size gives the count.
"""

import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from flux_ref import files
from flux_ref.errors import Refusal, one_line, shown

MEMBERS = ("t5", "clip", "mean", "logvar")
CAN_EVICT = hasattr(os, "posix_fadvise")  # macOS has none
BLOCK, RECORD = 512, 10_240  # bytes; tar's two units
NPY_HEADER = 128  # bytes before the numbers of a .npy blob
END_BYTES = 2 * BLOCK  # an archive ends with two zero blocks
Buffer = bytes | memoryview
PER_SHARD = 10_000  # samples, as in the public conversions: 21.7 GB


class BadSample(Refusal):
    """A sample is not what it should be. The message names the shard, the sample and the reason."""


def _round_up(size: int, unit: int = BLOCK) -> int:
    return -(-size // unit) * unit


def npy_header(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<u2", "fortran_order": False, "shape": shape})
    return stream.getvalue()


class Layout:
    """The bytes of one sample, given the shape of each member."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes = shapes
        self.npy_headers = {name: npy_header(shapes[name]) for name in MEMBERS}
        self.blob_bytes = {name: NPY_HEADER + 2 * prod(shapes[name]) for name in MEMBERS}
        # Of a sample in a shard, with tar headers and padding.
        self.stride = 2 * BLOCK + sum(BLOCK + _round_up(size) for size in self.blob_bytes.values())

    def rows(self) -> dict[str, np.ndarray]:
        """Memory for one sample: an uninitialised uint16 array for each member."""
        return {name: np.empty(self.shapes[name], np.uint16) for name in MEMBERS}


def layout(model) -> Layout:
    """The layout of samples for a model (config.ModelConfig)."""
    latent = model.latent_shape
    text = (model.text_tokens, model.t5_dim)
    return Layout({"t5": text, "clip": (model.clip_dim,), "mean": latent, "logvar": latent})


# Reading


@dataclass(frozen=True)
class Meta:
    """What a sample's json says."""

    key: str
    timestep: int | None
    caption: str


class Shard:
    """One file of samples."""

    def __init__(self, path: Path, layout: Layout):
        """Count the samples by the size of the file, which is not opened. Raises: Refusal, OSError.

        An archive ends after its end marker, or is padded to a multiple of RECORD bytes, as tar does.
        """
        self.path = path
        self.layout = layout
        size = path.stat().st_size
        self.count = (size - END_BYTES) // layout.stride
        end = self.count * layout.stride + END_BYTES
        if self.count < 1 or size not in (end, _round_up(end, RECORD)):
            raise Refusal(
                f"shard {path} ({size} bytes) is truncated, or made for another model: samples of {layout.shapes} take"
                f" {layout.stride} bytes each; copy it again, or give the config that it was made for"
            )

    def open(self) -> None:
        self.file = self.path.open("rb", buffering=0)

    def require_end(self) -> None:
        """Check that only zeros follow the last sample. Raises: BadSample."""
        if any(os.pread(self.file.fileno(), RECORD + END_BYTES, self.count * self.layout.stride)):
            raise BadSample(f"shard {self.path} has no end marker after {self.count} samples; copy it again")

    def read(self, position: int, rows: dict[str, np.ndarray]) -> Meta:
        """Read a sample into rows: one C-contiguous uint16 array (bf16 bits) for each member.

        Raises: BadSample; the rows then hold anything.
        """
        try:
            return self._parse(self._bytes(position), rows)
        except (OSError, ValueError, tarfile.HeaderError) as error:
            raise BadSample(f"{self.path}, sample {position}: {error}") from None

    def _bytes(self, position: int) -> bytes:
        """The bytes of a sample."""
        stride = self.layout.stride
        content = b""
        while len(content) < stride:  # network file systems may take more than one call
            part = os.pread(self.file.fileno(), stride - len(content), position * stride + len(content))
            if not part:
                raise ValueError("the file ends within the sample")
            content += part
        return content

    def _parse(self, content: bytes, rows: dict[str, np.ndarray]) -> Meta:
        """Take a sample apart. Raises: ValueError, tarfile.HeaderError."""
        members = _members(content)
        key = next(iter(members)).partition(".")[0]
        wanted = {f"{key}.json", *(f"{key}.{name}.bytes" for name in MEMBERS)}
        if members.keys() != wanted:
            raise ValueError(f"it holds {', '.join(map(shown, members))}, want {', '.join(map(shown, wanted))}")
        for name in MEMBERS:
            blob = members[f"{key}.{name}.bytes"]
            if blob[:NPY_HEADER] != self.layout.npy_headers[name] or len(blob) != self.layout.blob_bytes[name]:
                raise ValueError(f"{name} has another form, want uint16 {self.layout.shapes[name]}")
            rows[name].reshape(-1)[:] = np.frombuffer(blob, np.uint16, offset=NPY_HEADER)
            if _not_finite(rows[name]):
                raise ValueError(f"{name} holds NaN or infinite values")
        text = bytes(members[f"{key}.json"])
        said = files.json_object(text)  # {} for anything else
        timestep = said.get("timestep")
        if not said or type(timestep) not in (int, type(None)):
            raise ValueError(f"its json is {shown(text)}, want an object, with timestep an integer or null")
        return Meta(key, timestep, str(said.get("caption") or ""))


def _members(content: bytes) -> dict[str, memoryview]:
    """The tar members of a sample by name. Raises: ValueError, tarfile.HeaderError."""
    members = {}
    begin = 0
    while begin < len(content):
        entry = tarfile.TarInfo.frombuf(content[begin : begin + BLOCK], "utf-8", "strict")
        begin += BLOCK
        if not entry.isreg() or not 0 <= entry.size < len(content):
            raise ValueError(f"{shown(entry.name)} is no regular file of a sample's size")
        members[entry.name] = memoryview(content)[begin : begin + entry.size]
        begin += _round_up(entry.size)
    return members


class ShardSet:
    """A data set as one sequence of samples, in the order of its shards."""

    def __init__(self, folder: str | Path, layout: Layout):
        """Look at names and sizes alone: no shard of the right size is opened (spec: not before run_start).

        folder: "" holds no samples.
        Raises: Refusal for a missing or empty folder and for a shard whose size does not fit.
        """
        self.layout = layout
        self.paths = paths_of(Path(folder)) if folder else []
        self.shards = [Shard(path, layout) for path in self.paths]
        # The index of each shard's first sample, and at the end the number of samples.
        self.first = np.cumsum([0, *(shard.count for shard in self.shards)])

    def __len__(self) -> int:
        return int(self.first[-1])

    def open(self, rank: int = 0, size: int = 1) -> None:
        """Open every shard. Check the first and last sample of every size-th shard, from number rank on.

        Raises: BadSample.
        """
        for shard in self.shards:
            shard.open()
        for shard in self.shards[rank::size]:
            for position in {0, shard.count - 1}:
                shard.read(position, self.layout.rows())
            shard.require_end()

    def evict(self) -> None:
        """Drop the shards' clean pages from the operating system's cache, where CAN_EVICT. Reads no byte."""
        for path in self.paths:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, index: int, rows: dict[str, np.ndarray]) -> Meta:
        """Read sample `index` into rows, as Shard.read does. Raises: BadSample."""
        number = int(np.searchsorted(self.first, index, side="right")) - 1
        return self.shards[number].read(index - int(self.first[number]), rows)


def paths_of(folder: Path) -> list[Path]:
    """The shards of a folder, in order. Raises: Refusal."""
    if not folder.is_dir():
        raise Refusal(f"data folder {folder} does not exist; set data.train, data.val or make it first")
    if not (paths := sorted(path for path in folder.glob("*.tar") if not path.name.startswith("."))):
        raise Refusal(f"data folder {folder} holds no *.tar shard; it may be the folder above the one you mean")
    return paths


def _not_finite(bits: np.ndarray) -> bool:
    """Whether all exponent bits of any bf16 are set: infinite or NaN."""
    # Two maxima cost less than a mask. The negative ones among them are the largest unsigned numbers of all, the
    # positive ones the largest signed numbers.
    return bits.max() >= 0xFF80 or bits.view(np.int16).max() >= 0x7F80


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 values as bf16 bits in uint16, rounded to nearest even; values are finite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """bf16 bits in uint16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def read_empty(folder: str | Path, layout: Layout) -> dict[str, np.ndarray]:
    """The encodings of the empty caption, {"t5", "clip"} as bf16 bits.

    Reads t5_empty.npy and clip_empty.npy in float16, float32 or bf16 bits, with or without a batch axis.
    Raises: Refusal.
    """
    encodings = {}
    for name in ("t5", "clip"):
        path = Path(folder) / f"{name}_empty.npy"
        shape = layout.shapes[name]
        try:
            array = np.load(path, mmap_mode="r")  # refuses pickles, and allocates nothing that the file does not hold
            if array.dtype not in (np.uint16, np.float16, np.float32) or array.shape not in (shape, (1, *shape)):
                raise ValueError(f"it is {array.dtype} {array.shape}, want uint16, float16 or float32 {shape}")
            bits = np.array(array) if array.dtype == np.uint16 else to_bf16_bits(array)
            if _not_finite(bits) or not np.isfinite(array).all():
                raise ValueError("it holds NaN or infinite values")
        except Exception as error:  # numpy's parser raises a dozen kinds
            raise Refusal(f"empty encoding {path}: {one_line(error, 200)}") from None
        encodings[name] = bits.reshape(shape)
    return encodings


# Writing. Files get their names once they are whole and on the disk. The members stand in the order of NVIDIA's
# converter, which writes with Python's tarfile, too; webdataset's TarWriter would sort them by name.


@dataclass(frozen=True)
class Sample:
    """Members as uint16 bf16 bits."""

    members: dict[str, np.ndarray]
    timestep: int | None = None
    caption: str = ""


@contextmanager
def new_shard(path: Path) -> Iterator[BinaryIO]:
    """A shard for `add`. The file gets its name if the block ends without an error, else it is removed."""
    with files.whole(path) as place, place.open("wb") as file:
        yield file
        file.write(bytes(END_BYTES))  # no padding as tar's: the size then tells the number of samples


def add(
    file: BinaryIO, key: str, members: Mapping[str, np.ndarray], timestep: int | None = None, caption: str = ""
) -> None:
    """Append a sample to a new shard. members: bf16 bits as uint16. A caption is cut to fill a tar block."""
    contents: dict[str, list[Buffer]] = {"json": [_description(key, timestep, caption)]}
    for name in MEMBERS:
        bits = np.ascontiguousarray(members[name], np.uint16)
        contents[f"{name}.bytes"] = [npy_header(bits.shape), bits.data]
    for name, parts in contents.items():
        entry = tarfile.TarInfo(f"{key}.{name}")  # owner, mode and time stay fixed: the same samples, the same bytes
        entry.size = sum(memoryview(part).nbytes for part in parts)
        # tarfile's own addfile would copy the content, and hold up other threads while a mapped file is read.
        for part in (entry.tobuf(tarfile.USTAR_FORMAT), *parts, bytes(-entry.size % BLOCK)):
            file.write(part)


def _description(key: str, timestep: int | None, caption: str) -> bytes:
    """The json member, in one tar block."""
    said = {"key": key} | ({} if timestep is None else {"timestep": timestep})  # NVIDIA's reader takes no null
    for length in range(min(len(caption), BLOCK), 0, -1):
        text = json.dumps(said | {"caption": caption[:length]}, ensure_ascii=False).encode()
        if len(text) <= BLOCK:
            return text
    return json.dumps(said).encode()


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
        with new_shard(shard_path(folder, count // per_shard)) as file:
            for sample in chain([first], islice(samples, per_shard - 1)):
                add(file, key_of(prefix, count), sample.members, sample.timestep, sample.caption)
                count += 1
    return count


def write_empty(folder: Path, encodings: dict[str, np.ndarray]) -> None:
    """Write the encodings of the empty caption, {"t5", "clip"}, as read_empty reads them."""
    with files.whole(folder, is_new=True) as place:
        place.mkdir(parents=True)
        for name, array in encodings.items():
            np.save(place / f"{name}_empty.npy", array)
            files.sync(place / f"{name}_empty.npy")
