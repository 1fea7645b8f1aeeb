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
from bisect import bisect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from flux_ref import files
from flux_ref.cli import Fault, Refusal, count_progress, one_line, shown
from flux_ref.config import ModelConfig, Shape, Shapes

MEMBERS = ("t5", "clip", "mean", "logvar")
Arrays = dict[str, np.ndarray]  # of one sample, each of MEMBERS: bf16 bits as uint16
HAS_FADVISE = hasattr(os, "posix_fadvise")  # macOS has none
BLOCK = 512  # bytes; this and RECORD are the units of a tar
RECORD = 10_240
NAME_BYTES = 100  # of a tar header, which begins with the member's name
NPY_HEADER = 128  # bytes before the numbers of a .npy blob
END_BYTES = 2 * BLOCK  # an archive ends with two zero blocks
INFINITE = 0x7F80  # the exponent bits of a bf16: all are set in infinite numbers and NaN


class BadSample(Fault):
    """A sample is not what it should be. The message names the shard, the sample, the reason and the remedy."""

    def __init__(self, reason: str):
        remedy = "by data.kind=toy with --data.train=DIR/train --data.val=DIR/val, or by tools.prepare"
        super().__init__(f"{reason}; make the set anew: {remedy}", alone=True)


def _round_up(size: int, unit: int = BLOCK) -> int:
    return -(-size // unit) * unit


@cache
def npy_header(shape: Shape) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<u2", "fortran_order": False, "shape": shape})
    return stream.getvalue()


class SampleLayout:
    """The bytes of one sample, given the shape of each member."""

    def __init__(self, shapes: Shapes):
        self.shapes = shapes
        # The bytes of each member, by what its name has after the key. Zeros fill up the text.
        self.sizes = {"json": BLOCK} | {f"{name}.bytes": NPY_HEADER + 2 * prod(shapes[name]) for name in MEMBERS}
        # Of a sample in a shard, with tar headers and padding.
        self.stride = sum(BLOCK + _round_up(size) for size in self.sizes.values())

    def count(self, path: Path) -> int:
        """The samples in a shard, by its size; it is not opened. Raises: Refusal, OSError.

        An archive ends after its end marker, or is padded to a multiple of RECORD bytes, as tar does.
        """
        size = path.stat().st_size
        count = (size - END_BYTES) // self.stride
        end = count * self.stride + END_BYTES
        if count < 1 or size not in (end, _round_up(end, RECORD)):
            raise Refusal(
                f"shard {path} ({size} bytes) is truncated, or made for another model: samples of {self.shapes} take"
                f" {self.stride} bytes each; copy it again, or give the config that it was made for"
            )
        return count

    def arrays(self) -> Arrays:
        """Memory for one sample: an uninitialised uint16 array for each member."""
        return {name: np.empty(self.shapes[name], np.uint16) for name in MEMBERS}

    def numbers(self, name: str, blob: bytes | memoryview) -> np.ndarray:
        """The bf16 bits in the .npy blob of a member, not copied. Raises: ValueError if it has another form."""
        shape = self.shapes[name]
        if bytes(blob[:NPY_HEADER]) != npy_header(shape) or len(blob) != self.sizes[f"{name}.bytes"]:
            raise ValueError(f"{name} is no .npy file of uint16 {shape} in C order")
        return np.frombuffer(blob, np.uint16, offset=NPY_HEADER).reshape(shape)


def sample_layout(model: ModelConfig) -> SampleLayout:
    """The layout of samples for a model."""
    latent = model.latent_shape
    text = (model.text_tokens, model.t5_dim)
    return SampleLayout({"t5": text, "clip": (model.clip_dim,), "mean": latent, "logvar": latent})


# Reading


class Meta(NamedTuple):
    """What a sample's json holds."""

    key: str
    timestep: int | None = None
    caption: str = ""


Sample = tuple[Meta, Arrays]


class ShardSet:
    """A data set as one sequence of samples, in the order of its shards."""

    def __init__(self, paths: list[Path], layout: SampleLayout):
        """Count the samples by the sizes of the shards. None is opened (spec: not before run_start).

        Raises: Refusal for a shard whose size does not fit; OSError.
        """
        self.paths = paths
        self.layout = layout
        # The index of each shard's first sample, and at the end the number of samples.
        self.first = list(accumulate((layout.count(path) for path in count_progress(paths)), initial=0))

    def __len__(self) -> int:
        return self.first[-1]

    def open(self) -> None:
        self.files = [path.open("rb", buffering=0) for path in self.paths]

    def drop_page_cache(self) -> None:
        """Drop the shards' clean pages from the operating system's cache, where HAS_FADVISE. Reads no byte."""
        for path in count_progress(self.paths):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def sample(self, index: int) -> Sample:
        """Sample `index` in memory of its own. Raises: BadSample."""
        arrays = self.layout.arrays()
        return self.read(index, arrays), arrays

    def read(self, index: int, arrays: Arrays) -> Meta:
        """Read sample `index` into arrays.

        Raises: BadSample, and the arrays then hold anything; OSError, which names the shard.
        """
        number = bisect(self.first, index) - 1
        position = index - self.first[number]
        path = self.paths[number]
        try:
            with files.naming(path):
                return self._parse(self._bytes(self.files[number], position), arrays)
        except ValueError as error:
            raise BadSample(f"{path}, sample {position}: {error}") from None

    def _bytes(self, file: BinaryIO, position: int) -> bytes:
        """The bytes of a sample of a shard."""
        stride = self.layout.stride
        content = b""
        while len(content) < stride:  # network file systems may take more than one call
            part = os.pread(file.fileno(), stride - len(content), position * stride + len(content))
            if not part:
                raise ValueError("the file ends within the sample")
            content += part
        return content

    def _parse(self, content: bytes, arrays: Arrays) -> Meta:
        """Take a sample apart. Raises: ValueError."""
        members = {}
        begin = 0
        while begin < len(content):  # by hand: tarfile takes three times as long, and holds up the training thread
            name = content[begin : begin + NAME_BYTES].rstrip(b"\0").decode(errors="replace")
            key, _, kind = name.partition(".")
            size = self.layout.sizes.get(kind, 0)
            begin += BLOCK
            members[name] = content[begin : begin + size]
            begin += _round_up(size)
        if members.keys() != {f"{key}.{kind}" for kind in self.layout.sizes}:
            raise ValueError(f"it holds {shown(list(members))}, want json, t5, clip, mean and logvar of one key")
        for name in MEMBERS:
            arrays[name][...] = self.layout.numbers(name, members[f"{key}.{name}.bytes"])
            if (arrays[name] & INFINITE == INFINITE).any():
                raise ValueError(f"{name} holds NaN or infinite values")
        text = members[f"{key}.json"].rstrip(b"\0")
        said = files.json_object_or_empty(text)  # {} for anything else
        timestep = said.get("timestep")
        if not said or type(timestep) not in (int, type(None)):
            raise ValueError(f"its json is {shown(text)}, want an object, with timestep an integer or null")
        return Meta(key, timestep, str(said.get("caption") or ""))


def paths_of(folder: Path) -> list[Path]:
    """The shards of a folder, in order. Raises: Refusal; OSError for a folder that may not be read."""
    if not folder.is_dir():
        raise Refusal(f"data folder {folder} does not exist; set data.train, data.val or make it first")
    if not (paths := files.matching(folder, "[!.]*.tar")):
        raise Refusal(f"data folder {folder} holds no *.tar shard; it may be the folder above the one you mean")
    return paths


def to_bf16_bits(values: np.ndarray) -> np.ndarray:
    """float32 values as bf16 bits in uint16, rounded to nearest even; values are finite."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16_bits(bits: np.ndarray) -> np.ndarray:
    """bf16 bits in uint16 as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def read_empty(folder: str | Path, layout: SampleLayout) -> Arrays:
    """The encodings of the empty caption, {"t5", "clip"} as bf16 bits.

    Reads t5_empty.npy and clip_empty.npy in float16, float32 or bf16 bits, with or without a batch axis.
    Raises: Refusal.
    """
    encodings = {}
    for name in ("t5", "clip"):
        path = Path(folder) / f"{name}_empty.npy"
        shape = layout.shapes[name]
        try:
            array = np.load(path)  # refuses pickles
            if array.dtype not in (np.uint16, np.float16, np.float32) or array.shape not in (shape, (1, *shape)):
                raise ValueError(f"it is {array.dtype} {array.shape}, want uint16, float16 or float32 {shape}")
            values = from_bf16_bits(array) if array.dtype == np.uint16 else array
            if not np.isfinite(values).all():
                raise ValueError("it holds NaN or infinite values")
        except Exception as error:  # numpy's parser raises a dozen kinds
            raise Refusal(f"empty encoding {path}: {one_line(error, 200)}") from None
        encodings[name] = to_bf16_bits(values).reshape(shape)
    return encodings


# Writing. Files get their names once they are whole and on the disk. The members stand in the order of NVIDIA's
# converter, which writes with Python's tarfile, too; webdataset's TarWriter would sort them by name.


@contextmanager
def new_shard(path: Path) -> Iterator[BinaryIO]:
    """A shard for `add`, in a folder that is made if it is not there.

    The file gets its name if the block ends without an error, else it is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.whole(path) as place, place.open("wb") as file:
        yield file
        file.write(bytes(END_BYTES))  # no padding as tar's: the size then tells the number of samples


def add(file: BinaryIO, meta: Meta, members: Arrays) -> None:
    """Append a sample to a new shard. A caption is cut to fill a tar block."""
    _add_member(file, f"{meta.key}.json", b"", _description(meta))
    for name in MEMBERS:
        bits = np.ascontiguousarray(members[name], np.uint16)
        _add_member(file, f"{meta.key}.{name}.bytes", npy_header(bits.shape), bits.data)


def _add_member(file: BinaryIO, name: str, head: bytes, content: bytes | memoryview) -> None:
    entry = tarfile.TarInfo(name)  # owner, mode and time stay fixed: the same samples, the same bytes
    entry.size = len(head) + memoryview(content).nbytes
    # tarfile's own addfile would copy the content, and hold up other threads while a mapped file is read.
    for part in (entry.tobuf(tarfile.USTAR_FORMAT), head, content, bytes(-entry.size % BLOCK)):
        file.write(part)


def _description(meta: Meta) -> bytes:
    """The json member, in one tar block."""
    short = meta._replace(caption=meta.caption[:BLOCK])
    said = {name: value for name, value in short._asdict().items() if value not in (None, "")}  # NVIDIA: no null
    while len(text := json.dumps(said, ensure_ascii=False).encode()) > BLOCK:
        said["caption"] = said["caption"][:-1]
    return text


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"shard_{number:06d}.tar"


def key_of(split: str, index: int) -> str:
    """The key of a sample, unique across splits."""
    return f"{split}_{index:08d}"


def write(path: Path, samples: Iterable[Sample]) -> None:
    """Write samples into a new shard."""
    with new_shard(path) as file:
        for meta, members in samples:
            add(file, meta, members)


def write_empty(folder: Path, encodings: Arrays) -> None:
    """Write the encodings of the empty caption, {"t5", "clip"}, as read_empty reads them."""
    with files.whole(folder, is_new=True) as place:
        place.mkdir(parents=True)
        for name, array in encodings.items():
            path = place / f"{name}_empty.npy"
            np.save(path, array)
            files.sync(path)
