"""Checkpoints on disk: one safetensors file per rank, and the manifest that makes them one checkpoint.

    step_000000800/
        rank_00000.safetensors   this rank's rows of every tensor
        manifest.json            counters and config; which file holds which rows; a checksum per MiB

A folder gets this name only after every byte is on the disk. Folders with other names are ignored. Nothing is pickled.
torch's HuggingFaceStorageReader opens such a folder, too. checkpoint_reader.py reads it.
"""

import json
import re
import shutil
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from flux_ref.formats import safetensors_io
from flux_ref.formats.files import naming, remove, sync
from flux_ref.formats.safetensors_io import BLOCK, DTYPE_NAMES, DTYPES, FileEntry

FORMAT = 1
MANIFEST = "manifest.json"
NAME = re.compile(r"step_([0-9]{9})")
OVERWRITTEN = "overwritten_"  # and a number: the run that a newer one in its folder has replaced


def folder_of(run: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return run / "checkpoints"


def list_checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    folder = folder_of(run)
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name)) if folder.is_dir() else []


def step_of(checkpoint: Path) -> int:
    return int(NAME.fullmatch(checkpoint.name)[1])


def clean(run: Path) -> None:
    """Remove what interrupted saves and deletions have left."""
    for path in folder_of(run).glob(".step_*"):
        remove(path)


def remove_overwritten(run: Path) -> None:
    """Delete the runs that this run has replaced. Called when it has something worth keeping."""
    for path in run.glob(f"{OVERWRITTEN}*"):
        remove(path)


@dataclass(frozen=True)
class TensorSlice:
    """Rows first, first + 1, ... of a tensor of `shape`, as `local` on this rank."""

    local: Tensor
    first: int
    shape: torch.Size


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a checkpoint: safetensors dtype, shape, and chunks of (file, offset, first row, rows)."""

    dtype: str
    shape: list[int]
    chunks: list[tuple[str, int, int, int]]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds. info: {"step", "samples", "config", ...}, as checkpoint.Saver writes it."""

    info: dict
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]

    def __post_init__(self):
        """Raises: ValueError or KeyError unless each row of each tensor has one place inside one of the files."""
        for name, file in self.files.items():
            if not re.fullmatch(r"[\w-]+\.safetensors", name):
                raise ValueError("it names files outside its folder")
            if len(file.crc32) != -(-file.bytes // BLOCK):
                raise ValueError(f"it has {len(file.crc32)} checksums for the {file.bytes} bytes of {name}")
        for key, entry in self.tensors.items():
            row_bytes = DTYPES[entry.dtype].itemsize * prod(entry.shape[1:])
            row = 0
            for name, offset, first, rows in sorted(entry.chunks, key=lambda chunk: chunk[2]):
                if first != row or rows < 0 or not 0 <= offset <= self.files[name].bytes - rows * row_bytes:
                    raise ValueError(f"rows of {key} are missing, doubled or outside {name}")
                row += rows
            if row != entry.shape[0]:
                raise ValueError(f"rows of {key} are missing")

    def dump(self) -> str:
        content = {
            "format": FORMAT,
            "info": self.info,
            "files": {name: vars(entry) for name, entry in self.files.items()},
            "tensors": {key: vars(entry) for key, entry in self.tensors.items()},
        }
        return json.dumps(content | {"crc32": zlib.crc32(json.dumps(content).encode())})


def require_space(folder: Path, size: int) -> None:
    """Raises: OSError unless so many bytes fit. A full disk would have no place for logs either."""
    free = shutil.disk_usage(folder).free
    if free < size:
        raise OSError(f"{folder} has {free / 1e9:.3g} GB free and a checkpoint takes {size / 1e9:.3g} GB")


# What one rank has written, for JSON: its FileEntry by name, none if it has no rows, and its TensorEntry by key.
Part = tuple[dict[str, dict], dict[str, dict]]


def write_rank(folder: Path, rank: int, rows: dict[str, TensorSlice]) -> Part:
    """Write the rows of one rank as one safetensors file, and wait until the file is on the disk. Raises: OSError.

    The file's metadata follow the convention of torch's HuggingFaceStorageReader.
    """
    if not folder.is_dir():
        raise OSError(f"{folder.parent} is not the folder that rank 0 sees; put run.dir on storage of all nodes")
    if not rows:
        return {}, {}
    name = f"rank_{rank:05d}.safetensors"
    entries = {key: (DTYPE_NAMES[part.local.dtype], part.local.shape) for key, part in rows.items()}
    offsets = {key: {"saved_offsets": [part.first, *(0 for _ in part.shape[1:])]} for key, part in rows.items()}
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    pieces = (part.local for part in rows.values())
    with naming(folder / name):
        file, begins = safetensors_io.write(folder / name, entries, metadata, pieces)
    tensors = {}
    for key, part in rows.items():
        chunk = (name, begins[key], part.first, len(part.local))
        tensors[key] = {"dtype": entries[key][0], "shape": list(part.shape), "chunks": [chunk]}
    return {name: vars(file)}, tensors


def manifest(info: dict, parts: list[Part]) -> Manifest:
    """The manifest of the files of all ranks. Raises: ValueError if rows of a tensor are missing or doubled."""
    files = {}
    tensors = {}
    for part_files, part_tensors in parts:
        files |= {name: FileEntry(**entry) for name, entry in part_files.items()}
        for key, entry in part_tensors.items():
            tensors.setdefault(key, TensorEntry(entry["dtype"], entry["shape"], [])).chunks.extend(entry["chunks"])
    return Manifest(info, files, tensors)


def publish(partial: Path, final: Path, content: Manifest) -> None:
    """Make a folder whose files are on the disk visible under its name, in one step."""
    with naming(partial / MANIFEST):
        (partial / MANIFEST).write_text(content.dump(), encoding="utf-8")
        sync(partial / MANIFEST)
    sync(partial)
    partial.rename(final)
    sync(final.parent)
