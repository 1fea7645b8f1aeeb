"""What the golden values mean, how far a port may be off, and what is known to go wrong at each place.

places.toml holds the tables.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Place:
    """What values are, how exact they are, and what a port may have done wrong where they differ.

    A value may be off by `tolerance` times a unit: "largest", the largest magnitude of its elements; "each", each
    element; or "rate", the learning rate.
    """

    tolerance: float
    unit: str
    why: str  # the reason of the tolerance
    meaning: str
    hints: list[str]

    def tolerances(self, golden: np.ndarray, rate: float) -> tuple[float, float]:
        """(atol, rtol) of a value. rate: the run's learning rate."""
        if self.unit == "each" or self.tolerance == 0:
            return 0.0, self.tolerance
        largest = rate if self.unit == "rate" else np.abs(golden.astype(np.float64)).max()
        return float(f"{self.tolerance * largest:.1e}"), 0.0


TABLES = tomllib.loads(Path(__file__).with_name("places.toml").read_text(encoding="utf-8"))


def made(kind: str, meaning: str, *hints: str) -> Place:
    """A place from its row in the table. A hint may be the name of shared ones."""
    words = []
    for hint in hints:
        words += TABLES["hints"].get(hint, [hint])
    tolerance, unit, why = TABLES["kinds"][kind]
    return Place(tolerance, unit, why, meaning, words)


# By pattern; the first pattern that matches a name counts.
PLACES = {pattern: made(*row) for pattern, row in TABLES["places"].items()}


def place(name: str) -> Place:
    """The place of a value. Raises: KeyError for a name without a place."""
    for pattern, known in PLACES.items():
        if re.fullmatch(pattern, name):
            return known
    raise KeyError(name)


def inputs_of(name: str) -> dict:
    """What a value is computed from, where the table says so."""
    for pattern, row in TABLES["inputs"].items():
        if re.fullmatch(pattern, name):
            return row
    return {}
