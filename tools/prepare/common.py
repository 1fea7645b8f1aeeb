"""What the commands share: options, a data set that grows until it is whole, threads."""

import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from flux_ref import config_file, files
from flux_ref.cli import Refusal
from flux_ref.config import Config

MADE_FROM = "made_from.json"


def add_config(parser: ArgumentParser, default: str = "") -> None:
    """Add --config: args.config is the Config of a file, by default of `default` or FLUX.1-schnell's."""
    parser.add_argument(
        "--config",
        type=config_file.load,
        default=default or Config(),
        metavar="FILE",
        help=f"a config with the sizes of the model and the data set ({default or 'those of the benchmark'})",
    )


def require_new(final: Path) -> None:
    """Raises: Refusal."""
    if final.exists():
        raise Refusal(f"{final} exists; choose another --output")


def partial_of(final: Path) -> Path:
    """Where a set grows. Each file there that has its name is whole."""
    return final.with_name(f"{final.name}.partial")


@contextmanager
def growing(final: Path, made_from: dict) -> Iterator[Path]:
    """The folder partial_of(final) for this process alone. Its sub-folder `set` becomes `final` if the block ends well.

    made_from: what must be the same when the command goes on after a stop; JSON.
    Raises: Refusal if another process is at work there, or if the folder was made from something else.
    """
    folder = partial_of(final)
    note = folder / MADE_FROM
    growing = folder / "set"
    final.parent.mkdir(parents=True, exist_ok=True)
    with files.lock(final.with_name(f".{final.name}.lock"), str(folder)):
        require_new(final)
        if note.exists() and not growing.exists():  # left beside a set that was whole, or nothing has grown yet
            files.remove(folder)
        wanted = json.dumps(made_from)
        folder.mkdir(exist_ok=True)
        for path in [*folder.rglob(f".*{files.PARTIAL}")]:  # of a killed process
            files.remove(path)
        if not any(folder.iterdir()):
            files.write_whole(note, wanted)
        if not note.exists():
            raise Refusal(f"{folder} holds files of something else; choose another --output")
        if note.read_text() != wanted:
            raise Refusal(f"{folder} was begun from another input or with other options; remove it to begin again")
        growing.mkdir(exist_ok=True)
        yield folder
        files.sync(growing)
        growing.rename(final)
        files.remove(folder)
        files.sync(final.parent)


def each(task: Callable, items: Iterable, workers: int) -> Iterator:
    """task(item) of every item, by so many threads; gives the results in the order of the items.

    Raises: what a task raises; KeyboardInterrupt. Tasks that are under way then run on until the process ends.
    """
    pool = ThreadPoolExecutor(workers)
    try:
        yield from pool.map(task, items)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
