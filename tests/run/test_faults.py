"""Faults while a run is under way, as docs/faults.md lists them: what is lost, what is said, and what resumes.

Errors are injected where a file is written or read, so most of these tests run everywhere.
"""

import errno
import json
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import MICRO, called, micro_run
from run_files import column, event, events, require_equal_runs, saved_steps
from shard_damage import position

from flux_ref import config_file, files, loss_chart, rng
from flux_ref.alive import Alive
from flux_ref.formats import shards
from flux_ref.pictures import sheet
from flux_ref.run import reporter

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
    "metrics.jsonl": (3, reporter, "append", 3),
    "eval.jsonl": (1, reporter, "append", 3),
    "result_0.txt": (62, files, "append", 3),
    "outcome.json": (0, reporter, "write_whole", 3),
    "environment.json": (0, reporter, "write_whole", 2),
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
    assert code == 0 and out.count("loss.png NOT drawn: [Errno 28] No space left on device") == 2
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
def test_a_disk_that_fills_up_or_becomes_read_only_ends_the_run_which_goes_on_later(disk, trains, calm, strikes):
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


@pytest.mark.slow
def test_a_run_folder_that_is_removed_ends_the_run_and_stays_away(trains, calm, strikes, tmp_path):
    """The checkpoint of step 4 comes before the next record."""
    run, rarely = tmp_path / "run", ("--eval.every_samples=7200", "--train.log_every_samples=7200")
    with strikes(3, partial(remove, run)):
        code, out, line = trains(run, *rarely)
    assert "step_000000004 NOT saved" in out
    assert code == 3 and re.search(rf"{run}/\S+: No such file or directory", line) and not run.exists()
    assert trains(run)[0] == 0
    require_equal_runs(run, calm)


# Data that cannot be read, or that change

CFG = config_file.load(MICRO)
STRIDE = shards.layout(CFG.model).stride
AGAIN = next(int(sample) for sample in rng.order(CFG.train.seed, 1, 50)[:22] if 0 < sample < 49)  # met in both epochs


def fail(content: bytes) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def flip(place: int, content: bytes) -> bytes:
    """Flip the lowest bit of a byte."""
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@pytest.fixture
def second_read(monkeypatch) -> Callable:
    """second_read(spoil): what a run gets of sample AGAIN is spoiled when the run reads it for the second time."""
    real, reads = os.pread, []

    def spoil_with(spoil: Callable[[bytes], bytes]) -> None:
        reads.clear()

        def pread(descriptor: int, size: int, offset: int) -> bytes:
            content = real(descriptor, size, offset)
            if offset == AGAIN * STRIDE and "/train/" in os.readlink(f"/proc/self/fd/{descriptor}"):
                reads.append(offset)
                if len(reads) == 2:
                    return spoil(content)
            return content

        monkeypatch.setattr(shards.os, "pread", pread)

    yield spoil_with
    monkeypatch.undo()


@pytest.mark.slow
def test_a_sample_that_cannot_be_read_again_ends_the_run_or_is_left_out(trains, calm, second_read, tmp_path):
    """A bit of a header is noticed, a bit of a value is not: only `prepare verify` compares checksums."""
    name = f"train/shard_000000.tar, sample {AGAIN}"
    for number, (spoil, words) in enumerate(
        (
            (fail, "Input/output error"),
            (partial(flip, 0), "no tar header"),
            (partial(flip, 257), "no tar header"),
        )
    ):
        run = tmp_path / str(number)
        second_read(spoil)
        code, _, line = trains(run)
        assert code == 3 and name in line and words in line, line
        assert trains(run)[0] == 0
        require_equal_runs(run, calm)
    second_read(partial(flip, position("mean", "payload") + 1))
    assert trains(tmp_path / "value")[0] == 0
    assert column(tmp_path / "value", "loss")[:4] == column(calm, "loss")[:4]
    assert column(tmp_path / "value", "loss") != column(calm, "loss")


# Memory


@pytest.mark.slow
def test_a_lack_of_memory_ends_the_run_with_one_line(trains, calm, strikes, tmp_path):
    def exhaust(error: Exception) -> None:
        raise error

    lacks = (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"))
    for number, error in enumerate((*lacks, torch.OutOfMemoryError("HIP out of memory. Tried"))):
        run = tmp_path / str(number)
        with strikes(3, partial(exhaust, error)):
            code, _, line = trains(run)
        assert code == 3 and line.startswith("out of memory: ") and "lower train.micro_batch" in line
        assert trains(run)[0] == 0
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
