"""What the golden values mean, how far a port may be off, and what is known to go wrong at each place.

places.toml holds the table. A value differs where |yours - golden| > atol + rtol * |golden|.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

LONG = "full.init.norms"  # takes minutes; computed with --long only


@dataclass(frozen=True)
class Kind:
    """How far a value may be off: `tolerance` times the largest magnitude of its elements (unit: "largest")."""

    tolerance: float
    unit: str  # or "each": times each element; or "rate": times the learning rate
    why: str

    def tolerances(self, golden: np.ndarray, rate: float) -> tuple[float, float]:
        """(atol, rtol) of a value. rate: the run's learning rate."""
        if self.unit == "each" or self.tolerance == 0:
            return 0.0, self.tolerance
        largest = rate if self.unit == "rate" else np.abs(golden.astype(np.float64)).max()
        return float(f"{self.tolerance * largest:.1e}"), 0.0


@dataclass(frozen=True)
class Place:
    """What values are, how exact they are, and what a port may have done wrong where they differ."""

    meaning: str
    kind: Kind
    mistakes: tuple[str, ...]  # each may begin with signs: "SIGN, SIGN > words"


TABLES = tomllib.loads(Path(__file__).with_name("places.toml").read_text(encoding="utf-8"))
PLACES = {  # by pattern; the first pattern that matches a name counts
    pattern: Place(meaning, Kind(*TABLES["kinds"][kind]), tuple(mistakes))
    for pattern, (kind, meaning, *mistakes) in TABLES["places"].items()
}


def place(name: str) -> Place:
    """The place of a value. Raises: KeyError for a name without a place."""
    for pattern, known in PLACES.items():
        if re.fullmatch(pattern, name):
            return known
    raise KeyError(name)


def mistakes(name: str, seen: str) -> list[str]:
    """The mistakes that are known for a value, the likeliest first. seen: what `check` has said of yours.

    Mistakes with a sign that was seen come first. Those whose signs were not seen come last.
    """
    try:
        lines = place(name).mistakes
    except KeyError:  # another version's golden values
        return []
    ranks = {}
    for line in lines:
        for mistake in TABLES["mistakes"].get(line, [line]):
            signs, _, words = mistake.rpartition(" > ")
            is_seen = any(sign in seen for sign in signs.split(" | "))
            ranks.setdefault(words, 1 if not signs else 0 if is_seen else 2)
    return sorted(ranks, key=ranks.get)


def inputs_of(name: str) -> dict:
    """What a value is computed from, where the table says so."""
    for pattern, row in TABLES["inputs"].items():
        if re.fullmatch(pattern, name):
            return row
    return {}
