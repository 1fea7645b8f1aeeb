"""Jobs that hang or lose their launcher: who is blamed, and that nothing stays behind."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import killing
import pytest
import torch
from conftest import ROOT, called, micro_run
from killing import Job
from run_files import count

from flux_ref.run.alive import HangWatch, judge


def told(beat: int, still: float, collectives: int, place: str = "the end of step 9", last: str = "") -> dict:
    """What a rank tells the others of itself."""
    own = {"beat": beat, "still": still, "collectives": collectives, "place": place, "last": last}
    return own | {"captured": False}


def judged(*ranks: tuple[dict, dict]) -> tuple[list[int], str] | None:
    """The verdict on (record before, record after) of each rank."""
    return judge(*zip(*ranks), 6.0)


WAITS = told(5, 7.0, 90), told(9, 9.0, 90, last="all_reduce of [[1]]")  # for a collective that has begun
FROZEN = told(3, 1.0, 80), told(3, 1.0, 80, "the end of step 7", "all_gather of [[6]]")
BEHIND = told(5, 7.0, 88), told(9, 9.0, 88, "validation batch 3 after step 8")


def test_a_rank_that_is_frozen_or_behind_is_blamed():
    waits = "the others wait in collective 90 (all_reduce of [[1]]) at the end of step 9"
    assert judged(WAITS, FROZEN) == (
        [1],
        "rank 1 hangs: frozen or gone, last seen at the end of step 7 after collective 80 (all_gather of [[6]]);"
        f" {waits}",
    )
    assert judged(WAITS, WAITS, BEHIND) == (
        [2],
        "rank 2 hangs: nothing has moved for 6 s, last seen at validation batch 3 after step 8 after collective 88;"
        f" {waits}",
    )
    assert judged(BEHIND, FROZEN, WAITS)[0] == [1], "a frozen rank is blamed before those that wait for it"
    blamed, message = judged(WAITS, FROZEN, FROZEN)
    assert blamed == [1, 2] and message.startswith("ranks 1, 2 hang: frozen or gone")


def test_a_hang_in_captured_steps_says_that_their_collectives_are_not_recorded():
    """Else the collective of the message, the exchange of signals before the replay, would be taken for the culprit."""
    note = "(all_reduce of [[1]]; replays of captured steps record none of their collectives) at the end of step 9"
    captured = tuple(record | {"captured": True} for record in WAITS)
    for others in ([captured], [FROZEN]):
        assert note in judged(captured, *others)[1] and note not in judged(WAITS, *others[:0], WAITS)[1]


def test_nobody_is_blamed_when_all_wait_in_the_same_place_or_one_moves():
    blamed, message = judged(WAITS, WAITS)
    assert blamed == [] and message.startswith("all ranks have waited 6 s in collective 90")
    assert "the network or a device hangs" in message
    moves = told(5, 7.0, 80), told(9, 0.2, 80)
    assert judged(WAITS, moves) is None and judged(moves, WAITS) is None


def test_a_rank_that_never_spoke_is_named_and_not_waited_for():
    watch = object.__new__(HangWatch)
    watch.store, watch.world = torch.distributed.HashStore(), SimpleNamespace(rank=0, size=2)
    watch.store.set("0", json.dumps(told(1, 9.0, 90)))
    before = watch._records()
    watch.store.set("0", json.dumps(told(5, 9.0, 90)))
    assert judge(before, watch._records(), 6.0)[0] == [1]


@pytest.fixture
def endless(shapes_dir, tmp_path) -> Callable:
    """endless(*overrides) starts a run by 2 ranks and returns it when it has done so many steps."""
    with contextlib.ExitStack() as stack:

        def start(*overrides: str, steps: int = 4) -> Job:
            argv = [*micro_run(shapes_dir, tmp_path / "run"), "--train.max_samples=1200000", "--eval.every_samples=96"]
            options = ("--train.log_every_samples=12", "--checkpoint.every_samples=72", *overrides)
            job = stack.enter_context(Job(tmp_path / "log", "train.py", *argv, *options))
            assert job.until(lambda: count(tmp_path / "run" / "metrics.jsonl") >= steps), job.said
            assert job.until(lambda: len(job.ranks()) == 2), job.said
            return job

        yield start


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 4])
def test_ranks_whose_launcher_was_killed_end_by_themselves(endless, steps):
    """Also before they have found each other."""
    job = endless("--run.hang_s=20", steps=steps)
    job.process.kill()
    assert job.gone(timeout=20), "they would hold memory, devices and the run's folder"


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.nightly)])
def test_a_rank_that_freezes_is_named_and_the_job_ends(endless, rank):
    """torchrun gives a rank 30 s to end before it kills it, and a frozen one uses them."""
    job = endless("--run.hang_s=6")
    begin = time.monotonic()
    killing.send(job.ranks()[rank], signal.SIGSTOP)
    assert job.wait(timeout=60) != 0
    print(f"ended after {time.monotonic() - begin:.1f} s")
    assert job.gone(timeout=5)
    (line,) = re.findall(r"train\.py: (rank \d+ hangs[^\r\n]*)", job.said)
    place = r"(start-up|the end of step \d+|validation batch \d+ after step \d+)"
    last = rf"rank {rank} hangs: frozen or gone, last seen at {place} after collective \d+.*;"
    assert re.fullmatch(rf"{last} the others wait in collective \d+ \([^()]+ of \[.*\]\) at {place}", line), line


LOCKED = """
import ctypes, sys, time
from flux_ref import config, ranks
from flux_ref.run import alive, cli
world = ranks.start(config.ParallelConfig())
watch = alive.HangWatch("train.py", world, ranks.groups(world), 1.0)
if sys.argv[1] == "closed":
    watch.close()
time.sleep(0.5)
ctypes.PyDLL(None).sleep(6)  # holds Python's lock
cli.leave(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("state, code", [("watched", 1), ("closed", 0)])
def test_a_process_whose_interpreter_is_locked_ends_and_shows_where(state, code):
    done = subprocess.run([sys.executable, "-c", LOCKED, state], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert ('File "<string>", line 10' in done.stderr) == (code == 1), done.stderr


@pytest.mark.slow
def test_a_rank_that_freezes_in_an_evaluation_is_named(shapes_dir, tmp_path):
    run = tmp_path / "run"
    assert called("train.py", *micro_run(shapes_dir, run, "--train.max_samples=12")) == 0
    endless = ("--run.hang_s=6", "--prompt=a small red circle", "--sample.steps=1000000")
    with Job(tmp_path / "log", "eval.py", run, *endless) as job:
        assert job.until(lambda: "mean" in job.said), job.said
        time.sleep(2)  # several periods of the watch
        killing.send(job.ranks()[1], signal.SIGSTOP)
        assert job.wait(timeout=60) != 0
    assert re.search(r"eval\.py: rank 1 hangs: frozen or gone, last seen at sampling step \d+ after", job.said), (
        job.said
    )
