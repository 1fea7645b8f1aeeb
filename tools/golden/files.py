"""The golden values on the disk."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flux_ref.errors import Refusal
from flux_ref.formats import outside
from tools.golden.tensor_file import TensorFile

FOLDER = Path(__file__).parents[2] / "tests" / "golden"
VALUES = "golden.safetensors"
INDEX = "index.json"
CONFIG = "config.toml"
DATA = "data"


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
    inputs: dict = field(default_factory=dict)  # what it is computed from, beside other values; names: of its elements


class Golden:
    """The golden values of a folder.

    values: in order of computation. parameters: the names of the weights in the order of every list of norms.
    """

    def __init__(self, folder: Path):
        """Raises: Refusal if a file is missing, or is not as it was written."""
        self.folder = folder
        self.file = TensorFile(folder / VALUES)
        index = outside.read_json(folder / INDEX, "index of golden values")
        try:
            self.parameters = index["parameters"]
            self.values = [Value(**entry) for entry in index["values"]]
            shapes = {value.name: tuple(value.shape) for value in self.values}
            is_whole = index["sha256"] == checksum(folder / VALUES)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Refusal(f"{folder / INDEX} is no index of golden values: {error!r}; restore it") from None
        if not is_whole or shapes != {name: entry.shape for name, entry in self.file.entries.items()}:
            raise Refusal(f"{folder / VALUES} is not the file that {INDEX} was written with; restore both")

    def given(self) -> dict[str, np.ndarray]:
        """The values from which a port starts."""
        return {value.name: self.file.read(value.name) for value in self.values if value.given}


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
