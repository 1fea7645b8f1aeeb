"""Files and folders appear whole or not at all."""

import pytest

from flux_ref.formats.files import locked, partial_of, whole, write_whole


def test_a_file_appears_whole_and_replaces_an_older_one(tmp_path):
    path = tmp_path / "a.txt"
    write_whole(path, "old")
    with pytest.raises(ValueError), whole(path) as partial:
        partial.write_text("half")
        raise ValueError
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    write_whole(path, "new")
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_whole_and_replaces_nothing(tmp_path):
    path = tmp_path / "set"
    partial_of(path).mkdir()
    (partial_of(path) / "left by a killed process").touch()
    with whole(path) as partial:
        partial.mkdir()
        (partial / "shard").touch()
        assert not path.exists()
    assert [child.name for child in path.iterdir()] == ["shard"]
    with pytest.raises(OSError), whole(path) as partial:
        partial.mkdir()
    assert list(tmp_path.iterdir()) == [path]


def test_a_lock_is_held_by_one_and_ends_with_its_file(tmp_path):
    path = tmp_path / ".lock"
    held = locked(path)
    assert held and locked(path) is None
    held.close()
    locked(path).close()
