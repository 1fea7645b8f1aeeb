"""Writing safetensors files front to back with a checksum per block."""

import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 1 << 20  # bytes under one checksum
SYNCED = 256 * BLOCK  # bytes after which a writer waits for the disk
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Moved:
    """Bytes that this process has moved between memory and disk. The hang watch counts them as progress."""

    total = 0


@dataclass(frozen=True)
class FileEntry:
    """A file of a checkpoint: its size and the CRC-32 of each block."""

    bytes: int
    crc32: list[int]


class CheckedFile:
    """A new file that is written front to back with a checksum per block. When closed, it is on the disk."""

    def __init__(self, path: Path):
        self.file = path.open("xb", buffering=0)  # nothing is left to be flushed when a write has failed
        self.bytes = 0
        self.crc32 = []

    def write(self, content: memoryview | bytes) -> None:
        rest = memoryview(content).cast("B")
        while len(rest):
            filled = self.bytes % BLOCK
            count = self.file.write(rest[: BLOCK - filled])  # some file systems take less
            if not filled:
                self.crc32.append(0)
            self.crc32[-1] = zlib.crc32(rest[:count], self.crc32[-1])
            self.bytes += count
            if self.bytes % SYNCED == 0:  # one wait at the end, of minutes on a slow disk, would look like a hang
                os.fsync(self.file.fileno())
            Moved.total += count
            rest = rest[count:]

    def write_tensor(self, tensor: Tensor) -> None:
        """The bytes of a tensor on the host."""
        self.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> FileEntry:
        os.fsync(self.file.fileno())
        self.file.close()
        return FileEntry(self.bytes, self.crc32)


def write(
    path: Path, entries: dict[str, tuple[str, Iterable[int]]], metadata: dict[str, str], pieces: Iterable[Tensor]
) -> tuple[FileEntry, dict[str, int]]:
    """Write a new safetensors file. When this returns, the file is on the disk. Raises: OSError.

    entries: (dtype, shape) of each tensor.
    pieces:  the rows of all tensors in the order of `entries`, on the host and in these dtypes.
    Returns: size and checksums of the file, and the byte at which each tensor begins.
    Format:  8 bytes little-endian length, then JSON, then the tensors (github.com/huggingface/safetensors).
    """
    table = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in entries.items():
        begin = end
        end += DTYPES[dtype].itemsize * prod(shape)
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    file = CheckedFile(path)
    file.write(len(text).to_bytes(8, "little") + text)
    for piece in pieces:
        file.write_tensor(piece)
    return file.close(), {name: 8 + len(text) + table[name]["data_offsets"][0] for name in entries}
