"""A pool of spawned processes that count their progress, stop on Ctrl-C and end with their parent."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from tqdm import tqdm

from flux_ref.errors import Fault

Advance = Callable[[int], object]


# What the processes share: progress of each task, and whether to stop. No lock guards it, because a killed process
# could hold a lock for ever.
_shared: dict = {}


def run(task: Callable, items: list, workers: int, bar: tqdm) -> list:
    """task(item, advance) of every item, by so many processes; returns the results in the order of the items.

    task: a module's function. It calls advance(count) now and then, which moves the bar and may raise
    KeyboardInterrupt. With one worker, the tasks run in this process.
    Raises: what a task raises; Fault if a process is killed; KeyboardInterrupt. No process is at work then.
    """
    if min(workers, len(items)) <= 1:
        return [task(item, bar.update) for item in items]
    spawn = multiprocessing.get_context("spawn")
    counts, stop = spawn.RawArray("q", len(items)), spawn.RawValue("b")
    pool = ProcessPoolExecutor(min(workers, len(items)), spawn, _start, (counts, stop))
    # Ctrl-C reaches every process. Here it sets a flag, as an exception could leave a lock held. There it is blocked.
    before, done = signal.signal(signal.SIGINT, lambda *_: setattr(stop, "value", True)), 0
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        futures = [pool.submit(_call, task, item, number) for number, item in enumerate(items)]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            now = sum(counts)
            bar.update(now - done)
            done = now
            for future in finished:
                future.result()
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise Fault("a process was killed; if memory ran out, give the same command with fewer --workers") from None
    finally:
        stop.value = True
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGINT, before)


def _start(counts, stop) -> None:
    _shared.update(counts=counts, stop=stop)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End once the parent has been killed. Nothing may be written on its behalf then."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _call(task: Callable, item: object, number: int) -> object:
    def advance(count: int) -> None:
        _shared["counts"][number] += count
        if _shared["stop"].value:
            raise KeyboardInterrupt

    return task(item, advance)
