"""A run that is killed again and again, at any moment, ends bit for bit like one that was left alone.

One rank is killed, or all of them, or their launcher; while they start, train, save or evaluate. After every kill
each checkpoint that bears the name of one is whole, and the next attempt goes on from the newest of them.
"""

import random
import re
import time
from collections import Counter
from pathlib import Path
from signal import SIGKILL

import killing
import pytest
from conftest import MICRO, data_overrides
from killing import Job, require_equal_runs, send, verified

VICTIMS = ("one rank", "all ranks", "launcher")
MOMENTS = ("save", "start-up", "step", "evaluation")
EVERY = 3  # steps between checkpoints
EVALUATE = 7  # steps between evaluations
FIXED = (
    *("--model.double_blocks=1", "--model.single_blocks=1", "--train.log_every_samples=12"),
    *(f"--checkpoint.every_samples={12 * EVERY}", f"--eval.every_samples={12 * EVALUATE}"),
    *("--checkpoint.keep=2", "--checkpoint.keep_every=10", "--run.hang_s=20"),
)


class Siege:
    """One run, the kills it has suffered and what was found after them."""

    def __init__(self, folder: Path, data: Path, steps: int, seed: int):
        self.folder, self.run, self.log = folder, folder / "run", folder / "log"
        self.argv = [MICRO, f"--run.dir={self.run}", *data_overrides(data), f"--train.max_samples={12 * steps}", *FIXED]
        self.rng, self.counts = random.Random(seed), Counter()
        self.job: Job | None = None
        self.newest = [0]  # whole checkpoint at the last kill, and whether the job was gone by then

    # What the run says

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def begun(self) -> int:
        """How many attempts have come as far as training."""
        return self._events("run_start")

    def _events(self, key: str) -> int:
        path = self.run / "result_0.txt"
        return path.read_text().count(f'"key": "{key}"') if path.exists() else 0

    def resumed(self) -> list[int]:
        """The steps from which attempts have gone on."""
        return [int(step.replace(",", "")) for step in re.findall(r"resume .* from step ([\d,]+)", self.said())]

    def saving(self) -> bool:
        """Whether a save is in flight, or was when its writers died."""
        return any(not path.name.endswith(".deleted") for path in (self.run / "checkpoints").glob(".step_*"))

    # Kills

    def ended(self) -> bool:
        return self.job is None or self.job.process.poll() is not None

    def start(self) -> None:
        if self.ended():
            self.job = Job(self.log, "train.py", *self.argv, restarts=1000)

    def wait_for(self, moment: str, begun: int) -> bool:
        """Wait for a moment of the attempt that follows the first `begun`; False if the run ended before."""
        if moment == "start-up":
            deadline = time.monotonic() + self.rng.uniform(0.2, 4.0)
            self.job.until(lambda: time.monotonic() > deadline or self.begun() > begun)
            return not self.ended()
        if not self.job.until(lambda: self.begun() > begun):
            return False
        evaluations, trained = self._events("eval_start"), killing.count(self.run / "metrics.jsonl")
        more = self.rng.randint(1, EVERY + 1)
        came = {
            "step": lambda: killing.count(self.run / "metrics.jsonl") >= trained + more,
            "save": self.saving,
            "evaluation": lambda: self._events("eval_start") > evaluations,
        }
        if not self.job.until(came[moment]):
            return False
        time.sleep(self.rng.uniform(0, 0.02))
        return not self.ended()

    def strike(self, victim: str) -> None:
        """Kill, and see what is left."""
        ranks = list(self.job.ranks().values())
        if victim == "launcher":
            self.job.process.kill()
        elif victim == "all ranks":
            self.job.process.kill()
            for pid in ranks:
                send(pid, SIGKILL)
        elif ranks:
            send(self.rng.choice(ranks), SIGKILL)
        self.counts["hit a save in flight"] += self.saving()
        if victim != "one rank":
            self.job.process.wait()
            assert self.job.gone(timeout=20), f"ranks outlive their launcher:\n{self.said()[-3000:]}"
        self.newest = max(verified(self.run), default=0)

    def besiege(self, kills: int) -> None:
        """Kill so many times, then let the run end."""
        for number in range(kills):
            begun = self.begun()
