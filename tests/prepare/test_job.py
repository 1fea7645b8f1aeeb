"""What the commands of tools.prepare share."""

import contextlib
import itertools
import os
import time
from pathlib import Path

import pytest
from conftest import refusal
from tqdm import tqdm

from flux_ref.cli import Fault, Refusal
from tools.prepare import common


def test_an_error_of_one_thread_ends_the_others():
    finished = []

    def task(item, advance):
        if item:
            raise Fault("broken")
        for _ in range(500):
            advance(1)
            time.sleep(0.01)
        finished.append(item)

    with pytest.raises(Fault):
        common.each(task, [0, 1], 2, tqdm(disable=True))
    assert not finished


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
    """The next start clears what is left beside a whole set."""
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
    assert min(kills.values()) > 3, kills


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
