"""Checkpoints on disk.

    step_000000800/
        rank_00000_000.safetensors   rows of this rank, in files of about FILE_BYTES
        manifest.json                counters and config; which file holds which rows; a checksum of each file

A folder gets this name only after every byte is on the disk; folders with other names are ignored. Nothing is pickled.
saver.py says what a checkpoint holds.
"""

import json
import re
import shlex
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from flux_ref import files, tensors
from flux_ref.errors import Refusal

FORMAT = 3
MANIFEST = "manifest.json"
NAME = re.compile(r"step_([0-9]{9})")
FILE_BYTES = 2**28  # writing takes as much host memory; a reader of some rows reads the whole file, for its checksum


def folder_of(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def list_checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(path for path in folder_of(run).glob("step_*") if NAME.fullmatch(path.name))


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
    """A tensor of a checkpoint: its shape, and where its rows are, as (first row, rows, file)."""

    shape: list[int]
    chunks: list[tuple[int, int, str]]


# What one rank has written, for JSON: {file: CRC-32}, and (key, shape, chunk) of each tensor.
Part = tuple[dict[str, int], list[tuple[str, list[int], tuple[int, int, str]]]]


def write_rank(folder: Path, rank: int, rows: dict[str, TensorSlice]) -> Part:
    """Write the rows of one rank, and wait until they are on the disk. Raises: OSError."""
    checksums = {}
    chunks = []
    waiting = dict(rows)
    while waiting:
        name = f"rank_{rank:05d}_{len(checksums):03d}.safetensors"
        part: dict[str, Tensor] = {}
        while waiting and sum(tensor.nbytes for tensor in part.values()) < FILE_BYTES:
            key = next(iter(waiting))
            row = waiting.pop(key)
            part[key] = row.local
            chunks.append((key, list(row.shape), (row.first, len(row.local), name)))
        checksums[name] = tensors.write(folder / name, part)
    return checksums, chunks


def publish(partial: Path, final: Path, info: dict, parts: list[Part]) -> None:
    """Make a folder whose files are on the disk visible under its name, in one step.

    info: what a checkpoint says of the training. parts: of all ranks. Raises: OSError; ValueError if rows are missing.
    """
    checksums: dict[str, int] = {}
    entries: dict[str, TensorEntry] = {}
    for part_checksums, part_chunks in parts:
        checksums |= part_checksums
        for key, shape, chunk in part_chunks:
            entries.setdefault(key, TensorEntry(shape, [])).chunks.append(chunk)
    for key, entry in entries.items():
        if sum(count for _, count, _ in entry.chunks) != entry.shape[0]:
            raise ValueError(f"rows of {key} are missing or doubled")
    content = {"format": FORMAT, "info": info, "files": checksums}
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
        """Raises: Refusal if the manifest is missing, damaged or of another version."""
        self.folder = folder
        self._right: set[str] = set()  # files whose checksum was right
        path = folder / MANIFEST
        content = files.json_object(path.read_bytes()) if path.is_file() else {}
        if content.pop("crc32", None) != _checksum(content):
            raise self._damaged(path)
        if content["format"] != FORMAT:
            raise Refusal(f"checkpoint {folder} is of another version; use the flux_ref that wrote it")
        self.info = content["info"]
        self.files = content["files"]
        self.tensors = {key: TensorEntry(**entry) for key, entry in content["tensors"].items()}

    def read(self, key: str, first: int = 0, count: int | None = None) -> Tensor:
        """Rows first .. first + count of a tensor, on the host, in fp32. Raises: Refusal for damage."""
        entry = self.tensors[key]
        end = entry.shape[0] if count is None else first + count
        pieces = [torch.empty(0, *entry.shape[1:])]
        for start, length, name in sorted(entry.chunks):
            low = max(first, start)
            high = min(end, start + length)
            if low < high:
                self._check(self.folder / name)
                pieces.append(tensors.read_rows(self.folder / name, key, low - start, high - low, "checkpoint file"))
        return torch.cat(pieces) if len(pieces) > 2 else pieces[-1]

    def _check(self, path: Path) -> None:
        """Raises: Refusal unless the file's checksum is right. It is read once."""
        if path.name not in self._right:
            if not path.is_file() or tensors.crc32(path) != self.files[path.name]:
                raise self._damaged(path)
            self._right.add(path.name)

    def _damaged(self, path: Path) -> Refusal:
        """What is damaged, and what to do. Nothing takes another checkpoint by itself: a run would train twice."""
        aside = shlex.join(("mv", str(self.folder), f"{self.folder}.damaged"))
        remedy = f"`{aside}` lets the run go on from the checkpoint before it"
        return Refusal(f"checkpoint file {path} is missing or damaged (checksum differs); {remedy}")
