"""Runs that are stopped or killed from outside, and a train.py that writes down what it trains on.

    torchrun tests/helpers/killing.py RECORDS arguments of train.py ...

trains like train.py and leaves in the folder RECORDS, per rank, a checksum of each sample of each step and the exit
code. With SIGNAL="step 10 SIGTERM launcher" the last rank sends that signal before step 10, to its launcher or to
itself; with "evaluation 240 ..." when the evaluation after 240 samples begins.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from conftest import PYTHONPATH, ROOT, micro_run
from run_files import lines, verify

from flux_ref import checkpoint, errors
from flux_ref.errors import Refusal
from flux_ref.step_runner import StepRunner

sys.path.insert(0, str(ROOT))
import train

TOKEN = "FLUX_REF_TEST_JOB"
POLL_S = 0.005
LONG = (  # 24 steps, evaluations after 8, 16 and 24, a checkpoint after every sixth
    *("--train.max_samples=288", "--eval.every_samples=96", "--checkpoint.every_samples=72"),
    *("--train.log_every_samples=12", "--run.hang_s=20"),
)


class Job:
    """A script under torchrun, or plain python with ranks=0, that runs beside the tests."""

    def __init__(self, log: Path, path: str, *args: object, ranks: int = 2, restarts: int = 0, **env: str):
        """log: receives everything it prints."""
        self.log, self.token = log, secrets.token_hex(8)
        launcher = [sys.executable]
        if ranks:
            launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            launcher += [f"--max-restarts={restarts}", "--monitor-interval=0.05"]
        own = {TOKEN: self.token, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH, **env}
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [*launcher, str(ROOT / path), *map(str, args)],
                cwd=ROOT,
                env=os.environ | own,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def alive(self) -> list[int]:
        """All processes of this job, the launcher's children too; also those that have lost their launcher."""
        return [pid for pid, env in environments() if env.get(TOKEN) == self.token]

    def ranks(self) -> dict[int, int]:
        """{rank: process}"""
        own = ((pid, env) for pid, env in environments() if env.get(TOKEN) == self.token and "LOCAL_RANK" in env)
        return {int(env["RANK"]): pid for pid, env in own}

    def until(self, condition: Callable[[], object], timeout: float = 180) -> bool:
        """Wait for something, or for the end of the job; returns whether the former came."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None:
                return bool(condition())
            assert time.monotonic() < deadline, f"after {timeout} s:\n{self.said[-4000:]}"
            time.sleep(POLL_S)
        return True

    def wait(self, timeout: float = 120) -> int:
        """The exit code of the launcher."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"after {timeout} s:\n{self.said[-4000:]}") from None

    def gone(self, timeout: float, pids: Iterable[int] | None = None) -> bool:
        """Whether all these processes, or every one of the job, have ended, after waiting for that."""
        deadline = time.monotonic() + timeout
        while set(self.alive()) & set(self.alive() if pids is None else pids):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def kill(self) -> None:
        """Leave nothing behind."""
        while pids := self.alive():
            for pid in pids:
                send(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(POLL_S)
        self.process.wait()

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_) -> None:
        self.kill()


def launch(folder: Path, data: Path, ranks: int = 2, plan: str = "") -> tuple[int, str]:
    """Train the LONG run in folder/run, struck as planned; returns the exit code and the log.

    What is trained on is written to folder/records.
    """
    records = folder / "records"
    records.mkdir(parents=True, exist_ok=True)
    log = folder / f"log_{len(list(folder.glob('log_*')))}"
    argv = micro_run(data, folder / "run", *LONG)
    with Job(log, "tests/helpers/killing.py", records, *argv, ranks=ranks, SIGNAL=plan) as job:
        return job.wait(), job.said


def environments() -> Iterable[tuple[int, dict[str, str]]]:
    """(process, its environment) of every living process of ours."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        yield int(folder.name), dict(entry.split("=", 1) for entry in entries if "=" in entry)


def send(pid: int, number: int) -> bool:
    """Send a signal; returns whether the process was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def verified(run: Path) -> list[int]:
    """Steps of the checkpoints of a run, after reading all of each; one that is deleted meanwhile does not count."""
    steps = []
    for path in checkpoint.list_checkpoints(run):
        try:
            verify(path)
            steps.append(checkpoint.step_of(path))
        except (Refusal, OSError):
            assert not path.exists(), f"{path} is not whole"
    return steps


def recorder(folder: Path, plan: str = "") -> dict[tuple[object, str], Callable]:
    """Stand-ins for functions of a run that write down what is trained on and send the planned signal."""
    place, at, name, victim = (plan or "never 0 SIGTERM self").split()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    train_step, validation_loss = StepRunner.step, train.validation_loss

    def strike() -> None:
        if rank == size - 1:
            os.kill({"self": os.getpid(), "launcher": os.getppid()}[victim], signal.Signals[name])

    def recorded_step(steps):
        step = steps.state.step
        if place == "step" and step == int(at):
            strike()
        if place == "step" and step >= int(at):
            time.sleep(0.02)  # the signal travels; the run is short
        rows = [zlib.crc32(b"".join(part.numpy().tobytes() for part in row)) for row in rows_of(steps.train_batch)]
        with (folder / f"rank_{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "rows": rows}) + "\n")
        return train_step(steps)

    def struck_loss(steps, val, samples, *args):
        if place == "evaluation" and samples == int(at):
            strike()
        return validation_loss(steps, val, samples, *args)

    return {(StepRunner, "step"): recorded_step, (train, "validation_loss"): struck_loss}


def rows_of(batch: dict[str, torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """The rows of a batch, each as the bits of all its tensors."""
    return zip(*(tensor.reshape(len(tensor), -1).view(torch.uint8) for tensor in batch.values()))


def trained_on(folder: Path) -> list[tuple[int, list[int]]]:
    """(step, checksums of its samples in global order) in the order of training, whatever the number of ranks."""
    ranks = []
    for path in sorted(folder.glob("rank_*.jsonl")):
        records = lines(folder, path.name)
        ranks.append({record["step"]: record["rows"] for record in records})
        assert len(ranks[-1]) == len(records), f"{path}: a step was trained twice"
    return [(step, [row for rank in ranks for row in rank.get(step, [])]) for step in ranks[0]]


def main(folder: str, *argv: str) -> int:
    folder = Path(folder)
    for (module, name), stand_in in recorder(folder, os.environ.get("SIGNAL", "")).items():
        setattr(module, name, stand_in)
    code = errors.run("train.py", train.main, list(argv))
    with (folder / "exit_codes.jsonl").open("a") as file:
        file.write(json.dumps({"rank": int(os.environ.get("RANK", 0)), "code": code}) + "\n")
    return code


if __name__ == "__main__":
    errors.leave(main(*sys.argv[1:]))
