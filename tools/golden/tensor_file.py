"""Reading a safetensors file with numpy alone, and without trust in the header.

Format: 8 bytes little-endian length, then JSON, then the tensors back to back (github.com/huggingface/safetensors).
"""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flux_ref.errors import Refusal
from flux_ref.formats import outside

HEAD_BYTES = 16 * 2**20  # no list of tensors that is read here is longer
MOST_AXES = 16
STORED = {  # dtype as the format names it -> how its bytes are read
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "BOOL": "|b1",
    "F8_E4M3": "|u1",
    "F8_E5M2": "|u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "|u1",
}


class Entry(NamedTuple):
    """A tensor of the file. dtype: as the format names it. begin, end: its bytes, after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """The tensors of a safetensors file, by name in `entries`. Each is read when it is asked for."""

    def __init__(self, path: Path):
        """Raises: Refusal for a file that is not a whole safetensors file."""
        self.path = path
        with outside.opened(path, "safetensors file") as file:
            length = int.from_bytes(file.read(8), "little")
            head = file.read(min(length, HEAD_BYTES))
            size = file.seek(0, 2) - 8 - length
        self._data = 8 + length
        try:
            self.entries = _entries(outside.parse_json(head), size)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reason = outside.printable(repr(error))[:200]
            raise Refusal(f"{path} is not a whole safetensors file: {reason}; write it again") from None

    def read(self, name: str) -> np.ndarray:
        """A tensor: bf16 as float32, FP8 as its bytes. Raises: KeyError."""
        dtype, shape, begin, _ = self.entries[name]
        array = np.fromfile(self.path, STORED[dtype], math.prod(shape), offset=self._data + begin).reshape(shape)
        if dtype == "BF16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return array


def _entries(head: dict, size: int) -> dict[str, Entry]:
    """The tensors by name. size: bytes of data. Raises: ValueError, or another error for a foreign header."""
    head.pop("__metadata__", None)
    entries = {}
    for name, about in head.items():
        entry = Entry(about["dtype"], tuple(about["shape"]), *about["data_offsets"])
        numbers = entry[2:] + entry.shape
        if entry.dtype not in STORED:
            raise ValueError(f"the dtype {entry.dtype} of {name} is not one of {', '.join(STORED)}")
        if len(numbers) > MOST_AXES or not all(type(number) is int and 0 <= number < 2**48 for number in numbers):
            raise ValueError(f"the shape or the bytes of {name} cannot be")
        if entry.end - entry.begin != math.prod(entry.shape) * np.dtype(STORED[entry.dtype]).itemsize:
            raise ValueError(f"the bytes of {name} do not fit its shape and dtype")
        entries[name] = entry
    spans = sorted(entry[2:] for entry in entries.values())
    if [0, *(end for _, end in spans)] != [*(begin for begin, _ in spans), size]:
        raise ValueError(f"its tensors do not fill the {size} bytes after its header one after another")
    return entries
