"""Reading a safetensors file with numpy alone, and without trust in the header.

Format: 8 bytes little-endian length, then JSON, then the tensors back to back (github.com/huggingface/safetensors).
"""

import math
from pathlib import Path

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


class TensorFile:
    """The tensors of a safetensors file. Each is read when it is asked for.

    entries: name -> (dtype as the format names it, shape).
    """

    def __init__(self, path: Path):
        """Raises: Refusal for a file that is not a whole safetensors file."""
        with outside.opened(path, "safetensors file") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= HEAD_BYTES else b""
            size = file.seek(0, 2) - 8 - length  # of the data
        try:
            if len(text) < length or size < 0:
                raise ValueError(f"its first eight bytes announce a header of {length} bytes")
            self.entries, self._begins = _entries(outside.parse_json(text), size)
        except ValueError as error:
            reason = outside.printable(error)[:200]
            raise Refusal(f"{path} is not a whole safetensors file: {reason}; write it again") from None
        # A map of no bytes is not allowed.
        self._data = np.memmap(path, np.uint8, "r", 8 + length, size) if size else np.empty(0, np.uint8)

    def read(self, name: str) -> np.ndarray:
        """A tensor: bf16 as float32, FP8 as its bytes. Raises: KeyError."""
        dtype, shape = self.entries[name]
        begin = self._begins[name]
        kind = np.dtype(STORED[dtype])
        array = self._data[begin : begin + math.prod(shape) * kind.itemsize].view(kind).reshape(shape)
        if dtype == "BF16":
            return (array.astype(np.uint32) << 16).view(np.float32)
        return np.array(array)  # a copy: aligned, and in memory


def _entries(head: object, size: int) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict[str, int]]:
    """(dtype, shape) and the first byte of each tensor, from a header and the bytes of data. Raises: ValueError."""
    if not isinstance(head, dict):
        raise ValueError("its header is no JSON object")
    entries = {}
    spans = {}
    for name, entry in head.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [begin, end]}:
                is_known = len(shape) <= MOST_AXES and all(_is_count(number) for number in (*shape, begin, end))
            case _:
                is_known = False
        if not is_known:
            raise ValueError(f"its entry {name[:100]} has no dtype, shape and data_offsets as the format wants them")
        if dtype not in STORED:
            raise ValueError(f"the dtype {dtype[:20]} of {name[:100]} is not one of {', '.join(STORED)}")
        if end - begin != math.prod(shape) * np.dtype(STORED[dtype]).itemsize:
            raise ValueError(f"{name[:100]} has {end - begin} bytes, which do not fit its shape and dtype")
        entries[name] = dtype, tuple(shape)
        spans[name] = begin, end
    last = 0
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != last:
            raise ValueError(f"{name[:100]} begins at byte {begin}, and the tensor before it ends at {last}")
        last = end
    if last != size:
        raise ValueError(f"its tensors end at byte {last} of {size}")
    return entries, {name: begin for name, (begin, _) in spans.items()}


def _is_count(number: object) -> bool:
    """Whether it is a whole number from 0 that is not beyond what a file can hold."""
    return type(number) is int and 0 <= number < 2**48
