"""A claim has one owner, on one host and on several, whatever locks the file system has."""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from flux_ref.formats import claim

PROGRAM = """
import sys, time
from pathlib import Path
from flux_ref.formats import claim
path, place = sys.argv[1:]
claim._place = lambda: place
own = claim.take(Path(path))
print("owner" if own else "refused", flush=True)
time.sleep(60 if own else 0)
"""


@pytest.fixture
def job():
    """job(path, place) starts a process that claims a path; place: its host."""
    started = []

    def start(path: Path, place: str) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, str(path), place]
        started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_claim_is_held_by_one_until_it_is_given_up(tmp_path):
    path = tmp_path / ".claim"
    with claim.take(path):
        me = f"process {os.getpid()} on {os.uname().nodename} since 2"
        assert claim.take(path) is None and claim.owner(path).startswith(me)
    assert list(tmp_path.iterdir()) == []
    with claim.take(path):
        path.write_text("of another job, for a user has deleted this one")
    assert path.exists()


def test_a_dead_owner_is_replaced_on_its_host_and_named_on_another(job, tmp_path):
    path = tmp_path / ".claim"
    first = job(path, claim._place())
    assert first.stdout.readline() == "owner\n"
    assert job(path, claim._place()).communicate()[0] == "refused\n" and claim.take(path) is None
    assert job(path, "other host").communicate()[0] == "refused\n"
    first.kill()
    assert job(path, "other host").communicate()[0] == "refused\n"
    with claim.take(path, wait_s=5):  # it is a zombie now
        assert claim.take(path) is None
    assert list(tmp_path.iterdir()) == []

    killed = job(path, "other host")
    assert killed.stdout.readline() == "owner\n"
    killed.kill()
    killed.wait()
    begin = time.monotonic()
    assert claim.take(path, wait_s=0.3) is None and time.monotonic() - begin > 0.3
    assert f"; if it has ended, delete {path}" in claim.owner(path)


def test_a_claim_that_names_no_process_is_kept_and_a_number_that_was_given_again_is_seen(tmp_path):
    path, place, pid = tmp_path / ".claim", claim._place(), os.getpid()
    for text in ("", "process 1 on old\n", "\xff", f"x\n{place}\n-1\n5\n", f"x\n{place}\n9{'9' * 30}\n5\n"):
        path.write_text(text)
        assert claim.take(path) is None and f"delete {path}" in claim.owner(path), text
        assert path.read_text() == text
    path.write_text(f"x\n{place}\n{pid}\n5\n")  # this number, but of a process that began earlier
    claim.take(path).close()
    assert not path.exists()


@pytest.mark.slow
def test_one_of_many_gets_a_claim_that_has_ended(job, tmp_path):
    for number in range(3):
        path = tmp_path / str(number)
        path.write_text(f"x\nhere\n{2**22 + 1}\n5\n")
        first = [process.stdout.readline() for process in [job(path, "here") for _ in range(4)]]
        assert sorted(first) == ["owner\n", *["refused\n"] * 3], first


def test_a_pipe_is_no_claim_and_a_disk_that_takes_none_is_told(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert claim.take(tmp_path / "fifo") is None, "reading it would wait for ever"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/full'"):
            claim.take(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "full").exists()
