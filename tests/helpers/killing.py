"""Runs that are stopped or killed from outside, and a train.py that writes down what it trains on.

    torchrun tests/helpers/killing.py RECORDS arguments of train.py ...

trains like train.py and leaves in the folder RECORDS, per rank, a checksum of each sample of each step. With
SIGNAL="step 10 SIGTERM" the last rank sends itself that signal before step 10; with "evaluation 96 ..." when the
evaluation after 96 samples begins. SIGINT goes to torchrun, as Ctrl-C does.
"""

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import torch
from conftest import PYTHONPATH, ROOT, micro_run
from run_files import lines

from flux_ref import cli
from flux_ref.trainer import Trainer

sys.path.insert(0, str(ROOT))
import train

TOKEN = "FLUX_REF_TEST_JOB"
POLL_S = 0.005
LONG = (  # 24 steps, evaluations after 8, 16 and 24, a checkpoint after every sixth
    *("--train.max_samples=288", "--eval.every_samples=96", "--checkpoint.every_samples=72"),
    *("--train.log_every_samples=12", "--run.watchdog_s=20", "--eval.batch=8"),
)


class Job:
    """A script under torchrun, or plain python with ranks=0, that runs beside the tests."""

    def __init__(self, log, path, *args, ranks=2, restarts=0, **env):
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
    def said(self):
        return self.log.read_text(encoding="utf-8", errors="replace")

    def environments(self):
        """{process: its environment} of this job, the launcher's children too; also those that have lost it."""
        return environments({TOKEN: self.token})

    def alive(self):
        return list(self.environments())

    def ranks(self):
        """{rank: process}"""
        return {int(env["RANK"]): pid for pid, env in self.environments().items() if "LOCAL_RANK" in env}

    def until(self, condition, timeout=180):
        """Wait for something, or for the end of the job; returns whether the former came."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None:
                return bool(condition())
            assert time.monotonic() < deadline, f"after {timeout} s:\n{self.said[-4000:]}"
            time.sleep(POLL_S)
        return True

    def wait(self, timeout=120):
        """The exit code of the launcher."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"after {timeout} s:\n{self.said[-4000:]}") from None

    def gone(self, timeout, pids=None):
        """Whether all these processes, or every one of the job, have ended, after waiting for that."""
        deadline = time.monotonic() + timeout
        while alive := set(self.alive()):
            if pids is not None and not alive & set(pids):
                break
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Leave nothing behind."""
        while pids := self.alive():
            for pid in pids:
                send(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(POLL_S)
        self.process.wait()


def environments(having):
    """{process: its environment} of every living process with these environment variables."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
            env = dict(entry.split("=", 1) for entry in entries if "=" in entry)
            if having.items() <= env.items():
                found[int(folder.name)] = env
    return found


def send(pid, number):
    """Send a signal, if the process is there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def launch(folder, data, ranks=2, plan=""):
    """Train the LONG run in folder/run, struck as planned; returns the exit code and the log.

    What is trained on is written to folder/records.
    """
    records = folder / "records"
    records.mkdir(parents=True, exist_ok=True)
    log = folder / f"log_{len(list(folder.glob('log_*')))}"
    argv = micro_run(data, folder / "run", *LONG)
    with Job(log, "tests/helpers/killing.py", records, *argv, ranks=ranks, SIGNAL=plan) as job:
        return job.wait(), job.said


def install(folder, plan, replace=setattr):
    """Write down in a folder what runs train on from here on, and send the planned signal.

    replace: as monkeypatch.setattr.
    """
    place, at, name = (plan or "never 0 SIGTERM").split()
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    plain_step, plain_loss = Trainer.step, train.validation_loss

    def strike(here, number):
        if (here, number, rank) == (place, int(at), size - 1):
            os.kill(os.getppid() if name == "SIGINT" and size > 1 else os.getpid(), signal.Signals[name])

    def step(steps, feed):
        number = steps.state.step
        strike("step", number)
        if place == "step" and number >= int(at):
            time.sleep(0.02)  # the other ranks hear of it; the run is short
        plain_step(steps, feed)
        batch = [tensor.reshape(len(tensor), -1).view(torch.uint8).numpy() for tensor in steps.train_batch.values()]
        rows = [zlib.crc32(b"".join(part.tobytes() for part in row)) for row in zip(*batch)]
        with (folder / f"rank_{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": number, "rows": rows}) + "\n")

    def loss(steps, val, samples, *args):
        strike("evaluation", samples)
        return plain_loss(steps, val, samples, *args)

    replace(Trainer, "step", step)
    replace(train, "validation_loss", loss)


def trained_on(folder):
    """(step, checksums of its samples in global order) in the order of training, whatever the number of ranks."""
    ranks = []
    for path in sorted(folder.glob("rank_*.jsonl")):
        records = lines(folder, path.name)
        ranks.append({record["step"]: record["rows"] for record in records})
        assert len(ranks[-1]) == len(records), f"{path}: a step was trained twice"
    return [(step, [row for rank in ranks for row in rank.get(step, [])]) for step in ranks[0]]


def main(folder, *argv):
    install(Path(folder), os.environ.get("SIGNAL", ""))
    return cli.run("train.py", train.main, list(argv))


if __name__ == "__main__":
    cli.exit_now(main(*sys.argv[1:]))
