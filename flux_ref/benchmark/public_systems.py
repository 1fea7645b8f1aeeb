"""Public rates of FLUX.1 training: what others measured, and what the method of flux_ref.plan gives for them."""

import csv
import json
import math
from pathlib import Path
from types import SimpleNamespace

from flux_ref.benchmark import hardware

TABLE = Path(__file__).with_name("public_systems.csv")
TEXTS = ("source", "system", "gpu", "precision", "outlier")  # columns that are no numbers


def systems() -> list[SimpleNamespace]:
    """The rows of the table. rows: samples of a micro-batch; planned_s: the step that the method gives."""
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found = []
    for row in csv.DictReader(lines):
        public = SimpleNamespace(**{key: value if key in TEXTS else json.loads(value) for key, value in row.items()})
        public.rows = public.micro_batch or public.global_batch // public.gpus
        found.append(public)
    return found


def nearest(name: str, arch: str, precision: str, gpus: int, rows: int) -> SimpleNamespace | None:
    """The system that is most like a plan, of its card or architecture; None if there is none.

    A card counts more than a precision, and a precision more than numbers of cards and samples.
    """

    def distance(public: SimpleNamespace) -> tuple:
        sizes = abs(math.log(public.gpus / gpus)) + abs(math.log(public.rows / rows))
        return public.gpu != name, public.precision != precision, sizes

    known = systems()
    archs = {card: hardware.load(card)[0].arch for card in {public.gpu for public in known}}
    return min((public for public in known if archs[public.gpu] == arch), key=distance, default=None)
