"""What the commands share: options, a data set that grows until it is whole, threads."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

from flux_ref import config_file, files
from flux_ref.cli import Refusal
from flux_ref.config import Config

MADE_FROM = "made_from.json"
Advance = Callable[[int], None]


def config(path: str | None) -> Config:
    """The config of --config, or FLUX.1-schnell's. Raises: Refusal."""
    return config_file.load(path) if path else Config()


def folder(text: str) -> Path:
    """An option that names a folder. Raises: Refusal if there is none."""
    path = Path(text).expanduser()
    if not path.is_dir():
        raise Refusal(f"{text} is no folder")
    return path


def require_new(final: Path) -> None:
    """What a killed command left beside a whole set goes away. Raises: Refusal."""
    if final.exists():
        with _alone(final):
            pass


def partial_of(final: Path) -> Path:
    """Where a set grows. Each file there that has its name is whole."""
    return final.with_name(f"{final.name}.partial")


@contextmanager
def _alone(final: Path) -> Iterator[None]:
    """No other process makes `final` in this block. Raises: Refusal if one is at work, or if `final` exists."""
    final.parent.mkdir(parents=True, exist_ok=True)
    with files.lock(final.with_name(f".{final.name}.lock"), str(partial_of(final))):
        _clear(final)
        if final.exists():
            raise Refusal(f"{final} exists; choose another --output")
        yield
        _clear(final)


def _clear(final: Path) -> None:
    """Remove what is left beside a whole set, by way of a name that the next start clears, if this one is killed."""
    rest = partial_of(final)
    if final.exists() and (rest / MADE_FROM).exists() and not (rest / "set").exists():
        rest.rename(final.with_name(f".{final.name}.the_rest{files.PARTIAL}"))
    files.remove_partial_files(final.parent, final.name)


@contextmanager
def growing(final: Path, made_from: dict) -> Iterator[Path]:
    """The folder partial_of(final) for this process alone. Its sub-folder `set` becomes `final` if the block ends well.

    made_from: what must be the same when the command goes on after a stop; JSON.
    Raises: Refusal if another process is at work there, or if the folder was made from something else.
    """
    folder = partial_of(final)
    note = folder / MADE_FROM
    with _alone(final):
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
        (folder / "set").mkdir(exist_ok=True)
        yield folder
        files.sync(folder / "set")
        (folder / "set").rename(final)
        files.sync(final.parent)


def each(task: Callable, items: Iterable, workers: int, bar: tqdm) -> list:
    """task(item, advance) of every item, by so many threads; returns the results in the order of the items.

    A task calls advance(count) now and then. It moves the bar, and ends the task once another task has failed.
    Raises: what a task raises; KeyboardInterrupt. No thread is at work then.
    """
    stop = threading.Event()

    def advance(count: int) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        with bar.get_lock():
            bar.update(count)

    with ThreadPoolExecutor(workers) as pool:
        try:
            futures = [pool.submit(task, item, advance) for item in items]
            for future in as_completed(futures):
                future.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
    return [future.result() for future in futures]
