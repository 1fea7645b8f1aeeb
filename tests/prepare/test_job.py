"""What the commands of tools.prepare share."""

import contextlib
import itertools
import os
import time
from pathlib import Path

import pytest
from conftest import refusal

from flux_ref.cli import Fault, Refusal
from tools.prepare import common


def test_an_error_of_one_thread_ends_the_command():
    """What waits is not begun."""
    begun = []

    def task(item):
        begun.append(item)
        if item == 1:
            raise Fault("broken")
        time.sleep(0.01)

    with pytest.raises(Fault):
        list(common.each(task, range(100), 2))
    assert len(begun) < 50


class Kill(BaseException):
    """The process ends here."""


def is_killed(final, point):
    """Whether a command that makes a set ends before its change `point` of a name or folder. Nothing is done then."""
    changes = itertools.count()

    def killing(real):
        def call(*given, **named):
            if next(changes) >= point:
                raise Kill
            return real(*given, **named)

        return call

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(Kill):
        for name in ("rename", "unlink", "mkdir", "write_text"):
            patch.setattr(Path, name, killing(getattr(Path, name)))
        for owner, name in ((os, "unlink"), (os, "rmdir")):  # of rmtree
            patch.setattr(owner, name, killing(getattr(owner, name)))
        with common.growing(final, {"a": 1}) as folder:
            (folder / "set" / "x").touch()
            (folder / "rest").touch()
        return False
    return True


def test_a_kill_at_any_point_leaves_the_whole_set_or_what_goes_on(tmp_path):
    kills = {True: 0, False: 0}  # with the whole set, and before it
    for point in itertools.count():
        final = tmp_path / str(point) / "set"
        final.parent.mkdir()
        killed = is_killed(final, point)
        kills[final.exists()] += killed
        if final.exists():
            assert "exists; choose another --output" in refusal(common.require_new, final)
        else:
            with common.growing(final, {"a": 1}) as folder:
                assert (folder / "set" / "x").exists() or not (folder / "rest").exists(), point
                (folder / "set" / "x").touch()
            assert {path.name for path in final.parent.iterdir()} == {"set", ".set.lock"}, point
        assert (final / "x").exists(), point
        if not killed:
            break
    assert not common.partial_of(final).exists() and min(kills.values()) > 2, kills


def test_what_is_left_beside_a_whole_set_is_no_part_of_the_next_one(tmp_path):
    own = common.partial_of(tmp_path / "set")
    own.mkdir()
    (own / common.MADE_FROM).write_text("{}")
    (own / "done").touch()
    with common.growing(tmp_path / "set", {}):
        assert not (own / "done").exists()


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    own = common.partial_of(tmp_path / "set")
    own.mkdir()
    (own / "mine").touch()
    with (
        pytest.raises(Refusal, match="holds files of something else; choose another"),
        common.growing(tmp_path / "set", {}),
    ):
        pass
    (tmp_path / "set").mkdir()
    assert "exists; choose another" in refusal(common.require_new, tmp_path / "set")
    assert (own / "mine").exists()
