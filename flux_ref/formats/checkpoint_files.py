"""Checkpoints on disk: one safetensors file per rank, and the manifest that makes them whole.

    step_000000900/
        rank_00000.safetensors   this rank's rows of every tensor
        manifest.json            what trained it, which file holds which rows, a checksum per MiB

`Writer` is a storage of torch.distributed.checkpoint, which decides who writes what; each file follows the
convention of its HuggingFaceStorageReader and opens there, too. Nothing is pickled. `Checkpoint` reads any rows of
any tensor and believes no byte whose checksum it has not seen.
"""

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from flux_ref.errors import Refusal
from flux_ref.formats.safetensors_io import BLOCK, DTYPE_NAMES, DTYPES, CheckedFile, FileEntry, Moved, header

FORMAT = 1
MANIFEST = "manifest.json"
HEAD_BYTES = 512  # at most so many tell of one tensor's rows, in its file's head and the manifest


NAME = re.compile(r"step_(\d{9})")


def folder_of(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def found(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first; anything else in the folder has another name."""
    folder = folder_of(run)
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name)) if folder.is_dir() else []


def step_of(checkpoint: Path) -> int:
    return int(NAME.fullmatch(checkpoint.name)[1])


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or bool(path.is_dir() and NAME.fullmatch(path.name))


def clean(run: Path) -> None:
    """Remove what saves and deletions that broke off have left."""
    for path in folder_of(run).glob(".step_*"):
        shutil.rmtree(path)


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint: safetensors dtype, shape, and chunks of (file, offset, first row, rows)."""

    dtype: str
    shape: list[int]
    chunks: list[tuple[str, int, int, int]]


def require_space(folder: Path, need: int) -> None:
    """Raises: OSError unless a checkpoint of so many bytes fits."""
    free = shutil.disk_usage(folder).free
    if free < need:
        raise OSError(f"{folder} has {free / 1e9:.3g} GB free and a checkpoint takes {need / 1e9:.3g} GB")


class Writer(StorageWriter):
    """Writes `partial` and, once every byte of every rank is on the disk, renames it to `final`."""

    def __init__(self, partial: Path, final: Path, info: dict):
        self.partial, self.final, self.info = partial, final, info

    def reset(self, checkpoint_id=None) -> None:
        """Nothing is kept between saves."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return False  # it is told its folders

    def set_up_storage_writer(self, is_coordinator: bool, *args, **kwargs) -> None:
        if is_coordinator:
            self.partial.mkdir(parents=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator. A save that would fill the disk is not begun: logs need a place, too."""
        items = [item for plan in plans for item in plan.items]
        require_space(self.partial.parent, sum(item.tensor_storage_size() + HEAD_BYTES for item in items))
        return [replace(plan, storage_data=f"rank_{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future = Future()
        future.set_result(self._write(plan.storage_data, plan.items, planner) if plan.items else [])
        return future

    def _write(self, name: str, items: list[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        entries, offsets = {}, {}
        for item in items:
            data = item.tensor_data
            entries[item.index.fqn] = (DTYPE_NAMES[data.properties.dtype], data.chunk.sizes)
            offsets[item.index.fqn] = {"saved_offsets": list(data.chunk.offsets)}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        head, begins = header(entries, metadata)
        if not self.partial.is_dir():
            raise OSError(
                f"{self.partial.parent} is not the folder that rank 0 sees; put run.dir on storage of all nodes"
            )
        file = CheckedFile(self.partial / name)
        file.write(head)
        for item in items:
            file.write_tensor(planner.resolve_data(item))
        entry = file.close()
        results = [WriteResult(item.index, 0, (name, begins[item.index.fqn])) for item in items]
        return [*results, WriteResult(MetadataIndex(name), entry.bytes, entry)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all ranks have written."""
        files, tensors = {}, {}
        for result in (result for rank in results for result in rank):
            if isinstance(result.storage_data, FileEntry):
                files[result.index.fqn] = result.storage_data
                continue
            stored = metadata.state_dict_metadata[result.index.fqn]
            shape = list(stored.size)
            entry = tensors.setdefault(result.index.fqn, TensorEntry(DTYPE_NAMES[stored.properties.dtype], shape, []))
            chunk = stored.chunks[result.index.index]
            entry.chunks.append((*result.storage_data, chunk.offsets[0], chunk.sizes[0]))
        for key, entry in tensors.items():
            _require_sound(key, entry, files)
        publish(self.partial, self.final, Manifest(self.info, files, tensors))


@dataclass(frozen=True)
class Manifest:
    """info: {"step", "samples", "config", ...}; see checkpoint.py."""

    info: dict
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    def dump(self) -> str:
        files, tensors = ({key: vars(one) for key, one in table.items()} for table in (self.files, self.tensors))
        content = {"format": FORMAT, "info": self.info, "files": files, "tensors": tensors}
        return json.dumps(content | {"crc32": zlib.crc32(json.dumps(content).encode())})

    @classmethod
    def parse(cls, text: str) -> "Manifest":
        """Raises: Refusal for another version; ValueError, KeyError or TypeError for damage."""
        content = json.loads(text)
        checksum = content.pop("crc32")
        if content["format"] != FORMAT:
            raise Refusal(f"format version {content['format']!r}, this flux_ref reads {FORMAT}")
        if zlib.crc32(json.dumps(content).encode()) != checksum:
            raise ValueError("its checksum differs")
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        for name, entry in files.items():
            if not re.fullmatch(r"[\w-]+\.safetensors", name):
                raise ValueError("it names files outside its folder")
            if len(entry.crc32) != -(-entry.bytes // BLOCK):
                raise ValueError(f"it has {len(entry.crc32)} checksums for the {entry.bytes} bytes of {name}")
        tensors = {key: TensorEntry(**entry) for key, entry in content["tensors"].items()}
        for key, entry in tensors.items():
            _require_sound(key, entry, files)
        return cls(content["info"], files, tensors)


def _require_sound(key: str, entry: TensorEntry, files: dict[str, FileEntry]) -> None:
    """Each row of a tensor has one place, and that lies in one of the files. Raises: ValueError, KeyError."""
    row_bytes = DTYPES[entry.dtype].itemsize * prod(entry.shape[1:])
    row = 0
    for file, offset, first, rows in sorted(entry.chunks, key=lambda chunk: chunk[2]):
        if first != row or rows < 0 or not 0 <= offset <= files[file].bytes - rows * row_bytes:
            raise ValueError(f"rows of {key} are missing, doubled or outside {file}")
        row += rows
    if row != entry.shape[0]:
        raise ValueError(f"rows of {key} are missing")


def publish(partial: Path, final: Path, manifest: Manifest) -> None:
    """Make a folder whose files are on the disk visible under its name, in one step."""
    with (partial / MANIFEST).open("x", encoding="utf-8") as file:
        file.write(manifest.dump())
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    partial.rename(final)
    _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Checkpoint:
    """A whole checkpoint, open for reading. Damage is told where it is met; nothing damaged is returned."""

    def __init__(self, folder: Path):
        """Raises: Refusal if the manifest is missing, damaged or of another version, or a file missing or cut short."""
        self.folder = folder
        manifest = _read_manifest(folder)
        self.info, self.files, self.tensors = manifest.info, manifest.files, manifest.tensors
        for name, entry in self.files.items():
            path = folder / name
            if not path.is_file():
                raise Refusal(f"checkpoint {folder} lacks its file {name}; use another checkpoint")
            if path.stat().st_size != entry.bytes:
                raise Refusal(
                    f"checkpoint file {path} has {path.stat().st_size} bytes, its manifest says {entry.bytes};"
                    " use another checkpoint"
                )
        self._cache: dict[str, tuple[int, bytes]] = {}  # of each file, the last block that was read

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def read(self, key: str, first: int = 0, count: int | None = None) -> Tensor:
        """Rows first .. first + count of a tensor, on the host, in the dtype on disk. Raises: Refusal."""
        entry = self.tensors[key]
        count = entry.shape[0] - first if count is None else count
        rows = torch.empty((count, *entry.shape[1:]), dtype=DTYPES[entry.dtype])
        view = memoryview(rows.reshape(-1).view(torch.uint8).numpy()).cast("B") if rows.numel() else memoryview(b"")
        width = len(view) // max(1, count)
        for file, offset, start, length in entry.chunks:
            low, high = max(first, start), min(first + count, start + length)
            if low < high:
                self._read(file, offset + (low - start) * width, view[(low - first) * width : (high - first) * width])
        return rows

    def verify(self) -> None:
        """Read everything. Raises: Refusal at the first damaged block."""
        for name, entry in self.files.items():
            for number in range(len(entry.crc32)):
                self._block(name, number)

    def _read(self, name: str, start: int, view: memoryview) -> None:
        end = start + len(view)
        for number in range(start // BLOCK, -(-end // BLOCK)):
            base = number * BLOCK
            low, high = max(start, base), min(end, base + BLOCK)
            view[low - start : high - start] = self._block(name, number)[low - base : high - base]

    def _block(self, name: str, number: int) -> bytes:
        if name in self._cache and self._cache[name][0] == number:
            return self._cache[name][1]
        path = self.folder / name
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(number * BLOCK)
                content = b""
                while part := file.read(BLOCK - len(content)):  # network file systems give less than asked for
                    content += part
        except OSError as error:
            raise Refusal(f"checkpoint file {path}: {error.strerror}") from None
        if zlib.crc32(content) != self.files[name].crc32[number]:
            raise Refusal(
                f"checkpoint file {path} is damaged between bytes {number * BLOCK} and {number * BLOCK + len(content)}"
                " (checksum differs); use another checkpoint"
            )
        Moved.total += len(content)
        self._cache[name] = (number, content)
        return content


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    try:
        return Manifest.parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(f"{folder} is not a checkpoint: {MANIFEST}: {error.strerror}") from None
    except Refusal as error:
        raise Refusal(f"checkpoint {folder} is of {error}; use the flux_ref that wrote it") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Refusal(f"checkpoint manifest {path} is damaged: {error}; use another checkpoint") from None
