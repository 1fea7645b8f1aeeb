"""Show a run in TensorBoard (pip install tensorboard).

python -m flux_ref.watch.tensorboard RUN [RUN ...]        writes RUN/tensorboard anew from the run's records
tensorboard --logdir runs
"""

import shutil
import sys
from pathlib import Path

from flux_ref import config_file
from flux_ref.errors import Refusal
from flux_ref.formats.jsonl import records
from flux_ref.run.attempt import attempt

FOLDER = "tensorboard"
SOURCES = {"metrics.jsonl": "train", "eval.jsonl": "validation"}


def write(run: Path) -> int:
    """Write the figures of a run, over training samples. Returns the exit code, 0. Raises: Refusal."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Refusal("this needs the package tensorboard; pip install tensorboard") from None
    config_file.of_run(run)  # refuses a folder that holds no run
    figures = [figure for file, group in SOURCES.items() for figure in flat(records(run / file), group)]
    shutil.rmtree(run / FOLDER, ignore_errors=True)
    with SummaryWriter(str(run / FOLDER)) as writer:
        for name, value, samples in figures:
            writer.add_scalar(name, value, samples)
    print(f"{len(figures):,} figures in {run / FOLDER}")
    return 0


def flat(steps: list[dict], group: str) -> list[tuple[str, float, int]]:
    """(name, value, samples) of every figure; a list gives a figure for each of its values."""
    figures = []
    for record in steps:
        for key, value in record.items():
            if isinstance(value, list):
                figures += [(f"{group}/{key}/{i}", x, record["samples"]) for i, x in enumerate(value)]
            elif key != "samples":
                figures.append((f"{group}/{key}", value, record["samples"]))
    return figures


def main(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print(__doc__)
        return 0
    return attempt("tensorboard", lambda: max(write(Path(name)) for name in argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
