"""The data set on disk: tar shards of embedded samples, as the public MLPerf submissions convert them.

A sample is five tar members in this order: KEY.json, KEY.t5.bytes, KEY.clip.bytes, KEY.mean.bytes,
KEY.logvar.bytes. The json holds {"key", "timestep": 0..7 or null}; each .bytes is a .npy blob of bf16 bits as
uint16, without a batch axis. Of FLUX.1-schnell, in bytes:

    json               512 tar header + 512 the text, filled up with zeros
    each of the four   512 tar header + 128 .npy header + payload, filled up to a multiple of 512
    payload            t5 2,097,152 (256 x 4096)   clip 1,536 (768)   mean, logvar 32,768 each (16 x 32 x 32)
    sample             2,169,344, without a gap to the next

As every member has a fixed size, sample i of a shard begins at i * stride,
and one read puts each payload straight where it belongs.
"""

import contextlib
import io
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from flux_ref.errors import Refusal
from flux_ref.formats import energon, tar_index
from flux_ref.formats.tar_index import BLOCK, NPY_HEADER, RECORD

MEMBERS = ("t5", "clip", "mean", "logvar")
END_BYTES = 2 * BLOCK  # an archive ends with two zero blocks


class BadSample(Exception):
    """A sample is not what it should be; the message names shard, key and reason."""


def _round_up(size: int) -> int:
    return -(-size // BLOCK) * BLOCK


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
        """Of each member's array, without its .npy header."""
        return {name: 2 * prod(self.shapes[name]) for name in MEMBERS}

    @cached_property
    def stride(self) -> int:
        """Bytes of one sample in a shard, tar headers and padding included."""
        return 2 * BLOCK + sum(BLOCK + _round_up(NPY_HEADER + size) for size in self.payload_bytes.values())


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


class ShardSet:
    """A data set as one sequence of samples, in the order of its shards.

    Making it looks at names and sizes only and reads no byte of data, as long as the shards have the fixed layout;
    `open` reads the first of them.
    """

    def __init__(self, folder: str | Path, layout: Layout, split: str = "train"):
        """split: "train" or "val", for a folder that holds both in Energon's way.

        Raises: Refusal for a missing or empty folder and for a shard that is truncated or foreign.
        """
        self.folder, self.layout = Path(folder), layout
        self.listing = energon.shards_of(self.folder, split)
        self.paths = self.listing.paths
        self.places: dict[int, np.ndarray] = {}  # of each shard without the fixed layout, see tar_index.py
        counts = [self._count(i, path) for i, path in enumerate(self.paths)]
        for path, count in zip(self.paths, counts):
            self._require_count(path, count, self.listing.counts.get(path))
        # The index of each shard's first sample, and at the end the number of samples.
        self.first = np.concatenate(([0], np.cumsum(counts)))
        self.kept: np.ndarray | None = None  # once opened, if some samples are left out: the others
        self.descriptors: list[int] = []
        self.npy_headers = {name: npy_header(layout.shapes[name]) for name in MEMBERS}

    def __len__(self) -> int:
        return int(self.first[-1]) - sum(len(keys) for keys in self.listing.excluded.values())

    def _count(self, shard: int, path: Path) -> int:
        size, stride = path.stat().st_size, self.layout.stride
        most = max(0, size - END_BYTES) // stride
        ends = {n: n * stride + END_BYTES for n in range(most, max(0, most - RECORD // stride - 1), -1)}
        fits = [n for n, end in ends.items() if size in (end, -(-end // RECORD) * RECORD)]
        if fits and (stride > RECORD or size % RECORD):
            return fits[0]
        # The padding is longer than very small samples: look where the last of them begins.
        for count in fits:
            with path.open("rb") as file:
                starts = (0, (count - 1) * stride)
                if all(_first_kind(file.fileno(), at) == "json" for at in starts) and _ends(
                    file.fileno(), count * stride
                ):
                    return count
        return self._walk(shard, path)

    def _walk(self, shard: int, path: Path) -> int:
        size, stride = path.stat().st_size, self.layout.stride
        most = max(0, size - END_BYTES) // stride
        try:
            self.places[shard] = tar_index.find(path, self.layout.payload_bytes)
        except tar_index.NotOurs as error:
            raise Refusal(
                f"shard {path} ({size} bytes) is truncated or foreign: samples of shape {self.layout.shapes} take"
                f" {stride} bytes each and end after {most} of them at byte {most * stride + END_BYTES}, and {error};"
                " copy or convert it again"
            ) from None
        return len(self.places[shard])

    @staticmethod
    def _require_count(path: Path, count: int, told: int | None) -> None:
        if told not in (None, count):
            raise Refusal(
                f"shard {path} holds {count} samples, its size or {energon.META} says {told}; copy it again, or run"
                " energon prepare again"
            )

    def open(self, rank: int = 0, size: int = 1) -> None:
        """Open every shard; check the ends of every size-th, from rank on. Raises: Refusal."""
        self.descriptors = [os.open(path, os.O_RDONLY) for path in self.paths]
        for shard, path in enumerate(self.paths):  # the same members in another order give the same size
            if shard not in self.places and _first_kind(self.descriptors[shard], 0) not in ("json", ""):
                self._require_count(path, self._walk(shard, path), int(self.first[shard + 1] - self.first[shard]))
        try:
            rows = {name: np.empty(self.layout.shapes[name], np.uint16) for name in MEMBERS}
            for start, stop in list(zip(self.first[:-1], self.first[1:]))[rank::size]:
                for index in {int(start), int(stop) - 1}:
                    self._read(index, rows)
            self._leave_out()
        except BadSample as error:
            raise Refusal(str(error)) from None
        for shard in range(len(self.paths))[rank::size]:
            count = int(self.first[shard + 1] - self.first[shard])
            if shard not in self.places and not _ends(self.descriptors[shard], count * self.layout.stride):
                raise Refusal(
                    f"shard {self.paths[shard]} is truncated: no end marker after {count} samples; copy it again"
                )

    def _leave_out(self) -> None:
        """Find the samples that Energon's split.yaml excludes by key. Raises: Refusal, BadSample."""
        if not self.listing.excluded:
            return
        kept = np.ones(int(self.first[-1]), bool)
        for shard, path in enumerate(self.paths):
            keys = set(self.listing.excluded.get(path, ()))
            for index in range(int(self.first[shard]), int(self.first[shard + 1])) if keys else ():
                key = self._meta(index).key
                if key in keys:
                    keys.remove(key)
                    kept[index] = False
            if keys:
                raise Refusal(f"{energon.META} excludes {path.name}/{min(keys)}, which is not there; prepare it again")
        self.kept = np.flatnonzero(kept)

    def evict(self) -> None:
        """Drop the shards' clean pages from the operating system's cache; needs no privilege (Linux)."""
        for path in self.paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def expect(self, indices: Iterable[int]) -> None:
        """Tell the operating system which samples come next: disks and network file systems like long queues."""
        for index in indices if hasattr(os, "posix_fadvise") else ():
            index = int(index if self.kept is None else self.kept[index])
            shard = int(np.searchsorted(self.first, index, side="right")) - 1
            position, size = int(index - self.first[shard]), self.layout.stride
            if shard in self.places:
                offset, size = (int(part) for part in self.places[shard][position][1])  # T5, 97 % of the sample
            else:
                offset = position * size
            with contextlib.suppress(OSError):  # a hint; not every file system takes it
                os.posix_fadvise(self.descriptors[shard], offset, size, os.POSIX_FADV_WILLNEED)

    def read(self, index: int, rows: dict[str, np.ndarray]) -> Meta:
        """Read sample `index` into rows: one C-contiguous uint16 array (bf16 bits) per member.

        Raises: BadSample; the rows then hold anything.
        """
        return self._read(int(index if self.kept is None else self.kept[index]), rows)

    def _read(self, index: int, rows: dict[str, np.ndarray]) -> Meta:
        shard, where = self._where(index)
        read = self._read_indexed if shard in self.places else self._read_fixed
        meta = read(shard, int(index - self.first[shard]), rows, where)
        for name in MEMBERS:
            if _not_finite(rows[name]):
                raise BadSample(f"{where}, key {meta.key}: {name} holds NaN or infinite values")
        return meta

    def _where(self, index: int) -> tuple[int, str]:
        shard = int(np.searchsorted(self.first, index, side="right")) - 1
        return shard, f"{self.paths[shard]}, sample {index - self.first[shard]}"

    def _meta(self, index: int) -> Meta:
        """The json of a sample alone."""
        shard, where = self._where(index)
        position = int(index - self.first[shard])
        if shard in self.places:
            return self._indexed_meta(shard, position, where)
        part = bytearray(2 * BLOCK)
        _read_into(self.descriptors[shard], [part], position * self.layout.stride, where)
        return _parse_json(part, where)

    def _read_fixed(self, shard: int, position: int, rows: dict[str, np.ndarray], where: str) -> Meta:
        json_part = bytearray(2 * BLOCK)
        parts: list = [json_part]
        heads = {}
        for name in MEMBERS:
            size = self.layout.payload_bytes[name]
            heads[name] = bytearray(BLOCK + NPY_HEADER)
            padding = bytearray(_round_up(NPY_HEADER + size) - NPY_HEADER - size)
            parts += [heads[name], rows[name].reshape(-1).view(np.uint8), padding]
        parts = [part for part in parts if len(part)]
        # One system call scatters the sample: the 2 MB of T5 go from the kernel to their row, no copy between.
        _read_into(self.descriptors[shard], parts, position * self.layout.stride, where)
        meta = _parse_json(json_part, where)
        for name in MEMBERS:
            member, size = _tar_entry(heads[name], where)
            if member != f"{meta.key}.{name}.bytes":
                raise BadSample(f"{where}: found member {member!r} where {meta.key}.{name}.bytes belongs")
            self._check_npy(name, heads[name][BLOCK:], f"{where}, key {meta.key}")
            if size != NPY_HEADER + self.layout.payload_bytes[name]:
                raise BadSample(f"{where}, key {meta.key}: {name} has {size} bytes")
        return meta

    def _read_indexed(self, shard: int, position: int, rows: dict[str, np.ndarray], where: str) -> Meta:
        meta = self._indexed_meta(shard, position, where)
        for name, (offset, _) in zip(MEMBERS, self.places[shard][position][1:]):
            head = bytearray(NPY_HEADER)
            _read_into(self.descriptors[shard], [head, rows[name].reshape(-1).view(np.uint8)], int(offset), where)
            self._check_npy(name, head, f"{where}, key {meta.key}")
        return meta

    def _indexed_meta(self, shard: int, position: int, where: str) -> Meta:
        offset, size = map(int, self.places[shard][position][0])
        text = bytearray(size)
        _read_into(self.descriptors[shard], [text], offset, where)
        return _meta("", text, where)

    def _check_npy(self, name: str, head: bytearray, where: str) -> None:
        if head != self.npy_headers[name]:
            raise BadSample(f"{where}: {name} {_npy_complaint(head, self.layout.shapes[name])}")


def _first_kind(descriptor: int, offset: int) -> str:
    """What follows the key in the name of the member that begins here; "" if none does."""
    block = os.pread(descriptor, BLOCK, offset)
    return block[:100].rstrip(b"\0").decode(errors="replace").partition(".")[2] if block[257:262] == b"ustar" else ""


def _ends(descriptor: int, offset: int) -> bool:
    """Whether the file holds nothing but zeros from offset on."""
    return not any(os.pread(descriptor, RECORD + END_BYTES, offset))


def _read_into(descriptor: int, parts: list, offset: int, where: str) -> None:
    """Fill the parts from the file; network file systems may take more than one call."""
    views = [memoryview(part).cast("B") for part in parts]
    while views:
        try:
            count = os.preadv(descriptor, views, offset)
        except OSError as error:
            raise BadSample(f"{where}: {error.strerror}") from None
        if count == 0:
            raise BadSample(f"{where}: the file ends within the sample")
        offset += count
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


def _tar_entry(block: bytearray, where: str) -> tuple[str, int]:
    """(name, size) of the member whose header begins the block."""
    try:
        if block[257:262] != b"ustar":
            raise ValueError
        return block[:100].rstrip(b"\0").decode(), int(block[124:136].rstrip(b"\0 "), 8)
    except ValueError:
        raise BadSample(f"{where}: no tar header where one belongs") from None


def _parse_json(part: bytearray, where: str) -> Meta:
    member, size = _tar_entry(part, where)
    key = member.removesuffix(".json")
    if key == member or size > BLOCK:
        raise BadSample(f"{where}: found member {member!r} of {size} bytes where KEY.json of at most 512 belongs")
    return _meta(key, part[BLOCK : BLOCK + size], where)


def _meta(key: str, text: bytearray, where: str) -> Meta:
    """key: of the member's name; "" to take what the json says."""
    try:
        content = json.loads(text)
        key = key or str(content.get("key") or "")
        timestep, caption = content.get("timestep"), content.get("caption") or ""
    except (ValueError, AttributeError):
        raise BadSample(f"{where}: {key}.json is not a JSON object") from None
    if timestep is not None and type(timestep) is not int:
        raise BadSample(f"{where}: timestep {timestep!r} is neither an integer nor null")
    return Meta(key, timestep, str(caption))


def _npy_complaint(header: bytearray, want: tuple[int, ...]) -> str:
    try:
        stream = io.BytesIO(bytes(header))
        np.lib.format.read_magic(stream)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    except Exception:  # numpy's parser raises a dozen kinds
        return "is not a .npy blob"
    return f"is {dtype} {shape}{' in Fortran order' if fortran else ''}, want uint16 {want}"


def _not_finite(bits: np.ndarray) -> bool:
    """Whether all exponent bits of any bf16 are set: infinite or NaN."""
    # Two maxima cost less than a mask. As unsigned numbers the negative ones among them are the largest of all, as
    # signed ones the positive.
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
    return {name: _read_empty(Path(folder) / f"{name}_empty.npy", layout.shapes[name]) for name in ("t5", "clip")}


def _read_empty(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy's parser raises a dozen kinds
        raise Refusal(f"empty encoding {path}: {' '.join(str(error).split())}") from None
    if not isinstance(array, np.ndarray):
        raise Refusal(f"empty encoding {path} is an archive, want a .npy file")
    if array.shape == (1, *shape):
        array = array[0]
    if array.shape != shape or array.dtype not in (np.float16, np.float32, np.uint16):
        raise Refusal(f"empty encoding {path} is {array.dtype} {array.shape}; want float16, float32 or uint16 {shape}")
    bits = array if array.dtype == np.uint16 else to_bf16_bits(array.astype(np.float32))
    if _not_finite(bits) or not (array.dtype == np.uint16 or np.isfinite(array).all()):
        raise Refusal(f"empty encoding {path} holds NaN or infinite values")
    return bits
