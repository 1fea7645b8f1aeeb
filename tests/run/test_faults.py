"""Faults while a run is under way: what is lost, what is said, and what resumes.

Errors are injected where a file is written or read, so most of these tests run everywhere.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from conftest import called, micro_run
from run_files import column, event, events, require_equal_runs, saved_steps

from flux_ref import files, loss_chart
from flux_ref import report as report_module
from flux_ref.alive import Alive
from flux_ref.pictures import sheet

SHORT = (  # 6 steps, evaluations after 3 and 6, a checkpoint after every second
    *("--train.max_samples=72", "--eval.every_samples=36", "--checkpoint.every_samples=24", "--checkpoint.keep=99"),
    "--sample.count=1",
    "--sample.steps=1",
)


@pytest.fixture
def trains(shapes_dir, attempt) -> Callable:
    """trains(run, *overrides) trains here; returns the exit code, stdout, and the line of what went wrong."""
    return lambda run, *more, data=shapes_dir: attempt(*micro_run(data, run, *SHORT, *more))


@pytest.fixture(scope="module")
def calm(shapes_dir, tmp_path_factory) -> Path:
    """A run that nothing has disturbed; tests must not change it."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    assert called("train.py", *micro_run(shapes_dir, folder, *SHORT)) == 0
    return folder


@pytest.fixture
def strikes(monkeypatch) -> Callable:
    """strikes(step, act): a context in which `act` is called once after a step of a run."""

    @contextmanager
    def context(step: int, act: Callable[[], object]) -> Iterator[None]:
        at, left = Alive.at, [act]

        def struck(alive: Alive, place: str) -> None:
            if place == f"the end of step {step}" and left:
                left.pop()()
            at(alive, place)

        with monkeypatch.context() as patch:
            patch.setattr(Alive, "at", struck)
            yield
        assert not left, "the run did not come so far"

    return context


def refuse(name: str, real: Callable, after: int = 0, times: int = 1) -> Callable:
    """A stand-in for a function of a path. After so many calls for files of this name, it fails so many times."""
    calls = []

    def stand_in(path: Path, *args: object, **kwargs: object) -> object:
        if path.name == name:
            calls.append(path)
            if after < len(calls) <= after + times:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return real(path, *args, **kwargs)

    return stand_in


def remove(folder: Path) -> None:
    """Remove a folder of a run after the save that is under way. That save would put files into it meanwhile."""
    for thread in threading.enumerate():
        if "(_save)" in thread.name:
            thread.join()
    assert [path.name for path in folder.rglob("step_*")] == ["step_000000002"]
    shutil.rmtree(folder)


# Files that cannot be written

ESSENTIAL = {  # file: how often it is written before the disk is full, where, exit code
    "metrics.jsonl": (3, report_module, "append", 3),
    "eval.jsonl": (1, report_module, "append", 3),
    "result_0.txt": (6, files, "append", 3),
    "outcome.json": (0, report_module, "write_whole", 3),
}


@pytest.mark.slow
def test_a_file_that_counts_and_cannot_be_written_ends_the_run_which_goes_on_later(trains, calm, tmp_path, monkeypatch):
    """One line names the file. A log with a gap is never continued to a run_stop."""
    for name, (after, module, function, want) in ESSENTIAL.items():
        run = tmp_path / name
        with monkeypatch.context() as patch:
            patch.setattr(module, function, refuse(name, getattr(module, function), after))
            code, _, line = trains(run)
        assert code == want and f"{run / name}: No space left on device; free its disk" in line, (name, code, line)
        assert not (run / "outcome.json").exists() and (want == 3 or not run.exists()), name
        if want == 3:
            assert all(json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines())
            assert (name == "result_0.txt") == ("run_stop" not in [event["key"] for event in events(run)])
        assert trains(run)[0] == 0, name
        require_equal_runs(run, calm)
        assert want == 2 or event(run, "disqualified")["value"].startswith("resumed from step ")


def test_a_picture_that_cannot_be_written_ends_no_run(trains, calm, tmp_path, monkeypatch):
    for module in (loss_chart, sheet):
        stand_in = refuse("loss.png" if module is loss_chart else "000000072.png", files.whole, times=9)
        monkeypatch.setattr(module, "whole", stand_in)
    code, out, _ = trains(tmp_path / "run")
    assert code == 0 and out.count("loss.png NOT drawn: [Errno 28] No space left on device") == 3
    assert out.count("000000072.png NOT drawn: [Errno 28]") == 1
    require_equal_runs(tmp_path / "run", calm)
    assert not [path for path in (tmp_path / "run").rglob("*") if "png" in path.name]
    assert json.loads((tmp_path / "run" / "outcome.json").read_text())["not_a_timed_result"] == ""


@pytest.fixture
def disk(tmp_path):
    """disk(mode) mounts a small disk in memory, or mounts it again in another mode, "rw" or "ro"."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(mode: str = "rw") -> Path:
        options, deadline = f"size=3m,{mode}", time.monotonic() + 10
        while True:
            again = os.path.ismount(folder)
            command = ["mount", "-t", "tmpfs", "-o", f"{options}{',remount' if again else ''}", "tmpfs", str(folder)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return folder
            if not again:
                pytest.skip(f"mounting is not permitted: {done.stderr}")
            assert time.monotonic() < deadline, done.stderr
            time.sleep(0.02)  # busy: a checkpoint is being written

    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", folder], check=True)


def fill(folder: Path) -> None:
    """Take all space of a disk."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (4096, 1):
            try:
                while file.write(bytes(size)) == size:
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC


@pytest.mark.slow
def test_a_disk_that_fills_up_or_becomes_read_only_ends_the_run_which_goes_on_later(
    disk, trains, calm, strikes, monkeypatch
):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # its open file would forbid the mount
    folder, own = disk(), ("--checkpoint.keep=1", "--sample.count=0")
    for name, spoil, mend, words in (
        ("full", partial(fill, folder), (folder / "filler").unlink, "No space left on device|GB free"),
        ("read-only", partial(disk, "ro"), disk, "Read-only file system"),
    ):
        run = folder / name
        with strikes(4, spoil):
            code, _, line = trains(run, *own)
        assert code == 3 and re.search(words, line) and str(run) in line, line
        mend()
        code, out, line = trains(run, *own)
        assert code == 0 and re.search(r"from step [24] ", out), line
        require_equal_runs(run, calm)
        shutil.rmtree(run)


def test_checkpoints_that_are_removed_under_a_run_are_saved_anew(trains, calm, strikes, tmp_path):
    run = tmp_path / "run"
    with strikes(3, partial(remove, run / "checkpoints")):
        assert trains(run)[0] == 0
    assert saved_steps(run) == [4, 6]
    require_equal_runs(run, calm)


# Clocks


@pytest.mark.slow
def test_a_clock_that_is_set_changes_no_record_but_the_log_is_no_timed_result(trains, calm, strikes, tmp_path):
    real, jump = time.time, [0.0]
    for name, seconds in (("forward", 7200.0), ("back", -7200.0)):
        run = tmp_path / name
        jump[0] = 0.0
        with pytest.MonkeyPatch.context() as patch, strikes(3, lambda by=seconds: jump.__setitem__(0, by)):
            patch.setattr(time, "time", lambda: real() + jump[0])
            assert trains(run)[0] == 0
        require_equal_runs(run, calm)
        assert all(0 < rate < 1e5 for rate in column(run, "samples_per_s"))
        assert all(0 <= seconds < 60 for seconds in column(run, "seconds", "eval.jsonl"))
        stop = event(run, "run_stop")["metadata"]
        why = f"the clock was set by {seconds:+.1f} s in the run"
        assert stop["status"] == "aborted" and f"{why}, so not a valid timed result" in stop["reason"]
        assert json.loads((run / "outcome.json").read_text())["not_a_timed_result"] == why
        assert event(run, "disqualified")["value"] == why
    assert "disqualified" not in [event["key"] for event in events(calm)]
