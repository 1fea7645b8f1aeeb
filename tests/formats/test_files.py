"""Files, folders and lines appear whole or not at all; a lock ends with its process; records are told from damage."""

import contextlib
import errno
import fcntl
import json
import os
import resource
import stat
import subprocess
import sys

import pytest

from flux_ref import checkpoint, dataset, weights
from flux_ref.cli import Refusal
from flux_ref.files import append, lock, matching, records, whole, write_whole
from flux_ref.pictures import captioned
from tools.prepare import mlcommons


def test_a_file_or_folder_appears_whole_and_of_two_writers_the_last_wins(tmp_path):
    path, made = tmp_path / "a.txt", tmp_path / "set"
    write_whole(path, "old")
    with pytest.raises(ValueError), whole(path) as partial:
        partial.write_text("half")
        raise ValueError
    assert path.read_text() == "old"
    with whole(path) as partial:
        partial.write_text("slow")
        write_whole(path, "fast")
    assert path.read_text() == "slow"
    with whole(made, is_new=True) as partial:
        (partial / "below").mkdir(parents=True)
        assert not made.exists()
    with pytest.raises(Refusal, match="set exists; choose another"), whole(made, is_new=True):
        pass
    assert sorted(child.name for child in tmp_path.iterdir()) == ["a.txt", "set"]


def test_what_does_not_fit_names_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    append(path, "first\n", on_disk=True)
    append(path, "é\n")
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            append(path, "second\n")
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/b'"):
            write_whole(tmp_path / "b", "more than ten bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text(encoding="utf-8").startswith("first\né\n") and list(tmp_path.iterdir()) == [path]


def test_what_may_not_be_read_is_never_taken_for_absent(tmp_path, monkeypatch):
    """Else a run whose checkpoints cannot be read now would begin anew."""
    (tmp_path / "step_1").touch()
    assert matching(tmp_path, "[!.]*") == [tmp_path / "step_1"]
    assert matching(tmp_path / "none", "*") == matching(tmp_path / "step_1", "*") == []

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    readers = (checkpoint.list_checkpoints, weights.find, dataset.paths_of, mlcommons.arrow_files, captioned.list_files)
    taken = []
    for reader in readers:
        with contextlib.suppress(PermissionError):
            taken.append((reader, reader(tmp_path)))
    assert taken == []


def test_a_lock_has_one_holder_and_ends_with_its_process(tmp_path):
    path = tmp_path / ".run.lock"
    code = "import sys, time\nfrom flux_ref import files\nfrom pathlib import Path\n"
    code += "with files.lock(Path(sys.argv[1]), 'it'):\n    print('held', flush=True)\n    time.sleep(60)\n"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(Refusal, match="it is in use by another job; wait"), lock(path, "it"):
            pass
        other.kill()
    with lock(path, "it"):  # the kill has ended it: Popen waits
        pass


def test_where_there_are_no_locks_one_line_says_so(tmp_path, monkeypatch, capsys):
    def missing(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)
    with lock(tmp_path / "lock", "it"):
        said = capsys.readouterr().err
        assert said.startswith(f"warning: {tmp_path}/lock cannot be locked (Function not implemented), so another job")


def test_disks_of_networks_lock_files_and_sync_no_folder(tmp_path, monkeypatch, capsys):
    """As flock on NFS, which wants a file that is open for writing, and fsync on shares of Windows."""

    def nfs(descriptor, _):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")

    def failing(kinds, number):
        def fsync(descriptor):
            if kinds(os.fstat(descriptor).st_mode):
                raise OSError(number, "no sync")

        return fsync

    monkeypatch.setattr(fcntl, "flock", nfs)
    with lock(tmp_path / "lock", "it"):
        assert capsys.readouterr().err == ""
    for number in (errno.EINVAL, errno.ENOTSUP):
        monkeypatch.setattr(os, "fsync", failing(stat.S_ISDIR, number))
        write_whole(tmp_path / "a.txt", "whole")
    for kinds, number in ((stat.S_ISDIR, errno.EIO), (stat.S_ISREG, errno.EINVAL)):
        monkeypatch.setattr(os, "fsync", failing(kinds, number))
        with pytest.raises(OSError, match="no sync"):
            write_whole(tmp_path / "a.txt", "lost")


def test_a_damaged_record_is_refused_unless_it_is_the_half_line_of_a_killed_run(tmp_path):
    path, want = tmp_path / "metrics.jsonl", [{"samples": 8, "loss": 0.5}, {"samples": 16, "loss": 0.25}]
    assert records(path, "loss") == []
    before = "".join(json.dumps(record) + "\n" for record in want).encode()
    path.write_bytes(before)
    for line in (b'{"samples": 1, "loss"', b"\xff\xfe", b'{"samples": 1}}'):
        path.write_bytes(before + line)
        assert records(path, "loss") == want, line
    for line in (b"\xff\xfe", b"{}", b"7", b"", b'{"samples": 9}', b'{"samples": 9, "loss": "low"}'):
        path.write_bytes(before + line + b"\n" + before)
        with pytest.raises(
            Refusal, match=r"metrics\.jsonl, line 3 is no record with the numbers samples and loss; mend"
        ):
            records(path, "loss")
