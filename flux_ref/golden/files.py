"""The golden values on the disk, and the dump of a port: tensors by name in a safetensors file."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from flux_ref.errors import Refusal
from flux_ref.formats.outside import printable

VALUES, INDEX, CONFIG = "golden.safetensors", "index.json", "config.toml"


@dataclass(frozen=True)
class Value:
    """An entry of the index. A port's value differs where |yours - golden| > atol + rtol * |golden|."""

    name: str
    shape: list[int]
    dtype: str  # in which the value is computed: fp32, bf16 (the file holds it as F32), int64, uint64, uint8, bool
    given: bool  # a port reads this value instead of computing it
    meaning: str
    atol: float
    rtol: float
    why: str  # the reason of the tolerance


class TensorFile:
    """The tensors of a safetensors file. Each is read when it is asked for.

    entries: name -> (dtype as the format names it, shape).
    """

    def __init__(self, path: Path):
        """Raises: Refusal for a file that is not a whole safetensors file."""
        if not path.is_file():
            raise Refusal(f"{path}: {'not a file' if path.exists() else 'no such file'}")
        try:
            self.file = safe_open(path, framework="pt")
            slices = {name: self.file.get_slice(name) for name in self.file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise Refusal(f"{path} is not a whole safetensors file: {printable(error)[:200]}") from None
        self.entries = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}

    def read(self, name: str) -> np.ndarray:
        """A tensor: bf16 as float32, FP8 as its bytes."""
        tensor = self.file.get_tensor(name)
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.float()
        is_fp8 = tensor.is_floating_point() and tensor.itemsize == 1
        return (tensor.view(torch.uint8) if is_fp8 else tensor).numpy()


class Golden:
    """The golden values of a folder.

    values: in order of computation. parameters: the names of the weights in the order of every list of norms.
    """

    def __init__(self, folder: Path):
        """Raises: Refusal if a file is missing, or is not as it was written."""
        self.folder, self.file = folder, TensorFile(folder / VALUES)
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            self.parameters, self.values = index["parameters"], [Value(**entry) for entry in index["values"]]
            is_whole = index["sha256"] == checksum(folder / VALUES)
        except OSError as error:
            raise Refusal(f"{folder / INDEX}: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise Refusal(f"{folder / INDEX} is no index of golden values: {error}") from None
        if not is_whole:
            raise Refusal(f"{folder / VALUES} is not the file that {INDEX} was written with; restore both")

    def given(self) -> dict[str, np.ndarray]:
        """The values from which a port starts."""
        return {value.name: self.file.read(value.name) for value in self.values if value.given}


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
