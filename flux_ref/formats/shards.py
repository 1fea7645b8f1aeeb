"""The data set on disk: tar shards of embedded samples, in the layout of the public MLPerf submissions.

A sample is five tar members in this order: KEY.json, KEY.t5.bytes, KEY.clip.bytes, KEY.mean.bytes,
KEY.logvar.bytes. The json holds {"key"}, in validation "timestep": 0..7. Each .bytes is a .npy blob of bf16 bits as
uint16, without a batch axis. The sizes for FLUX.1-schnell, in bytes:

    json               512 tar header + 512 the text, filled up with zeros
    each of the four   512 tar header + 128 .npy header + payload, filled up to a multiple of 512
    payload            t5 2,097,152 (256 x 4096)   clip 1,536 (768)   mean, logvar 32,768 each (16 x 32 x 32)
    sample             2,169,344, without a gap to the next

Every member has a fixed size, so sample i of a shard begins at i * stride, and the file's size gives the count.
"""

import contextlib
import io
import os
import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from flux_ref.errors import Refusal
from flux_ref.formats import outside

MEMBERS = ("t5", "clip", "mean", "logvar")
CAN_EVICT = hasattr(os, "posix_fadvise")  # macOS has none
BLOCK, RECORD = 512, 10_240  # bytes; tar's two units
NPY_HEADER = 128  # bytes before the numbers of a .npy blob
END_BYTES = 2 * BLOCK  # an archive ends with two zero blocks
NPY_MOST = 2**16  # bytes, of any header of a .npy file
OWN_KEY = re.compile(r"\w+_[0-9]{8}")  # as shard_writer.key_of names samples
FILE_TYPES = (b"0", b"\0")  # of a tar header: no link, no folder
TAR_SIZE = re.compile(rb" *([0-7]+)[ \0]*")  # int() would take signs and underscores, too
ORDER = "each sample needs KEY.json and then KEY.t5, clip, mean and logvar.bytes, in this order"


class BadSample(Exception):
    """A sample is not what it should be. The message names the shard, the sample and the reason."""


def _round_up(size: int, unit: int = BLOCK) -> int:
    return -(-size // unit) * unit


def npy_header(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<u2", "fortran_order": False, "shape": shape})
    return stream.getvalue()


@dataclass(frozen=True)
class Layout:
    """The bytes of one sample, given the shape of each member."""

    shapes: dict[str, tuple[int, ...]]

    @cached_property
    def payload_bytes(self) -> dict[str, int]:
        """Bytes of each member's array, without its .npy header."""
        return {name: 2 * prod(self.shapes[name]) for name in MEMBERS}

    @cached_property
    def stride(self) -> int:
        """Bytes of one sample in a shard, with tar headers and padding."""
        return 2 * BLOCK + sum(BLOCK + _round_up(NPY_HEADER + size) for size in self.payload_bytes.values())

    @cached_property
    def npy_headers(self) -> dict[str, bytes]:
        return {name: npy_header(self.shapes[name]) for name in MEMBERS}

    def rows(self) -> dict[str, np.ndarray]:
        """Memory for one sample: an uninitialised uint16 array for each member."""
        return {name: np.empty(self.shapes[name], np.uint16) for name in MEMBERS}


def layout(model) -> Layout:
    """The layout of samples for a model (config.ModelConfig)."""
    latent = tuple(model.latent_shape)
    text = (model.text_tokens, model.t5_dim)
    return Layout({"t5": text, "clip": (model.clip_dim,), "mean": latent, "logvar": latent})


@dataclass(frozen=True)
class Meta:
    """What a sample's json says."""

    key: str
    timestep: int | None
    caption: str


class Shard:
    """One file of samples."""

    def __init__(self, path: Path, layout: Layout):
        """Count the samples by the size of the file. Only a file of a wrong size is opened, to name its shapes.

        An archive ends after its end marker, or is padded to a multiple of RECORD bytes, as tar does.
        Raises: Refusal for a truncated or foreign shard, and for one whose padding may hide a sample; OSError.
        """
        self.path = path
        self.layout = layout
        self.stamp = _stamp(path.stat())
        self.descriptor = -1  # until opened
        size = self.stamp[0]
        stride = layout.stride
        self.count = max(0, size - END_BYTES) // stride
        end = self.count * stride + END_BYTES
        padding = size - end
        if not self.count or (padding and _round_up(end, RECORD) != size):
            if (found := _first_shapes(path)) not in ({}, layout.shapes):
                raise Refusal(
                    f"shard {path} is of another config: its samples have shapes {found}, want {layout.shapes};"
                    " give the config that it was made for (verify takes --config), or prepare the data again"
                )
            raise Refusal(
                f"shard {path} ({size} bytes) is truncated or foreign: samples of shape {layout.shapes} take"
                f" {stride} bytes each and end after {self.count} of them at byte {end}; copy it again; {ORDER}"
            )
        # What looks like the last samples may be padding, too.
        fewest = max(1, self.count - (RECORD - 1 - padding) // stride)
        if padding and fewest < self.count:
            raise Refusal(
                f"shard {path} ({size} bytes) is padded to records of {RECORD} bytes, and samples of {stride} bytes are"
                f" so small that it may hold {fewest} to {self.count} of them; pack it again with tar"
                " --blocking-factor=1, which does not pad"
            )

    def open(self) -> None:
        self.descriptor = os.open(self.path, os.O_RDONLY)

    def close(self) -> None:
        os.close(self.descriptor)

    def where(self, position: int) -> str:
        """A sample's place in words."""
        return f"{self.path}, sample {position}"

    def require_end(self) -> None:
        """Check that only zeros follow the last sample. Raises: BadSample."""
        if any(os.pread(self.descriptor, RECORD + END_BYTES, self.count * self.layout.stride)):
            raise BadSample(f"shard {self.path} has no end marker after {self.count} samples; copy it again")

    def read(self, position: int, rows: dict[str, np.ndarray]) -> Meta:
        """Read a sample into rows: one C-contiguous uint16 array (bf16 bits) for each member.

        Raises: BadSample; the rows then hold anything.
        """
        content = self._bytes(position)
        where = self.where(position)
        member, size = _tar_entry(content, 0, where)
        if not member.endswith(".json") or size > BLOCK:
            raise BadSample(f"{where}: found member {member!r} of {size} bytes, want KEY.json of 512 at most; {ORDER}")
        meta = parse_meta(member.removesuffix(".json"), bytes(content[BLOCK : BLOCK + size]), where)
        where += f", key {meta.key}"
        begin = 2 * BLOCK
        for name in MEMBERS:
            payload_bytes = self.layout.payload_bytes[name]
            member, size = _tar_entry(content, begin, where)
            if member != f"{meta.key}.{name}.bytes":
                raise BadSample(f"{where}: found member {member!r} where {meta.key}.{name}.bytes belongs; {ORDER}")
            payload = begin + BLOCK + NPY_HEADER
            header = bytes(content[begin + BLOCK : payload])
            if header != self.layout.npy_headers[name]:
                text = header[10:].decode("latin-1").strip(" \n\0")  # after the magic bytes
                raise BadSample(f"{where}: {name} is {text[:80]!r}, want uint16 {self.layout.shapes[name]}")
            if size != NPY_HEADER + payload_bytes:
                raise BadSample(f"{where}: {name} has {size} bytes")
            rows[name].reshape(-1)[:] = content[payload : payload + payload_bytes].view(np.uint16)
            if _not_finite(rows[name]):
                raise BadSample(f"{where}: {name} holds NaN or infinite values")
            begin += BLOCK + _round_up(NPY_HEADER + payload_bytes)
        return meta

    def _bytes(self, position: int) -> np.ndarray:
        """The bytes of a sample. Raises: BadSample."""
        content = np.empty(self.layout.stride, np.uint8)
        filled = 0
        while filled < len(content):  # network file systems may take more than one call
            try:
                count = os.preadv(self.descriptor, [content[filled:]], position * len(content) + filled)
            except OSError as error:
                raise BadSample(f"{self.where(position)}: {error.strerror}") from None
            if count == 0:
                raise BadSample(f"{self.where(position)}: the file ends within the sample")
            filled += count
        if _stamp(os.fstat(self.descriptor)) != self.stamp:
            raise BadSample(f"{self.where(position)}: the file has changed since the start; copy it again")
        return content


class ShardSet:
    """A data set as one sequence of samples, in the order of its shards."""

    def __init__(self, folder: str | Path, layout: Layout, split: str = "train"):
        """Look at names and sizes alone: no shard of the right size is opened (spec: not before run_start).

        split: "train" or "val", for a folder that holds both in Energon's way; its list of shards is read.
        The folder "" of "val" holds no samples.
        Raises: Refusal for a missing or empty folder and for a shard that is truncated, foreign or padded ambiguously.
        """
        self.layout = layout
        self.paths = paths_of(Path(folder), split) if folder or split == "train" else []
        self.shards = [Shard(path, layout) for path in self.paths]
        # The index of each shard's first sample, and at the end the number of samples.
        self.first = np.cumsum([0, *(shard.count for shard in self.shards)])

    def __len__(self) -> int:
        return int(self.first[-1])

    def open(self, rank: int = 0, size: int = 1) -> None:
        """Open every shard. Check the first and last sample of every size-th shard, from number rank on.

        Raises: Refusal.
        """
        for shard in self.shards:
            shard.open()
        rows = self.layout.rows()
        try:
            for shard in self.shards[rank::size]:
                for position in {0, shard.count - 1}:
                    shard.read(position, rows)
                shard.require_end()
        except BadSample as error:
            raise Refusal(str(error)) from None

    def evict(self) -> None:
        """Drop the shards' clean pages from the operating system's cache, where CAN_EVICT. Reads no byte."""
        for path in self.paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def _find(self, index: int) -> tuple[Shard, int]:
        """The shard of a sample, and the sample's position in this shard."""
        number = int(np.searchsorted(self.first, index, side="right")) - 1
        return self.shards[number], index - int(self.first[number])

    def read(self, index: int, rows: dict[str, np.ndarray]) -> Meta:
        """Read sample `index` into rows, as Shard.read does. Raises: BadSample."""
        shard, position = self._find(index)
        return shard.read(position, rows)

    def read_meta(self, index: int) -> Meta:
        """What the json of sample `index` says. Raises: BadSample."""
        shard, position = self._find(index)
        where = shard.where(position)
        content = os.pread(shard.descriptor, 2 * BLOCK, position * self.layout.stride)
        member, size = _tar_entry(content, 0, where)
        return parse_meta(member.removesuffix(".json"), content[BLOCK : BLOCK + size], where)


def paths_of(folder: Path, split: str) -> list[Path]:
    """The shards of a folder, in order. Raises: Refusal."""
    if not folder.is_dir():
        raise Refusal(f"data folder {folder} does not exist; set data.train, data.val or make it first")
    if (folder / ".nv-meta").is_dir():
        from flux_ref.formats import energon  # brings yaml, which few folders need

        return energon.shards_of(folder, split)
    if not (paths := sorted(path for path in folder.glob("*.tar") if not path.name.startswith("."))):
        raise Refusal(f"data folder {folder} holds no *.tar shard; it may be the folder above the one you mean")
    return paths


def _stamp(status: os.stat_result) -> tuple[int, int]:
    """What changes when a file is written: its size, and its time in nanoseconds."""
    return status.st_size, status.st_mtime_ns


def _tar_entry(content: np.ndarray | bytes, begin: int, where: str) -> tuple[str, int]:
    """(name, size) of the member whose tar header begins at a byte. Raises: BadSample."""
    block = bytes(content[begin : begin + BLOCK])
    try:
        is_file = block[257:262] == b"ustar" and block[156:157] in FILE_TYPES
        if not is_file or not (size := TAR_SIZE.fullmatch(block, 124, 136)):
            raise ValueError
        return block[:100].rstrip(b"\0").decode(), int(size[1], 8)
    except ValueError:
        raise BadSample(f"{where}: no tar header where one belongs") from None


def _first_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the first sample of a shard, whatever they are; {} if there is none."""
    found = {}
    begin = 2 * BLOCK
    with contextlib.suppress(Exception), outside.opened(path, "shard") as file:  # numpy's parser raises a dozen kinds
        for name in MEMBERS:
            file.seek(begin)
            _, size = _tar_entry(file.read(BLOCK), 0, str(path))
            np.lib.format.read_magic(file)
            found[name] = np.lib.format.read_array_header_1_0(file)[0]
            begin += BLOCK + _round_up(size)
    return found if len(found) == len(MEMBERS) else {}


def parse_meta(key: str, text: bytes, where: str) -> Meta:
    """What the json of a sample says. Raises: BadSample."""
    try:
        content = outside.parse_json(text)
        named = content.get("key", key)
        timestep = content.get("timestep")
        caption = content.get("caption") or ""
    except (ValueError, AttributeError):
        raise BadSample(f"{where}: {key}.json is not a JSON object") from None
    # NVIDIA's converter numbers the members and puts the key of the source into the json.
    if named != key and OWN_KEY.fullmatch(key) and OWN_KEY.fullmatch(str(named)):
        raise BadSample(f"{where}: {key}.json is of sample {outside.shown(named)}; copy or make the shard again")
    if timestep is not None and type(timestep) is not int:
        raise BadSample(f"{where}: timestep {timestep!r} is neither an integer nor null")
    return Meta(key, timestep, str(caption))


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
        content = outside.read_bytes(path, "empty encoding", NPY_MOST + 4 * prod(shape))
        found = "no whole .npy file"
        with contextlib.suppress(Exception):  # numpy's parser raises a dozen kinds
            file = io.BytesIO(content)
            npy = np.load(file)  # refuses pickles
            if not file.read(1):
                found = f"{npy.dtype} {npy.shape}"
        if found not in [f"{kind} {own}" for kind in ("uint16", "float16", "float32") for own in (shape, (1, *shape))]:
            raise Refusal(f"empty encoding {path}: it is {found}; want uint16, float16 or float32 {shape}")
        bits = npy if npy.dtype == np.uint16 else to_bf16_bits(npy)
        encodings[name] = bits.reshape(shape)
        if _not_finite(bits) or not np.isfinite(npy).all():
            raise Refusal(f"empty encoding {path} holds NaN or infinite values")
    return encodings
