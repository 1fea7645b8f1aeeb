"""Public rates of FLUX.1 training, and what the method of tools.plan gives for them."""

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace

from tools.shared import hardware

TABLE = Path(__file__).with_name("public_systems.csv")
TEXTS = ("source", "system", "gpu", "precision", "outlier")  # columns that are no numbers


def systems(table: Path = TABLE) -> list[SimpleNamespace]:
    """The rows of a table. planned_s: the step that the method gives, 0 in a precision without a known rate."""
    lines = [line for line in table.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [
        SimpleNamespace(**{key: value if key in TEXTS else json.loads(value) for key, value in row.items()})
        for row in csv.DictReader(lines)
    ]


def nearest(name: str, arch: str, precision: str, gpus: int, rows: int) -> SimpleNamespace | None:
    """The system that is most like a plan with micro-batches of so many rows; None without one of its architecture.

    A card counts more than a precision, and a precision more than numbers of cards and rows.
    """
    known = [public for public in systems() if public.planned_s]
    archs = {card: hardware.load(card)[0].arch for card in {public.gpu for public in known}}

    def distance(public: SimpleNamespace) -> tuple:
        sizes = abs(math.log(public.gpus / gpus)) + abs(math.log(public.micro_batch / rows))
        return public.gpu != name, public.precision != precision, sizes

    return min((public for public in known if archs[public.gpu] == arch), key=distance, default=None)
