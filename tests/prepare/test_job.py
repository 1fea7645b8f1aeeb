"""What the commands of tools.prepare share."""

import time

import pytest
from tqdm import tqdm

from flux_ref.errors import Fault
from tools.prepare import job


def test_an_error_of_one_thread_ends_the_others():
    finished = []

    def task(item: int, advance: job.Advance) -> None:
        if item:
            raise Fault("broken")
        for _ in range(500):
            advance(1)
            time.sleep(0.01)
        finished.append(item)

    with pytest.raises(Fault):
        job.each(task, [0, 1], 2, tqdm(disable=True))
    assert not finished
