"""A run that is killed again and again, at any moment, ends bit for bit like one that was left alone.

One rank is killed, or all and their launcher, or the launcher alone; while they start, train or save. After every kill
each checkpoint that bears the name of one is whole. The same command goes on if the launcher is gone.
"""

import random
import time
from contextlib import ExitStack
from pathlib import Path
from signal import SIGKILL

import pytest
from conftest import micro_run
from killing import Job, send
from run_files import count, require_equal_runs, tensors_of

from flux_ref import checkpoint
from flux_ref.files import PARTIAL

VICTIMS = ("one rank", "everything", "launcher")
MOMENTS = ("save", "start-up", "step", "save")
KILLS, STEPS_PER_KILL = 50, 20  # more than an attempt gets on, or the run would be over too soon
FIXED = (
    *("--model.double_blocks=1", "--model.single_blocks=1", "--train.log_every_samples=12", "--run.watchdog_s=10"),
    *("--eval.every_samples=84", "--checkpoint.every_samples=36"),
)


def wait_for(moment, job, run, rng):
    """Wait for a moment of the next attempt."""
    trained = count(run / "metrics.jsonl")
    end = time.monotonic() + rng.uniform(0.2, 4.0)
    steps = rng.randint(1, 4)
    came = {
        "start-up": lambda: time.monotonic() > end,
        "step": lambda: count(run / "metrics.jsonl") >= trained + steps,
        "save": lambda: is_saving(run),
    }
    if moment == "save":  # not what the last kill has left of a save
        job.until(lambda: len(job.ranks()) == 2 and not is_saving(run))
    assert job.until(came[moment]), f"the run was over too soon:\n{job.said[-2000:]}"
    time.sleep(rng.uniform(0, 0.1 if moment == "save" else 0.02))


def is_saving(run):
    """Whether a save is in flight, or was when those died who wrote it."""
    return any(not path.name.endswith(".deleted") for path in (run / "checkpoints").glob(".step_*"))


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_run_that_is_killed_fifty_times_ends_like_one_that_was_left_alone(shapes_dir, tmp_path):
    rng, run, calm, caught = random.Random(1), tmp_path / "run", tmp_path / "calm", 0
    argv = [f"--train.max_samples={12 * STEPS_PER_KILL * KILLS}", *FIXED]

    with ExitStack() as stack:

        def start(place):
            own = micro_run(shapes_dir, place, *argv)
            return stack.enter_context(Job(Path(f"{place}.log"), "train.py", *own, restarts=1000))

        job = start(run)
        for number in range(KILLS):
            wait_for(MOMENTS[number % len(MOMENTS)], job, run, rng)
            victim = VICTIMS[number % len(VICTIMS)]
            job.until(lambda is_one=victim == "one rank", job=job: len(job.ranks()) == 2 or not is_one)
            ranks = list(job.ranks().values())
            for pid in [] if victim == "launcher" else ranks[: 1 if victim == "one rank" else 2]:
                send(pid, SIGKILL)
            if victim != "one rank":
                job.process.kill()
            caught += is_saving(run)
            assert job.gone(timeout=60, pids=ranks), f"ranks outlive the kill of {victim}:\n{job.said[-2000:]}"
            for path in checkpoint.list_checkpoints(run):
                assert tensors_of(path)
            if victim != "one rank":
                job.process.wait()
                job = start(run)
        for one in (job, start(calm)):
            assert one.wait(timeout=600) == 0, one.said[-4000:]
    require_equal_runs(run, calm)
    for places in ("*", "checkpoints/*"):
        every = ([path.name for path in place.glob(places)] for place in (run, calm))
        names = [sorted(name for name in found if not name.endswith(PARTIAL)) for found in every]  # see the guide
        assert names[0] == names[1]
    assert caught > 5, "of 25 kills that wait for a save; some saves end first"
