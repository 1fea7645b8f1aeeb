"""The data set on disk: tar shards of embedded samples, as the public MLPerf submissions convert them.

A sample is five tar members in this order: KEY.json, KEY.t5.bytes, KEY.clip.bytes, KEY.mean.bytes,
KEY.logvar.bytes. The json holds {"key", "timestep": 0..7 or null}; each .bytes is a .npy blob of bf16 bits as
uint16, without a batch axis. As every member has a fixed size, sample i of a shard begins at i * stride,
and one read puts each payload straight where it belongs.
"""

import io
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flux_ref.errors import Refusal

BLOCK = 512  # tar's unit
NPY_HEADER = 128
MEMBERS = ("t5", "clip", "mean", "logvar")
END_BYTES = 2 * BLOCK  # an archive ends with two zero blocks
RECORD = 20 * BLOCK  # most writers pad an archive to a multiple of this


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

    @property
    def payload_bytes(self) -> dict[str, int]:
        return {name: 2 * int(np.prod(self.shapes[name])) for name in MEMBERS}

    @property
    def stride(self) -> int:
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
    """A folder of shards as one sequence of samples, in the order of the file names.

    Making it looks at names and sizes only and reads no byte of data; `open` reads the first of them.
    """

    def __init__(self, folder: str | Path, layout: Layout):
        """Raises: Refusal for a missing or empty folder and for a shard that is truncated or foreign."""
        self.folder, self.layout = Path(folder), layout
        if not self.folder.is_dir():
            raise Refusal(f"data folder {folder} does not exist; set data.train, data.val or make it first")
        self.paths = sorted(self.folder.glob("*.tar"))
        if not self.paths:
            raise Refusal(f"data folder {folder} holds no *.tar shard")
        # The index of each shard's first sample, and at the end the number of samples.
        self.first = np.concatenate(([0], np.cumsum([self._count(path) for path in self.paths])))
        self.descriptors: list[int] = []
        self.npy_headers = {name: npy_header(layout.shapes[name]) for name in MEMBERS}

    def __len__(self) -> int:
        return int(self.first[-1])

    def _count(self, path: Path) -> int:
        size, stride = path.stat().st_size, self.layout.stride
        most = max(0, size - END_BYTES) // stride
        ends = {n: n * stride + END_BYTES for n in range(most, max(0, most - RECORD // stride - 1), -1)}
        fits = [n for n, end in ends.items() if size in (end, -(-end // RECORD) * RECORD)]
        if fits and (stride > RECORD or size % RECORD):
            return fits[0]
        # The padding is longer than very small samples: look where the last of them begins.
        for count in fits:
            with path.open("rb") as file:
                file.seek((count - 1) * stride)
                if file.read(1) != b"\0" and _ends(file.fileno(), count * stride):
                    return count
        raise Refusal(
            f"shard {path} ({size} bytes) is truncated or foreign: samples of shape {self.layout.shapes} take"
            f" {stride} bytes each and end after {most} of them at byte {most * stride + END_BYTES};"
            " copy or convert it again"
        )

    def open(self, rank: int = 0, size: int = 1) -> None:
        """Open every shard; check the ends of every size-th, from rank on. Raises: Refusal."""
        self.descriptors = [os.open(path, os.O_RDONLY) for path in self.paths]
        rows = {name: np.empty(self.layout.shapes[name], np.uint16) for name in MEMBERS}
        for start, stop in list(zip(self.first[:-1], self.first[1:]))[rank::size]:
            for index in {int(start), int(stop) - 1}:
                try:
                    self.read(index, rows)
                except BadSample as error:
                    raise Refusal(str(error)) from None
        for path, descriptor, count in list(zip(self.paths, self.descriptors, np.diff(self.first)))[rank::size]:
            if not _ends(descriptor, int(count) * self.layout.stride):
                raise Refusal(f"shard {path} is truncated: no end marker after {count} samples; copy it again")

    def evict(self) -> None:
        """Drop the shards' clean pages from the operating system's cache; needs no privilege (Linux)."""
        for path in self.paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    def read(self, index: int, rows: dict[str, np.ndarray]) -> Meta:
        """Read sample `index` into rows: one C-contiguous uint16 array (bf16 bits) per member.

        Raises: BadSample; the rows then hold anything.
        """
        shard = int(np.searchsorted(self.first, index, side="right")) - 1
        where = f"{self.paths[shard]}, sample {index - self.first[shard]}"
        offset = int(index - self.first[shard]) * self.layout.stride
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
        _read_into(self.descriptors[shard], parts, offset, where)
        meta = _parse_json(json_part, where)
        for name in MEMBERS:
            self._check_head(name, heads[name], meta.key, where)
            if _not_finite(rows[name]):
                raise BadSample(f"{where}, key {meta.key}: {name} holds NaN or infinite values")
        return meta

    def _check_head(self, name: str, head: bytearray, key: str, where: str) -> None:
        member, size = _tar_entry(head, where)
        if member != f"{key}.{name}.bytes":
            raise BadSample(f"{where}: found member {member!r} where {key}.{name}.bytes belongs")
        if head[BLOCK:] != self.npy_headers[name]:
            raise BadSample(f"{where}, key {key}: {name} {_npy_complaint(head[BLOCK:], self.layout.shapes[name])}")
        if size != NPY_HEADER + self.layout.payload_bytes[name]:
            raise BadSample(f"{where}, key {key}: {name} has {size} bytes")


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
    try:
        content = json.loads(part[BLOCK : BLOCK + size])
        timestep, caption = content.get("timestep"), content.get("caption") or ""
    except (ValueError, AttributeError):
        raise BadSample(f"{where}: {member} is not a JSON object") from None
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
    return bool(((bits & 0x7F80) == 0x7F80).any())


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
