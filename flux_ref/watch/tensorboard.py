"""Show runs in TensorBoard (pip install tensorboard) that were trained without run.tensorboard.

python -m flux_ref.watch.tensorboard RUN [RUN ...]        writes RUN/tensorboard anew from the run's files
tensorboard --logdir runs
"""

import sys
from pathlib import Path

from flux_ref import config_file
from flux_ref.errors import Refusal
from flux_ref.formats.jsonl import outcome
from flux_ref.run.attempt import attempt


def write(run: Path) -> int:
    """Write a run's figures, pictures and config. Returns the exit code, 0. Raises: Refusal."""
    if config_file.of_run(run).run.tensorboard and not outcome(run):
        raise Refusal(f"{run} is unfinished and writes {run}/tensorboard itself (run.tensorboard=true)")
    from flux_ref.run.tensorboard import Board  # of an optional package

    count = Board(run).begin()
    print(f"{count:,} records in {run}/tensorboard; to look at them: tensorboard --logdir {run}")
    return 0


def main(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        print(__doc__)
        return 0
    return attempt("tensorboard", lambda: max(write(Path(name)) for name in argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
