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

SOURCES = {"train": "metrics.jsonl", "validation": "eval.jsonl"}


def write(run: Path) -> int:
    """Write the figures of a run, over training samples. Returns the exit code, 0. Raises: Refusal."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise Refusal("this needs the package tensorboard; pip install tensorboard") from None
    config_file.of_run(run)  # refuses a folder that holds no run
    found = [(group, record) for group, file in SOURCES.items() for record in records(run / file)]
    folder = run / "tensorboard"
    shutil.rmtree(folder, ignore_errors=True)
    with SummaryWriter(str(folder)) as writer:
        for group, record in found:
            samples = record.pop("samples")
            for key, value in record.items():
                listed = enumerate(value) if isinstance(value, list) else ()
                figures = {f"{key}/{i}": x for i, x in listed} or {key: value}
                for name, figure in figures.items():
                    writer.add_scalar(f"{group}/{name}", figure, samples)
    print(f"{len(found):,} records in {folder}")
    return 0


def main(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print(__doc__)
        return 0
    return attempt("tensorboard", lambda: max(write(Path(name)) for name in argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
