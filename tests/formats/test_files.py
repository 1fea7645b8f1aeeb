"""Files, folders and lines appear whole or not at all."""

import os
import resource

import pytest

from flux_ref.errors import Refusal
from flux_ref.formats.files import append, partial_of, whole, write_whole


def test_a_file_appears_whole_and_replaces_an_older_one(tmp_path):
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    with pytest.raises(ValueError), whole(path) as partial:
        partial.write_text("half")
        raise ValueError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_whole(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_of_two_writers_one_is_whole_and_the_other_is_told(tmp_path):
    path = tmp_path / "a.txt"
    with whole(path) as partial:
        partial.write_text("first")
        with pytest.raises(Refusal, match="is being written by another job"):
            write_whole(path, "second")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_whole_and_replaces_nothing(tmp_path):
    path = tmp_path / "set"
    partial_of(path).mkdir()
    (partial_of(path) / "left by a killed process").touch()
    with whole(path) as partial:
        partial.mkdir()
        (partial / "shard").touch()
        assert not path.exists()
    assert [child.name for child in path.iterdir()] == ["shard"]
    with pytest.raises(Refusal, match="set exists; remove it"), whole(path, is_new=True):
        pass
    assert list(tmp_path.iterdir()) == [path]


def test_a_line_that_does_not_fit_leaves_no_part_of_itself_and_names_the_file(tmp_path):
    path, before = tmp_path / "a.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    append(path, "first\n", on_disk=True)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
        with pytest.raises(OSError, match=f"File too large: '{path}'"):
            append(path, "second\n")
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/b'"):
            write_whole(tmp_path / "b", "more than ten bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_text() == "first\n" and list(tmp_path.iterdir()) == [path]
    append(path, "second\n")
    assert path.read_text() == "first\nsecond\n"
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="No such device"):  # a pipe without a reader would wait for ever
        append(tmp_path / "fifo", "line\n")
