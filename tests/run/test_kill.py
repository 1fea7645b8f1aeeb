"""A run that is killed again and again, at any moment, ends bit for bit like one that was left alone.

One rank is killed, or all and their launcher, or the launcher alone; while they start, train, save or evaluate. After
every kill each checkpoint that bears the name of one is whole, and the next attempt goes on from the newest of them.
"""

import random
import re
import time
from collections import Counter
from pathlib import Path
from signal import SIGKILL

import pytest
from conftest import micro_run
from killing import Job, send, verified
from run_files import column, count, require_equal_runs

VICTIMS = ("one rank", "everything", "launcher")
MOMENTS = ("save", "start-up", "step", "evaluation")
EVERY, EVALUATE = 3, 7  # steps between checkpoints and between evaluations
STEPS_PER_KILL = 20  # more than an attempt gets on, or the run would be over too soon
FIXED = (
    *("--model.double_blocks=1", "--model.single_blocks=1", "--train.log_every_samples=12", "--run.hang_s=10"),
    *(f"--eval.every_samples={12 * EVALUATE}", f"--checkpoint.every_samples={12 * EVERY}"),
)


class Siege:
    """One run, the kills it has suffered and what was left after them."""

    def __init__(self, folder: Path, data: Path, steps: int, seed: int):
        self.run, self.log = folder / "run", folder / "log"
        self.argv = micro_run(data, self.run, f"--train.max_samples={12 * steps}", *FIXED)
        self.rng, self.counts = random.Random(seed), Counter()
        self.newest = self.attempts = self.resumes = 0  # as of the last kill
        self.job = None

    # What the run says

    def started(self, what: str = "run") -> int:
        """How many attempts have come as far as training, or how many evaluations have begun."""
        log = self.run / "result_0.txt"
        return log.read_text().count(f'"key": "{what}_start"') if log.exists() else 0

    def resumed(self) -> list[int]:
        """The steps from which attempts have gone on."""
        found = re.findall(r"resume  the run in this folder, from step ([\d,]+) ", self.log.read_text(errors="replace"))
        return [int(step.replace(",", "")) for step in found]

    def trained(self) -> int:
        return count(self.run / "metrics.jsonl")

    def saving(self) -> bool:
        """Whether a save is in flight, or was when those died who wrote it."""
        return any(not path.name.endswith(".deleted") for path in (self.run / "checkpoints").glob(".step_*"))

    # Kills

    def go_on(self) -> Job:
        """The job; the same command is given again if its launcher is gone."""
        if self.job is None or self.job.process.poll() is not None:
            self.job = Job(self.log, "train.py", *self.argv, restarts=1000)
            self.counts["commands"] += 1
        return self.job

    def wait_for(self, moment: str) -> bool:
        """Wait for a moment of the next attempt; False if the run ended before."""
        job = self.go_on()
        if moment == "start-up":
            end = time.monotonic() + self.rng.uniform(0.2, 4.0)
            return job.until(lambda: time.monotonic() > end or self.started() > self.attempts)
        if not job.until(lambda: self.started() > self.attempts):
            return False
        self.require_newest()
        trained, evaluations, steps = self.trained(), self.started("eval"), self.rng.randint(1, EVERY + 1)
        came = {
            "step": lambda: self.trained() >= trained + steps,
            "save": self.saving,
            "evaluation": lambda: self.started("eval") > evaluations,
        }
        found = job.until(came[moment])
        time.sleep(self.rng.uniform(0, 0.1 if moment == "save" else 0.02))
        return found

    def require_newest(self) -> None:
        """The attempt that has just begun is the only one since the last kill, and takes up what that has left."""
        resumed = self.resumed()[self.resumes :]
        assert self.started() - self.attempts == 1 and len(resumed) <= 1, "an attempt failed by itself"
        assert sum(resumed) == self.newest, "not the newest whole checkpoint"

    def strike(self, victim: str) -> None:
        """Kill, and look at what is left when all are gone whom that takes with it."""
        if victim == "one rank":
            self.job.until(lambda: len(self.job.ranks()) == 2)
        ranks = list(self.job.ranks().values())
        for pid in self.rng.sample(ranks, 1) if victim == "one rank" else ranks if victim == "everything" else []:
            send(pid, SIGKILL)
        if victim != "one rank":
            self.job.process.kill()
        self.counts["save in flight"] += self.saving()
        assert self.job.gone(timeout=15, pids=ranks), f"ranks outlive the kill of {victim}:\n{self.job.said[-2000:]}"
        if victim != "one rank":
            self.job.process.wait()
        self.newest = max(verified(self.run), default=0)
        self.attempts, self.resumes = self.started(), len(self.resumed())

    def besiege(self, kills: int) -> None:
        """Kill so many times, then let the run end."""
        for number in range(kills):
            victim, moment = VICTIMS[number % len(VICTIMS)], MOMENTS[number % len(MOMENTS)]
            assert self.wait_for(moment), f"the run was over after {number} kills:\n{self.job.said[-2000:]}"
            self.strike(victim)
            self.counts.update((victim, moment))
        assert self.go_on().wait(timeout=600) == 0, self.job.said[-4000:]


def endure(data: Path, folder: Path, kills: int, seed: int) -> Counter:
    """Besiege a run and compare it with one that was left alone; returns how often what was hit."""
    siege, calm = (Siege(folder / name, data, STEPS_PER_KILL * kills, seed) for name in ("siege", "calm"))
    for side in (siege, calm):
        side.run.parent.mkdir()
    try:
        calm.besiege(0)
        begin = time.monotonic()
        siege.besiege(kills)
    finally:
        for side in (siege, calm):
            if side.job is not None:
                side.job.kill()
    require_equal_runs(siege.run, calm.run)
    assert column(siege.run, "step") == list(range(1, STEPS_PER_KILL * kills + 1))
    assert sorted(path.name for path in siege.run.iterdir()) == sorted(path.name for path in calm.run.iterdir())
    assert not siege.saving()
    siege.counts["resumed"] = len(siege.resumed())
    siege.counts["seconds"] = round(time.monotonic() - begin)
    return siege.counts


@pytest.mark.slow
def test_a_run_that_is_killed_four_times_ends_like_one_that_was_left_alone(shapes_dir, tmp_path):
    """Every victim, and every moment once."""
    counts = endure(shapes_dir, tmp_path, kills=4, seed=0)
    assert all(counts[name] for name in VICTIMS) and [counts[name] for name in MOMENTS] == [1] * 4


@pytest.mark.nightly
@pytest.mark.timeout(2400)
def test_a_run_that_is_killed_a_hundred_times_ends_like_one_that_was_left_alone(shapes_dir, tmp_path, capsys):
    counts = endure(shapes_dir, tmp_path, kills=100, seed=1)
    with capsys.disabled():
        print(f"\n{dict(counts)}")
    assert counts["save in flight"] > 10, "of 25 kills that wait for a save; some saves end first"
