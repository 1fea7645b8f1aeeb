"""Safetensors files, by their library (github.com/huggingface/safetensors)."""

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flux_ref.cli import ProgressCount, Refusal
from flux_ref.files import naming, sync


@contextmanager
def opened(path: Path) -> Iterator[safe_open]:
    """A safetensors file, open for reading. Raises: Refusal, also while it is read.

    Open it anew for each tensor: a mapping that stays open fills memory.
    """
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise Refusal(f"{path} cannot be read as safetensors: {error}; give another") from None


def read_rows(path: Path, name: str, first: int, count: int) -> Tensor:
    """Rows of a tensor, in the file's dtype. Raises: Refusal."""
    with opened(path) as file:
        rows = file.get_slice(name)[first : first + count]
    ProgressCount.total += rows.nbytes
    return rows


def write(path: Path, tensors: dict[str, Tensor]) -> int:
    """Write a new file and wait until it is on the disk. Takes the file's size of host memory.

    Returns: the CRC-32 of its bytes. Raises: OSError, which names the file.
    """
    content = safetensors.torch.save(tensors, {"format": "pt"})
    with naming(path):
        path.write_bytes(content)
        sync(path)
    ProgressCount.total += len(content)
    return zlib.crc32(content)


def crc32(path: Path) -> int:
    """The CRC-32 of a file's bytes. Takes the file's size of host memory. Raises: OSError."""
    content = path.read_bytes()
    ProgressCount.total += len(content)
    return zlib.crc32(content)


def require_fit(found: dict[str, tuple], want: dict[str, tuple], where: str | Path) -> None:
    """Compare names and shapes of tensors. Raises: Refusal with an example of what does not fit."""
    misfits = sorted(name for name in found | want if found.get(name) != want.get(name))
    if misfits:
        one = misfits[0]
        example = f"{one} is {found.get(one, 'missing')}, want {want.get(one, 'none')}"
        raise Refusal(f"{where} does not fit in {len(misfits)} tensors, such as: {example}")
