"""Hangs, pauses, signals and a launcher that dies: what ends, what is said, and what goes on."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import killing
import pytest
from conftest import ROOT, micro_run
from killing import Job
from run_files import count, newest

from flux_ref import alive
from flux_ref.alive import Alive, Timer


class Clock:
    """A monotonic clock and an event whose waits take as long as `late` says, or the period."""

    def __init__(self, late: dict[int, float]):
        self.now, self.tick, self.late, self.most = 0.0, 0, late, 200

    def monotonic(self) -> float:
        return self.now

    def wait(self, period: float) -> bool:
        self.now += self.late.get(self.tick, period)
        self.tick += 1
        return self.tick > self.most


def ended(monkeypatch, limit_s: float, late: dict[int, float], marks: set[int] = frozenset()) -> float | None:
    """When a timer of limit_s ends its rank, in s; None if it never does. late: {tick: how long its wait takes}."""
    clock, timer, end = Clock(late), object.__new__(Timer), []
    monkeypatch.setattr(alive, "time", clock)
    timer.limit_s, timer.place, timer.marks, timer.launcher, timer.closed = limit_s, "here", 0, None, clock

    def leave(reason: str) -> None:
        end.append(clock.now)
        clock.most = 0

    timer._end, timer.stuck = leave, lambda: "stuck"
    wait = clock.wait

    def marked(period: float) -> bool:
        if clock.tick in marks:
            timer.mark("there")
        return wait(period)

    clock.wait = marked
    timer._run()
    return end[0] if end else None


def test_only_time_in_which_the_process_ran_counts(monkeypatch):
    assert 10 < ended(monkeypatch, 10.0, {}) <= 11.0
    assert ended(monkeypatch, 0.0, {}) is None, "0 is no limit"
    assert ended(monkeypatch, 10.0, {}, marks=set(range(0, 200, 9))) is None, "each mark is progress"
    for pause in (5.0, 20.0, 50.0, 200.0):
        assert ended(monkeypatch, 10.0, {5: pause}, marks={15, 30, *range(40, 200, 9)}) is None, pause
        assert 10 + pause - 1 < ended(monkeypatch, 10.0, {5: pause}) <= 11 + pause


def test_a_stuck_rank_names_its_line_and_that_it_compiles(tmp_path):
    timer = Timer("train.py", 7.0)
    with timer:
        timer.mark("the end of step 9")
        assert re.match(r"no progress for 7 s since the end of step 9, now at flux_ref/alive.py:\d+;", timer.stuck())
        compiler = tmp_path / "torch" / "_inductor" / "compile_fx.py"
        compiler.parent.mkdir(parents=True)
        begun, done = threading.Event(), threading.Event()
        code = compile("def work():\n    begun.set()\n    done.wait()\n", str(compiler), "exec")
        exec(code, names := {"begun": begun, "done": done})
        threading.Thread(target=names["work"]).start()  # a backward pass compiles in a thread of its own
        begun.wait()
        try:
            assert "torch compiles; a greater run.hang_s gives it more time" in timer.stuck()
        finally:
            done.set()


def test_what_is_a_second_ctrl_c(monkeypatch, capfd):
    """torchrun sends SIGTERM for it, and may pass on the first one late. Some launchers send the first one twice."""
    end, now = [], [0.0]
    monkeypatch.setattr(os, "_exit", end.append)
    monkeypatch.setattr(alive, "time", SimpleNamespace(monotonic=lambda: now[0]))
    cases = (  # under torchrun; the signal after Ctrl-C, how long after it in s; whether the rank ends
        (False, signal.SIGINT, 0.1, False),
        (False, signal.SIGINT, 1.0, True),
        (False, signal.SIGTERM, 1.0, True),
        (False, signal.SIGUSR1, 1.0, False),
        (True, signal.SIGINT, 1.0, False),
        (True, signal.SIGTERM, 1.0, True),
    )
    for is_launched, number, after_s, ends in cases:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if is_launched:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "id")
        watcher = object.__new__(Alive)
        watcher.signal = signal.SIGTERM
        now[0] = 0.0
        watcher._take(signal.SIGINT, None)
        now[0] = after_s
        watcher._take(number, None)
        assert (end, watcher.signal) == ([130] * ends, signal.SIGINT), (is_launched, number, after_s)
        assert capfd.readouterr().err == alive.NOTICE.decode()
        end.clear()


ENDLESS = ("--train.max_samples=1200000", "--eval.every_samples=96", "--checkpoint.every_samples=72")


@pytest.fixture
def endless(shapes_dir, tmp_path) -> Callable:
    """endless(*overrides) starts a run by 2 ranks and returns it when it has done so many steps."""
    with contextlib.ExitStack() as stack:

        def start(*overrides: str, steps: int = 4, ranks: int = 2) -> Job:
            argv = [*micro_run(shapes_dir, tmp_path / "run"), *ENDLESS, "--train.log_every_samples=12", *overrides]
            job = stack.enter_context(Job(tmp_path / "log", "train.py", *argv, ranks=ranks))
            assert job.until(lambda: count(tmp_path / "run" / "metrics.jsonl") >= steps), job.said
            assert job.until(lambda: len(job.ranks()) == ranks), job.said
            return job

        yield start


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 4])
def test_ranks_whose_launcher_was_killed_end_by_themselves(endless, steps):
    """Also before they have found each other."""
    job = endless("--run.hang_s=20", steps=steps)
    job.process.kill()
    assert job.gone(timeout=60), "they would hold memory, devices and the run's folder"


@pytest.mark.slow
def test_a_rank_that_freezes_ends_the_job_and_the_other_one_says_where_it_waits(endless):
    """torchrun gives a rank 30 s to end before it kills it, and a frozen one uses them."""
    job = endless("--run.hang_s=8")
    killing.send(job.ranks()[1], signal.SIGSTOP)
    assert job.wait(timeout=90) != 0 and job.gone(timeout=5)
    (line,) = re.findall(r"train\.py: rank 0 on \S+: (no progress [^\r\n]*)", job.said)
    assert re.match(r"no progress for 8 s since .*, now at \S+\.py:\d+; the last recorded collective is number", line)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_pause_of_the_whole_job_is_no_hang(endless, tmp_path, ranks):
    job = endless("--run.hang_s=8", ranks=ranks)
    everyone = job.alive()
    for pid in everyone:
        killing.send(pid, signal.SIGSTOP)
    time.sleep(20)
    steps = count(tmp_path / "run" / "metrics.jsonl")
    for pid in everyone:
        killing.send(pid, signal.SIGCONT)
    assert job.until(lambda: count(tmp_path / "run" / "metrics.jsonl") > steps + 4), job.said
    assert "no progress" not in job.said


@pytest.mark.slow
def test_signals_of_terminals_and_launchers_save_and_end_the_run_unless_ignored(shapes_dir, tmp_path):
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP", "SIGQUIT"):
        run = tmp_path / name
        argv = micro_run(shapes_dir, run, *ENDLESS, "--checkpoint.every_samples=0", "--train.log_every_samples=12")
        with Job(tmp_path / f"{name}.log", "train.py", *argv, ranks=0) as job:
            assert job.until(lambda run=run: count(run / "metrics.jsonl") >= 3), job.said
            job.process.send_signal(signal.Signals[name])
            assert job.wait() == 128 + signal.Signals[name], job.said
        assert f"stopped by {name} after step {newest(run).info['step']}" in job.said
    ignored = f"trap '' HUP; exec {sys.executable} {ROOT / 'train.py'} " + " ".join(
        micro_run(shapes_dir, tmp_path / "nohup", "--train.max_samples=2400", "--train.log_every_samples=12")
    )
    process = subprocess.Popen(["bash", "-c", ignored], cwd=ROOT, stdout=subprocess.DEVNULL)
    while count(tmp_path / "nohup" / "metrics.jsonl") < 3 and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 0
