"""Reads checkpoints: any rows of any tensor, and no byte before its checksum is checked."""

import contextlib
import json
import shlex
import zlib
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files, outside
from flux_ref.formats.checkpoint_files import FORMAT, MANIFEST, NAME, Manifest, TensorEntry
from flux_ref.formats.safetensors_io import BLOCK, DTYPES, FileEntry, Moved

MANIFEST_BYTES = 2**30  # that of 512 ranks has 70 MB
MOST = 2**53  # of any number in a manifest
INFO = {"step": int, "samples": int, "name": str, "config": dict}  # what each manifest says of the training
MORE_INFO = {
    "train_samples": int,
    "val_samples": int,
    "run": str,
    "records": dict,
    "ema": int,
}  # what a checkpoint of a run, or of an imported average of weights, says besides


def _require_kinds(info: dict, files: dict[str, FileEntry], tensors: dict[str, TensorEntry]) -> None:
    """Raises: ValueError, KeyError or TypeError if a value is of the wrong kind, or a number is out of range."""
    for key, kind in (INFO | MORE_INFO).items():
        if type(info[key] if key in INFO else info.get(key, kind())) is not kind:
            raise ValueError(f"its {key} is {outside.shown(info[key])}")
    batch = info["config"].get("train.global_batch")
    if type(batch) is int and info["samples"] != info["step"] * batch:
        raise ValueError(f"step {info['step']} and {info['samples']} samples do not belong together")
    _require_counts("info", [value for value in info.values() if type(value) is int])
    for name, file in files.items():
        _require_counts(name, [file.bytes, *file.crc32])
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ValueError(f"its dtype of {outside.shown(key)} is {outside.shown(tensor.dtype)}")
        places = [number for _, *place in tensor.chunks for number in place]
        _require_counts(key, [*tensor.shape, prod(tensor.shape[1:]), *places])


def _require_counts(name: str, numbers: Iterable[object]) -> None:
    if not all(type(number) is int and 0 <= number <= MOST for number in numbers):
        raise ValueError(f"its entry of {outside.printable(name)[:80]} holds what is no count")


def whole_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files are all there with their sizes. Their bytes are not read.

    Raises: ValueError that says what is damaged; Refusal for another version.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{folder} is not a checkpoint: {path} is missing")
    try:
        text = outside.read_bytes(path, "checkpoint manifest", MANIFEST_BYTES)
    except Refusal as refusal:
        raise ValueError(str(refusal)) from None
    try:
        content = outside.parse_json(text)
        checksum = content.pop("crc32")
        if content["format"] != FORMAT:
            version = outside.shown(content["format"])
            raise Refusal(
                f"checkpoint {folder} is of format version {version}, this flux_ref reads {FORMAT};"
                " use the flux_ref that wrote it"
            )
        if zlib.crc32(json.dumps(content).encode()) != checksum:
            raise ValueError("its checksum differs")
        files = {name: FileEntry(**entry) for name, entry in content["files"].items()}
        tensors = {key: TensorEntry(**entry) for key, entry in content["tensors"].items()}
        _require_kinds(content["info"], files, tensors)
        manifest = Manifest(content["info"], files, tensors)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        lacks = "it lacks " if isinstance(error, KeyError) else ""
        raise ValueError(f"checkpoint manifest {path} is damaged: {lacks}{error}") from None
    step = manifest.info["step"]
    if NAME.fullmatch(folder.name) and checkpoint_files.step_of(folder) != step:
        raise ValueError(f"checkpoint {folder} holds step {step}, so this is not the name that it had")
    for name, entry in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise ValueError(f"checkpoint file {file} is missing")
        if (size := file.stat().st_size) != entry.bytes:
            raise ValueError(f"checkpoint file {file} has {size} bytes, its manifest says {entry.bytes}")
    return manifest


def instead_of(folder: Path) -> str:
    """What a user can do about a damaged checkpoint: the newest other one of its run that is whole is named.

    Nothing takes another checkpoint by itself: a run would train again on what it has trained on, unasked.
    """
    run = folder.parent.parent
    if not NAME.fullmatch(folder.name) or folder.parent != checkpoint_files.folder_of(run):
        return "use another checkpoint"
    for other in reversed(checkpoint_files.list_checkpoints(run)):
        if other == folder:
            continue
        with contextlib.suppress(ValueError, OSError, Refusal):
            whole_manifest(other)
            aside = shlex.join(("mv", str(folder), f"{folder}.damaged"))
            return (
                f"the newest other checkpoint that is whole is {other}; `{aside}` takes the damaged one out of the run"
            )
    return "no other checkpoint of the run is whole; train.py --run.overwrite=true begins the run again"


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
        # Per file, the block that was read last. A tensor's rows in a file often begin in the block where the tensor
        # before it ended: with one block for all files, 512 ranks' files would be read nine times.
        self._cache: dict[str, tuple[int, bytes]] = {}

    def read(self, key: str, first: int = 0, count: int | None = None) -> Tensor:
        """Rows first .. first + count of a tensor, on the host, in the dtype on disk.

        Raises: Refusal for damage; IndexError for rows that the tensor does not have.
        """
        entry = self.tensors[key]
        count = entry.shape[0] - first if count is None else count
        if not 0 <= first <= first + count <= entry.shape[0]:
            raise IndexError(f"rows {first} to {first + count} of {key}, which has {entry.shape[0]}")
        width = DTYPES[entry.dtype].itemsize * prod(entry.shape[1:])
        rows = torch.empty((count, *entry.shape[1:]), dtype=DTYPES[entry.dtype])
        content = memoryview(rows.reshape(-1).view(torch.uint8).numpy())
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

    def _read(self, name: str, start: int, content: memoryview) -> None:
        """Fill `content` with the bytes of a file from `start` on."""
        filled = 0
        while filled < len(content):
            number, skipped = divmod(start + filled, BLOCK)
            part = self._block(name, number)[skipped : skipped + len(content) - filled]
            content[filled : filled + len(part)] = part
            filled += len(part)

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
            raise Refusal(f"checkpoint file {path}: {error.strerror or error}; {instead_of(self.folder)}") from None
        if zlib.crc32(content) != self.files[name].crc32[number]:
            raise Refusal(
                f"checkpoint file {path} is damaged between bytes {begin} and {begin + len(content)}"
                f" (checksum differs); {instead_of(self.folder)}"
            )
        Moved.total += len(content)
        self._cache[name] = (number, content)
        return content
