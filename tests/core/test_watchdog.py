"""Hangs, pauses, signals and a launcher that dies: what ends, what is said, and what goes on."""

import contextlib
import json
import os
import re
import signal
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist
from conftest import micro_run, script
from killing import Job, send
from run_files import count, newest

from flux_ref import cli, ranks, watchdog
from flux_ref.watchdog import Watchdog


def ended(monkeypatch, limit_s, late, marks=frozenset()):
    """When a timer of limit_s ends its rank, in s; None if it never does. late: {tick: how long its wait takes}."""
    end = []
    now, tick = 0.0, 0
    timer = object.__new__(Watchdog)
    timer.limit_s, timer.marks, timer.launcher = limit_s, 0, None

    def wait(period):
        nonlocal now, tick
        if tick in marks:
            timer.mark("there")
        now += late.get(tick, period)
        tick += 1
        return bool(end) or tick > 200

    timer.closed = SimpleNamespace(wait=wait)
    timer.stuck = str
    timer._end = lambda reason: end.append(now)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=lambda: now))
    timer._run()
    return end[0] if end else None


def test_only_time_in_which_the_process_ran_counts(monkeypatch):
    assert 10 < ended(monkeypatch, 10.0, {}) <= 12.0
    assert ended(monkeypatch, 0.0, {}) is None, "0 is no limit"
    for pause in (0.5, 5.0, 20.0, 200.0):
        assert ended(monkeypatch, 10.0, {5: pause}, marks={*range(0, 200, 9)}) is None, pause
        assert 10 + pause - 2 < ended(monkeypatch, 10.0, {5: pause}) <= 12 + pause


def test_progress_of_any_rank_is_progress_of_all_and_a_lost_store_leaves_each_rank_alone(monkeypatch):
    """Rank 0 works through files while the other rank waits for it."""
    monkeypatch.setattr(ranks, "host_group", lambda name: None)
    store = dist.HashStore()
    with Watchdog("train.py", 0) as first, Watchdog("train.py", 0) as second:
        for timer in (first, second):
            timer.share(store.clone())
        seen = second._progress()
        assert second._progress() == seen
        assert [*cli.count_progress("ab")] == ["a", "b"]  # of both, as they share a process
        first._progress()
        assert second._progress() > seen
        seen = second._progress()
        first.mark("loading")
        first._progress()
        assert second._progress() == seen + 1
        second.store = SimpleNamespace(add=Mock(side_effect=RuntimeError))
        assert second._progress() == second._progress() == second.marks + cli.ProgressCount.total


def test_a_rank_that_torchrun_ends_is_silent_about_the_rank_that_broke():
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError), Watchdog("train.py", 0) as alive:
        patch.setattr(signal, "raise_signal", ended := Mock())
        alive.signal = signal.SIGTERM
        raise RuntimeError("Connection reset by peer")
    ended.assert_called_once_with(signal.SIGTERM)


@pytest.mark.slow
def test_a_rank_that_waits_for_files_of_another_rank_does_not_hang(tmp_path):
    argv = micro_run(tmp_path / "data", tmp_path / "run", "--run.watchdog_s=5", "--train.max_samples=12")
    done = script("tests/helpers/slow_set.py", *argv, ranks=2)
    assert done.returncode == 0, done.stderr


def test_a_stuck_rank_names_its_place_and_the_key_that_gives_a_compiler_more_time():
    with Watchdog("train.py", 7.0) as timer:
        timer.mark("the end of step 9")
        said = timer.stuck()
    assert said.startswith("no progress for 7 s since the end of step 9; this rank, ")
    assert "set a greater run.watchdog_s" in said


def test_what_is_a_second_ctrl_c(monkeypatch, capfd):
    """torchrun sends SIGTERM for it, and may pass on the first one late."""
    end = []
    monkeypatch.setattr(os, "_exit", end.append)
    for is_launched, number, ends in (
        (False, signal.SIGINT, True),
        (False, signal.SIGUSR1, False),
        (True, signal.SIGINT, False),
        (True, signal.SIGTERM, True),
    ):
        monkeypatch.delenv(watchdog.LAUNCHED, raising=False)
        if is_launched:
            monkeypatch.setenv(watchdog.LAUNCHED, "id")
        watcher = object.__new__(Watchdog)
        watcher.signal = signal.SIGTERM
        watcher._take(signal.SIGINT, None)
        watcher._take(number, None)
        assert (end, watcher.signal) == ([130] * ends, signal.SIGINT), (is_launched, number)
        assert capfd.readouterr().err == f"{watchdog.NOTICE}\n"
        end.clear()


def test_a_signal_saves_and_ends_the_run_unless_it_was_ignored(shapes_dir, tmp_path, attempt, monkeypatch):
    stop_point, quick = Watchdog.stop_point, ("--data.val=", "--train.synthetic_steps=0")
    for number in watchdog.SIGNALS:
        run = tmp_path / number.name
        before = signal.signal(number, signal.SIG_DFL)  # a shell's job in the background ignores SIGINT and SIGQUIT

        def struck(self, place, number=number):
            if place == "the end of step 2":
                signal.raise_signal(number)
            stop_point(self, place)

        monkeypatch.setattr(Watchdog, "stop_point", struck)
        code, out, _ = attempt(*micro_run(shapes_dir, run, *quick))
        assert code == 128 + number and f"stopped by {number.name} after step 3; the same command goes on" in out
        assert newest(run).info["step"] == 3 and signal.signal(number, before) == signal.SIG_DFL
    monkeypatch.setattr(watchdog, "SIGNALS", (signal.SIGHUP,))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    monkeypatch.setattr(
        Watchdog, "stop_point", lambda self, place: (signal.raise_signal(signal.SIGHUP), stop_point(self, place))
    )
    assert attempt(*micro_run(shapes_dir, tmp_path / "nohup", *quick))[0] == 0
    signal.signal(signal.SIGHUP, before)


@contextlib.contextmanager
def endless(data, folder):
    """A run by 2 ranks that has done a few steps, and a function that counts its records."""
    argv = micro_run(data, folder / "run", "--train.max_samples=1200000", "--run.watchdog_s=8")
    more = ("--eval.every_samples=96", "--train.log_every_samples=12")
    done = partial(count, folder / "run" / "metrics.jsonl")
    with Job(folder / "log", "train.py", *argv, *more, ranks=2) as job:
        assert job.until(lambda: done() >= 4 and len(job.ranks()) == 2), job.said
        yield job, done


@pytest.mark.slow
def test_a_pause_of_the_whole_job_is_no_hang_and_ranks_without_a_launcher_end(shapes_dir, tmp_path):
    with endless(shapes_dir, tmp_path) as (job, done):
        everyone = job.alive()
        for pid in everyone:
            send(pid, signal.SIGSTOP)
        time.sleep(12)
        steps = done()
        for pid in everyone:
            send(pid, signal.SIGCONT)
        assert job.until(lambda: done() > steps + 4), job.said
        assert "no progress" not in job.said
        job.process.kill()
        assert job.gone(timeout=60), "they would hold memory, devices and the run's folder"


@pytest.mark.slow
def test_when_a_rank_freezes_the_other_one_says_where_it_waits_and_ends(shapes_dir, tmp_path):
    with endless(shapes_dir, tmp_path) as (job, _):
        send(job.ranks()[1], signal.SIGSTOP)
        assert job.until(lambda: "no progress" in job.said and len(job.ranks()) == 1, timeout=60)
    (line,) = re.findall(r"train\.py: rank 0 on \S+: (no progress [^\r\n]*)", job.said)
    assert re.match(r"no progress for 8 s since .*; this rank, another one, the network", line)
    assert re.search(r'File "\S+/flux_ref/\S+\.py", line \d+ in ', job.said), "the stack"
    entries = json.loads((tmp_path / "run" / "hang_rank_0.json").read_text())["entries"]
    assert entries[-1]["profiling_name"].startswith("gloo:") and entries[-1]["state"] == "scheduled"
