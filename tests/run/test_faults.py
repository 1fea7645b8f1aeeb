"""Faults while a run is under way: what is lost, what is said, and what resumes.

Errors are injected where a file is written, so these tests run everywhere.
"""

import errno
import json
import os
import shutil
import threading
import time
from contextlib import contextmanager

import pytest
from conftest import called, micro_run, script
from run_files import column, event, events, require_equal_runs, saved_steps

from flux_ref import files
from flux_ref import report as report_module
from flux_ref.watchdog import Watchdog

SHORT = (  # 6 steps, evaluations after 3 and 6, a checkpoint after every second
    *("--train.max_samples=72", "--eval.every_samples=36", "--checkpoint.every_samples=24", "--checkpoint.keep=99"),
    *("--pictures.count=1", "--pictures.steps=1"),
)


@pytest.fixture
def trains(shapes_dir, attempt):
    """trains(run) trains here; returns the exit code, stdout, and the line of what went wrong."""
    return lambda run: attempt(*micro_run(shapes_dir, run, *SHORT))


@pytest.fixture(scope="module")
def calm(shapes_dir, tmp_path_factory):
    """A run that nothing has disturbed; tests must not change it."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    assert called("train.py", *micro_run(shapes_dir, folder, *SHORT)) == 0
    return folder


@contextmanager
def struck(step, act):
    """In this block `act` is called after a step of a run."""
    stop_point = Watchdog.stop_point

    def strike(alive, place):
        if place == f"the end of step {step}":
            act()
        stop_point(alive, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Watchdog, "stop_point", strike)
        yield


def refuse(name, real, after, times=1, number=errno.ENOSPC):
    """A stand-in for a function of a path. After so many calls for files of this name, it fails so many times."""
    calls = []

    def stand_in(path, *args, **kwargs):
        if path.name == name:
            calls.append(path)
            if after < len(calls) <= after + times:
                raise OSError(number, os.strerror(number), str(path))
        return real(path, *args, **kwargs)

    return stand_in


@pytest.mark.slow
def test_a_file_that_counts_and_cannot_be_written_ends_the_run_which_goes_on_later(trains, calm, tmp_path, monkeypatch):
    """One line names the file. A log with a gap is never continued to a run_stop."""
    for name, after, times, module, function, number in (
        ("metrics.jsonl", 3, 1, report_module, "append", errno.EROFS),
        ("metrics.jsonl", 2, 99, report_module, "append", errno.ENOENT),
        ("eval.jsonl", 1, 99, report_module, "append", errno.EACCES),
        ("result_0.txt", 12, 1, files, "append", errno.ENOSPC),
        ("outcome.json", 0, 1, report_module, "write_whole", errno.ENOSPC),
    ):
        run = tmp_path / f"{name}_{after}"
        with monkeypatch.context() as patch:
            patch.setattr(module, function, refuse(name, getattr(module, function), after, times, number))
            code, _, line = trains(run)
        assert code == 3 and f"{run / name}: {os.strerror(number)}; " in line, (name, code, line)
        assert not (run / "outcome.json").exists()
        assert (name == "result_0.txt") == ("run_stop" not in [event["key"] for event in events(run)])
        assert trains(run)[0] == 0, name
        require_equal_runs(run, calm)
        assert event(run, "disqualified")["value"].startswith("resumed from step ")


@pytest.mark.slow
def test_a_record_that_rank_0_cannot_write_ends_all_ranks_which_go_on_later(shapes_dir, tmp_path):
    argv = micro_run(shapes_dir, tmp_path / "run", *SHORT)
    process = script("tests/helpers/full_disk.py", *argv, ranks=2)
    assert process.returncode == 3 and process.stderr.count("metrics.jsonl: No space left on device") == 1
    assert script("train.py", *argv, ranks=2).returncode == 0
    assert column(tmp_path / "run", "step") == [1, 2, 3, 4, 5, 6]


def test_a_picture_that_cannot_be_written_ends_no_run(trains, calm, tmp_path, monkeypatch):
    for name in ("loss.png", "000000072.png"):
        monkeypatch.setattr(files, "whole", refuse(name, files.whole, after=0, times=9))
    code, out, _ = trains(tmp_path / "run")
    assert code == 0 and out.count("loss.png NOT drawn: [Errno 28] No space left on device") == 3
    assert out.count("000000072.png NOT drawn: [Errno 28]") == 1
    require_equal_runs(tmp_path / "run", calm)
    assert not [path for path in (tmp_path / "run").rglob("*") if "png" in path.name]
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["not_a_timed_result"] == ""


def test_checkpoints_that_are_removed_under_a_run_are_saved_anew(trains, calm, tmp_path):
    run = tmp_path / "run"

    def remove():
        for thread in threading.enumerate():
            if "(_save)" in thread.name:  # it would put files into the folder meanwhile
                thread.join()
        assert saved_steps(run) == [2]
        shutil.rmtree(run / "checkpoints")

    with struck(3, remove):
        assert trains(run)[0] == 0
    assert saved_steps(run) == [4, 6]
    require_equal_runs(run, calm)


def test_a_clock_that_is_set_changes_no_record(trains, calm, tmp_path, monkeypatch):
    real, run, jump = time.time, tmp_path / "run", []
    monkeypatch.setattr(time, "time", lambda: real() + sum(jump))
    with struck(3, lambda: jump.append(-7200.0)):
        assert trains(run)[0] == 0
    require_equal_runs(run, calm)
    assert all(0 < rate < 1e5 for rate in column(run, "samples_per_s"))
    assert all(0 <= seconds < 60 for seconds in column(run, "seconds", "eval.jsonl"))
