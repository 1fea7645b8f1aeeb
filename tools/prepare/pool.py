"""Threads that count their progress and stop on Ctrl-C. Reading, hashing and writing release Python's lock."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed

from tqdm import tqdm

Advance = Callable[[int], object]


def run(task: Callable, items: list, workers: int, bar: tqdm) -> list:
    """task(item, advance) of every item, by so many threads; returns the results in the order of the items.

    A task calls advance(count) now and then. It moves the bar, and ends the task once another task has failed.
    Raises: what a task raises; KeyboardInterrupt. No thread is at work then.
    """
    lock = threading.Lock()
    stop = threading.Event()

    def advance(count: int) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        with lock:
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
