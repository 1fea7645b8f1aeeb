"""The golden values on the disk, and the file of values that a port writes."""

import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from flux_ref.cli import Refusal, one_line, printable
from flux_ref.dataset import from_bf16_bits
from flux_ref.files import read_bytes
from tools.figures import read_json

FOLDER = Path(__file__).parents[2] / "tests" / "golden"
VALUES = "golden.safetensors"
INDEX = "index.json"
MISTAKES = "mistakes.json"  # {name of a value: {what is wrong: relative rms of its difference there}}
CONFIG = "config.toml"
DATA = "data"
RATE = 1e-3  # optim.lr of CONFIG
Values = dict[str, np.ndarray]
READ_AS = {  # dtype of a safetensors file -> dtype of numpy
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
    inputs: dict  # what it is computed from, beside other values


class Golden:
    """The golden values of a folder.

    arrays: by name. values: their entries in the index, in order of computation. parameters: the names of the weights
    in the order of every list of norms.
    """

    def __init__(self, folder: Path):
        """Raises: Refusal if a file is missing, or is not as it was written."""
        self.arrays: Values = read_tensors(folder / VALUES)
        index = read_json(folder / INDEX)
        if index["sha256"] != checksum(folder / VALUES):
            raise Refusal(f"{folder / VALUES} is not the file that {INDEX} was written with; restore both")
        self.parameters: list[str] = index["parameters"]
        self.values = [Value(**entry) for entry in index["values"]]

    def given(self) -> Values:
        """The values from which a port starts."""
        return {value.name: self.arrays[value.name] for value in self.values if value.given}


def read_tensors(path: Path) -> Values:
    """The tensors of a safetensors file: bf16 as float32, FP8 as its bytes. Needs no torch.

    Raises: Refusal for a file that is not a whole safetensors file, or that holds another dtype than READ_AS.
    """
    try:
        entries = safetensors.deserialize(read_bytes(path))
    except safetensors.SafetensorError as error:
        raise Refusal(f"{path} is not a whole safetensors file: {one_line(error, 200)}; write it again") from None
    arrays = {}
    for name, entry in entries:
        dtype = entry["dtype"]
        if dtype not in READ_AS:
            raise Refusal(f"{path}: {printable(name)[:100]} has dtype {dtype}; write one of {', '.join(READ_AS)}")
        array = np.frombuffer(entry["data"], READ_AS[dtype]).reshape(entry["shape"])
        arrays[name] = from_bf16_bits(array) if dtype == "BF16" else array
    return arrays


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


TABLES = tomllib.loads(Path(__file__).with_name("places.toml").read_text(encoding="utf-8"))


def row(table: str, name: str) -> Any:
    """What a table of patterns says of a value. The first pattern that matches its name counts; {} without one."""
    return next((found for pattern, found in TABLES[table].items() if re.fullmatch(pattern, name)), {})


def inputs_of(name: str) -> dict:
    """What a value is computed from, where the table says so."""
    return row("inputs", name)


def hints(name: str) -> list[str]:
    """What a port may have done wrong where a value differs. A hint in the table may be the name of shared ones."""
    _, _, *listed = row("places", name)
    return [words for hint in listed for words in TABLES["hints"].get(hint, [hint])]


def entry(name: str, dtype: str, array: np.ndarray, given: bool) -> Value:
    """The entry of a golden value, as the tables describe it.

    A tolerance of each element is relative, the others are absolute, rounded to two digits.
    Raises: ValueError for a name without a place.
    """
    kind, meaning, *_ = row("places", name)
    tolerance, unit, why = TABLES["kinds"][kind]
    units = {"each": 0.0, "largest": float(abs(array).max()), "rate": RATE}
    atol = float(f"{tolerance * units[unit]:.1e}")
    rtol = tolerance if unit == "each" else 0.0
    return Value(name, [*array.shape], dtype, given, meaning, atol, rtol, why, inputs_of(name))
