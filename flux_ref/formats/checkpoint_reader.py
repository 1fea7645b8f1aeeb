"""Reads checkpoints: any rows of any tensor, and no byte before its checksum is checked."""

import contextlib
import json
import shlex
import zlib
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flux_ref.errors import Refusal
from flux_ref.formats import outside
from flux_ref.formats.checkpoint_files import (
    FORMAT,
    MANIFEST,
    NAME,
    Manifest,
    TensorEntry,
    folder_of,
    list_checkpoints,
    step_of,
)
from flux_ref.formats.safetensors_io import BLOCK, DTYPES, FileEntry, Moved

MANIFEST_BYTES = 2**30  # that of 512 ranks has 70 MB
MOST = 2**53  # of any number in a manifest
INFO = {"step": int, "samples": int, "name": str, "config": dict}  # what each manifest says of the training
MORE_INFO = {"train_samples": int, "val_samples": int, "skipped": dict}  # what a run's checkpoint says besides


def parse_manifest(text: bytes) -> Manifest:
    """Raises: Refusal for another version; ValueError, KeyError, TypeError or AttributeError for damage."""
    content = outside.parse_json(text)
    checksum = content.pop("crc32")
    if content["format"] != FORMAT:
        raise Refusal(f"format version {content['format']!r}, this flux_ref reads {FORMAT}")
    if zlib.crc32(json.dumps(content).encode()) != checksum:
        raise ValueError("its checksum differs")
    files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
    tensors = {key: TensorEntry(**entry) for key, entry in content["tensors"].items()}
    _require_kinds(content["info"], files, tensors)
    return Manifest(content["info"], files, tensors)


def _require_kinds(info: dict, files: dict[str, FileEntry], tensors: dict[str, TensorEntry]) -> None:
    """Raises: ValueError or KeyError if a value is of the wrong kind, or a number is out of range."""
    for key, kind in (INFO | {key: kind for key, kind in MORE_INFO.items() if key in info}).items():
        if type(info[key]) is not kind or (kind is int and not _are_counts([info[key]])):
            raise ValueError(f"its {key} is {outside.shown(info[key])}")
    batch = info["config"].get("train.global_batch")
    if type(batch) is int and info["samples"] != info["step"] * batch:
        raise ValueError(f"step {info['step']} and {info['samples']} samples do not belong together")
    if any(outside.whole_number(sample, 0, MOST) is None for sample in info.get("skipped", ())):
        raise ValueError("it lists skipped samples that are no numbers")
    for name, file in files.items():
        if not (_are_counts([file.bytes]) and _are_counts(file.crc32)):
            raise ValueError(f"its entry of {outside.printable(name)[:80]} holds what is no number")
    for key, tensor in tensors.items():
        chunks = tensor.chunks if isinstance(tensor.chunks, list) else [()]
        is_sound = all(len(chunk) == 4 and type(chunk[0]) is str and _are_counts(chunk[1:]) for chunk in chunks)
        if not (is_sound and _are_counts(tensor.shape) and tensor.shape and prod(tensor.shape[1:]) <= MOST):
            raise ValueError(f"its entry of {outside.printable(key)[:80]} has no shape or no place of rows")


def _are_counts(numbers: object) -> bool:
    """Whether it is a list of whole numbers from 0 to MOST."""
    return isinstance(numbers, list) and all(type(number) is int and 0 <= number <= MOST for number in numbers)


def whole_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there with their sizes. Their bytes are not read.

    Raises: ValueError that says what is damaged; Refusal for another version.
    """
    path = folder / MANIFEST
    try:
        text = outside.read_bytes(path, f"{folder} is not a checkpoint:", MANIFEST_BYTES)
    except Refusal as error:
        raise ValueError(str(error)) from None
    try:
        manifest = parse_manifest(text)
    except Refusal as error:
        raise Refusal(f"checkpoint {folder} is of {error}; use the flux_ref that wrote it") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"checkpoint manifest {path} is damaged: {error}") from None
    if NAME.fullmatch(folder.name) and step_of(folder) != manifest.info["step"]:
        raise ValueError(f"checkpoint {folder} holds step {manifest.info['step']}, so this is not the name that it had")
    for name, entry in manifest.files.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else -1
        if size != entry.bytes:
            fault = f"has {size} bytes, its manifest says {entry.bytes}" if size >= 0 else "is missing"
            raise ValueError(f"checkpoint file {folder / name} {fault}")
    return manifest


def instead_of(folder: Path) -> str:
    """What a user can type about a damaged checkpoint: the newest older one of its run that is whole is named.

    Nothing takes an older checkpoint by itself: a run would train again on what it has trained on, unasked.
    """
    run = folder.parent.parent
    if not NAME.fullmatch(folder.name) or folder.parent != folder_of(run):
        return "use another checkpoint"
    for older in reversed([path for path in list_checkpoints(run) if path.name < folder.name]):
        with contextlib.suppress(ValueError, OSError, Refusal):
            whole_manifest(older)
            aside = shlex.join(("mv", str(folder), f"{folder}.damaged"))
            return (
                f"the newest older checkpoint that is whole is that of step {step_of(older)}: `{aside}` lets the same"
                f" command take it; eval.py and tools.weights also take --checkpoint={step_of(older)}"
            )
    return "no older checkpoint of the run is whole; --run.overwrite=true begins the run again"


class Checkpoint:
    """A whole checkpoint, open for reading. It names damage where it meets damage, and returns no damaged bytes."""

    def __init__(self, folder: Path):
        """Raises: Refusal if the manifest is missing, damaged or of another version, or a file missing or cut short."""
        self.folder = folder
        try:
            manifest = whole_manifest(folder)
        except ValueError as error:
            raise Refusal(f"{error}; {instead_of(folder)}") from None
        self.info = manifest.info
        self.files = manifest.files
        self.tensors = manifest.tensors
        self._cache: dict[str, tuple[int, bytes]] = {}  # per file, the block that was read last

    def read(self, key: str, first: int = 0, count: int | None = None) -> Tensor:
        """Rows first .. first + count of a tensor, on the host, in the dtype on disk. Raises: Refusal."""
        entry = self.tensors[key]
        count = entry.shape[0] - first if count is None else count
        width = DTYPES[entry.dtype].itemsize * prod(entry.shape[1:])
        rows = torch.empty((count, *entry.shape[1:]), dtype=DTYPES[entry.dtype])
        content = rows.reshape(-1).view(torch.uint8).numpy()
        for file, offset, start, length in entry.chunks:
            low = max(first, start)
            high = min(first + count, start + length)
            if low < high:
                part = content[(low - first) * width : (high - first) * width]
                self._read(file, offset + (low - start) * width, part)
        return rows

    def verify(self) -> None:
        """Read everything. Raises: Refusal at the first damaged block."""
        for name, entry in self.files.items():
            for number in range(len(entry.crc32)):
                self._block(name, number)

    def _read(self, name: str, start: int, content: np.ndarray) -> None:
        """Fill `content` with the bytes of a file from `start` on."""
        end = start + len(content)
        for number in range(start // BLOCK, -(-end // BLOCK)):
            low = max(start, number * BLOCK)
            high = min(end, (number + 1) * BLOCK)
            block = np.frombuffer(self._block(name, number), np.uint8)
            content[low - start : high - start] = block[low - number * BLOCK : high - number * BLOCK]

    def _block(self, name: str, number: int) -> bytes:
        if name in self._cache and self._cache[name][0] == number:
            return self._cache[name][1]
        path = self.folder / name
        begin = number * BLOCK
        try:
            with path.open("rb") as file:
                file.seek(begin)
                content = file.read(BLOCK)
        except OSError as error:
            raise Refusal(f"checkpoint file {path}: {error.strerror}; {instead_of(self.folder)}") from None
        if zlib.crc32(content) != self.files[name].crc32[number]:
            raise Refusal(
                f"checkpoint file {path} is damaged between bytes {begin} and {begin + len(content)}"
                f" (checksum differs); {instead_of(self.folder)}"
            )
        Moved.total += len(content)
        self._cache[name] = (number, content)
        return content
