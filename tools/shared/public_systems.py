"""Public rates of FLUX.1 training, what the method of tools.plan gives for them, and curves of public runs.

public_runs.csv holds the losses of one run of each system of MLPerf Training v6.0, from the result files that
public_systems.csv names. The systems of MI300X and MI325X validated with captions dropped, the others did not.
"""

import csv
import json
import math
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

from tools.shared import hardware

TABLE = Path(__file__).with_name("public_systems.csv")
RUNS = Path(__file__).with_name("public_runs.csv")
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


def curves(global_batch: int) -> list[list[tuple[int, float]]]:
    """(samples, validation loss) of the public runs of a batch, one of each system."""
    rows = (row for row in systems(RUNS) if row.global_batch == global_batch)
    return [[(row.samples, row.val_loss) for row in one] for _, one in groupby(rows, lambda row: row.system)]
