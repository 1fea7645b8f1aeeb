"""A claim has one owner, on one host and on several, whatever locks the file system has."""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from flux_ref.formats import claim

PROGRAM = """
import sys, time
from pathlib import Path
from flux_ref.formats import claim
path, host, seconds = sys.argv[1:]
claim.BEAT_S, claim.LEASE_S, claim.SETTLE_S, claim._place = 0.05, 0.6, 1.0, lambda: host
own = claim.take(Path(path))
print("owner" if own else "refused", flush=True)
time.sleep(float(seconds) if own else 0)
"""


class Jobs(list):
    """Processes that claim a path, each on a host of its own or on a shared one."""

    def start(self, path: Path, host: str, seconds: float = 60) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, str(path), host, str(seconds)]
        self.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return self[-1]


@pytest.fixture
def jobs():
    started = Jobs()
    yield started
    for job in started:
        job.kill()
        job.communicate()


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(claim, "BEAT_S", 0.05)
    monkeypatch.setattr(claim, "LEASE_S", 0.6)


def test_a_claim_is_held_by_one_until_it_is_given_up(tmp_path):
    path = tmp_path / ".claim"
    with claim.take(path):
        assert claim.take(path) is None and "process" in claim.owner(path)
    assert list(tmp_path.iterdir()) == []
    with claim.take(path):
        assert path.exists()


def test_on_two_hosts_one_job_gets_the_claim_and_a_dead_owner_blocks_nobody(jobs, tmp_path, quick):
    """On its host a killed owner's claim ends at once, elsewhere after LEASE_S. No lock of the file system is used."""
    path = tmp_path / ".claim"
    first = jobs.start(path, claim._place())
    assert first.stdout.readline() == "owner\n"
    other_host = jobs.start(path, "other host")
    assert other_host.communicate()[0] == "refused\n" and claim.take(path) is None
    first.kill()
    first.wait()
    begin = time.monotonic()
    claim.take(path).close()
    assert time.monotonic() - begin < 0.6

    killed = jobs.start(path, "other host")
    assert killed.stdout.readline() == "owner\n"
    killed.kill()
    begin = time.monotonic()
    claim.take(path).close()
    assert time.monotonic() - begin > 0.6 and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_frozen_owner_whose_claim_was_taken_ends_and_does_not_touch_it(jobs, tmp_path, quick):
    path = tmp_path / ".claim"
    frozen = jobs.start(path, "other host")
    assert frozen.stdout.readline() == "owner\n"
    frozen.send_signal(19)  # SIGSTOP
    with claim.take(path):
        frozen.send_signal(18)  # SIGCONT
        assert frozen.wait(10) == 3 and "has taken this claim; this process ends" in frozen.communicate()[1]
        time.sleep(0.1)
        assert claim.take(path) is None


def test_a_disk_that_stalls_makes_no_owner_dead(tmp_path, monkeypatch):
    path, clock = tmp_path / ".claim", [0.0]
    path.write_text(json.dumps({"place": "other host", "pid": 1}))
    reads = iter(((0, b"1"), (100, b"1"), (0, b"1"), (0, b"2")))  # seconds that a read takes, and the count it gives

    def stalling(path: Path) -> bytes:
        seconds, count = next(reads)
        clock[0] += seconds
        return b'{"place": "other host", "count": "%s"}' % count

    monkeypatch.setattr(claim, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None))
    monkeypatch.setattr(claim, "_content", stalling)
    assert claim.take(path) is None and json.loads(path.read_text())["pid"] == 1


@pytest.mark.slow
def test_one_of_many_gets_a_claim_that_has_ended_or_is_damaged(jobs, tmp_path):
    for number, left in enumerate((json.dumps({"place": "here", "pid": 2**22 + 1}), "process 1 on old\n", "\xff", "")):
        path = tmp_path / str(number)
        path.write_text(left)
        found = [jobs.start(path, "here") for _ in range(3)]
        first = [job.stdout.readline() for job in found]
        assert sorted(first) == ["owner\n", "refused\n", "refused\n"], (left, first)


@pytest.mark.slow
def test_what_is_no_file_is_no_claim_and_a_disk_that_takes_none_is_told(tmp_path, quick):
    os.mkfifo(tmp_path / "fifo")
    with claim.take(tmp_path / "fifo"):
        assert (tmp_path / "fifo").is_file()
    (tmp_path / "folder").mkdir()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with pytest.raises(OSError, match="folder"):
        claim.take(tmp_path / "folder")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/full'"):
            claim.take(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
