"""What the tests share is made once."""

import threading
from concurrent.futures import ThreadPoolExecutor


def test_a_shared_folder_is_filled_once_though_two_ask_for_it_at_a_time(shared):
    """The second opens the lock while its file is still empty."""
    filled, started = [], threading.Event()

    def fill(folder) -> None:
        filled.append(folder)
        started.set()
        second.append(pool.submit(shared, "asked for twice", fill))
        threading.Event().wait(0.3)  # meanwhile the second waits for the lock
        folder.mkdir()

    second = []
    with ThreadPoolExecutor() as pool:
        first = pool.submit(shared, "asked for twice", fill).result()
        assert second[0].result() == first
    assert filled == [first] and first.is_dir()
