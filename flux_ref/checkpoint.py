"""Checkpoints on disk.

    step_000000800/
        rank_00000_000.safetensors   rows of this rank, in files of about FILE_BYTES
        manifest.json                counters and config; which file holds which rows; a checksum per file

A folder gets this name only after every byte is on the disk; folders with other names are ignored. Nothing is pickled.
torch's HuggingFaceStorageReader opens such a folder, too. saver.py says what a checkpoint holds.
"""

import json
import re
import shlex
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flux_ref import files, tensors
from flux_ref.errors import Refusal
from flux_ref.formats import outside

FORMAT = 2
MANIFEST = "manifest.json"
MANIFEST_BYTES = 2**30  # at most; that of 512 ranks has 70 MB
NAME = re.compile(r"step_([0-9]{9})")
FILE_BYTES = 2**28  # writing takes as much host memory; a reader of some rows reads the whole file, for its checksum


def folder_of(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def list_checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    folder = folder_of(run)
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name)) if folder.is_dir() else []


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def prune(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and what interrupted saves and deletions have left."""
    for path in list_checkpoints(run)[:-keep]:
        path.rename(path.with_name(f".{path.name}.deleted"))
    for path in folder_of(run).glob(".step_*"):
        files.remove(path)


@dataclass(frozen=True)
class TensorSlice:
    """Rows first, first + 1, ... of a tensor of `shape`, as `local` on this rank."""

    local: Tensor
    first: int
    shape: torch.Size


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint: its shape, and where its rows are, as (file, first row, rows)."""

    shape: list[int]
    chunks: list[tuple[str, int, int]]

    def require_whole(self, key: str) -> None:
        """Raises: ValueError unless each row has one place."""
        row = 0
        for _, first, rows in sorted(self.chunks, key=lambda chunk: chunk[1]):
            if first != row or rows < 0:
                raise ValueError(f"rows of {key} are missing or doubled")
            row += rows
        if row != self.shape[0]:
            raise ValueError(f"rows of {key} are missing")


# What one rank has written, for JSON: (bytes, CRC-32) of each file, and (shape, chunks) of each tensor.
Part = tuple[dict[str, tuple[int, int]], dict[str, tuple[list[int], list]]]


def write_rank(folder: Path, rank: int, rows: dict[str, TensorSlice]) -> Part:
    """Write the rows of one rank, and wait until they are on the disk. Raises: OSError.

    The files' metadata follow the convention of torch's HuggingFaceStorageReader.
    """
    if not folder.is_dir():
        raise OSError(f"{folder.parent} is not the folder that rank 0 sees; put run.dir on storage of all nodes")
    written = {}
    entries = {}
    for number, part in enumerate(_in_files(rows)):
        name = f"rank_{rank:05d}_{number:03d}.safetensors"
        offsets = {key: {"saved_offsets": [row.first, *(0 for _ in row.shape[1:])]} for key, row in part.items()}
        metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
        checksum = tensors.write(folder / name, {key: row.local for key, row in part.items()}, metadata)
        written[name] = (folder / name).stat().st_size, checksum
        for key, row in part.items():
            entries[key] = list(row.shape), [(name, row.first, len(row.local))]
    return written, entries


def _in_files(rows: dict[str, TensorSlice]) -> Iterator[dict[str, TensorSlice]]:
    """The rows file by file. A file is full when FILE_BYTES are reached."""
    part = {}
    size = 0
    for key, row in rows.items():
        part[key] = row
        size += row.local.nbytes
        if size >= FILE_BYTES:
            yield part
            part = {}
            size = 0
    if part:
        yield part


def publish(partial: Path, final: Path, info: dict, parts: list[Part]) -> None:
    """Make a folder whose files are on the disk visible under its name, in one step.

    info: what a checkpoint says of the training. parts: of all ranks. Raises: OSError; ValueError if rows are missing.
    """
    written = {}
    entries: dict[str, TensorEntry] = {}
    for part_files, part_tensors in parts:
        written |= part_files
        for key, (shape, chunks) in part_tensors.items():
            entries.setdefault(key, TensorEntry(shape, [])).chunks.extend(chunks)
    for key, entry in entries.items():
        entry.require_whole(key)
    content = {"format": FORMAT, "info": info, "files": written}
    content["tensors"] = {key: vars(entry) for key, entry in entries.items()}
    files.write_whole(partial / MANIFEST, json.dumps(content | {"crc32": _checksum(content)}))
    files.sync(partial)
    partial.rename(final)
    files.sync(final.parent)


def _checksum(content: dict) -> int:
    """Of a manifest without its checksum."""
    return zlib.crc32(json.dumps(content).encode())


class Checkpoint:
    """A whole checkpoint, open for reading. No rows of a file are read before its checksum was right.

    info:    what it says of the training: {"step", "samples", "config", ...}, as Saver writes it.
    tensors: {key: TensorEntry}.
    """

    def __init__(self, folder: Path):
        """Raises: Refusal if the manifest is missing, damaged or of another version, or a file missing or cut short."""
        self.folder = folder
        self._right: set[str] = set()  # files whose checksum was right
        path = folder / MANIFEST
        if not path.is_file():
            raise self._damaged(f"{path} is missing")
        content = files.json_object(outside.read_bytes(path, "checkpoint manifest", MANIFEST_BYTES))
        if content.pop("crc32", None) != _checksum(content):
            raise self._damaged(f"{path} is damaged (checksum differs)")
        if content["format"] != FORMAT:
            raise Refusal(f"checkpoint {folder} is of another version; use the flux_ref that wrote it")
        self.info = content["info"]
        self.files = content["files"]
        self.tensors = {key: TensorEntry(**entry) for key, entry in content["tensors"].items()}
        if NAME.fullmatch(folder.name) and step_of(folder) != self.info["step"]:
            raise self._damaged(f"{folder} holds step {self.info['step']}, so this is not the name that it had")
        for name, (size, _) in self.files.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != size:
                raise self._damaged(f"{file} is missing or has not the {size} bytes of its manifest")

    def _damaged(self, what: str) -> Refusal:
        """What is damaged, and what to do. Nothing takes another checkpoint by itself: a run would train twice."""
        remedy = "use another checkpoint"
        if NAME.fullmatch(self.folder.name):
            aside = shlex.join(("mv", str(self.folder), f"{self.folder}.damaged"))
            remedy = f"`{aside}` lets the run go on from the checkpoint before it"
        return Refusal(f"checkpoint file {what}; {remedy}")

    def read(self, key: str, first: int = 0, count: int | None = None) -> Tensor:
        """Rows first .. first + count of a tensor, on the host, in fp32. Raises: Refusal for damage."""
        entry = self.tensors[key]
        end = entry.shape[0] if count is None else first + count
        pieces = [torch.empty(0, *entry.shape[1:])]
        for name, start, length in sorted(entry.chunks, key=lambda chunk: chunk[1]):
            low = max(first, start)
            high = min(end, start + length)
            if low < high:
                self._check(name)
                pieces.append(tensors.read_rows(self.folder / name, key, low - start, high - low, "checkpoint file"))
        return torch.cat(pieces) if len(pieces) > 2 else pieces[-1]

    def verify(self) -> None:
        """Read everything. Raises: Refusal for damage."""
        for name in self.files:
            self._check(name)

    def _check(self, name: str) -> None:
        """Raises: Refusal unless the file's checksum is right. It is read once."""
        if name in self._right:
            return
        path = self.folder / name
        if tensors.crc32(path) != self.files[name][1]:
            raise self._damaged(f"{path} is damaged (checksum differs)")
        self._right.add(name)
