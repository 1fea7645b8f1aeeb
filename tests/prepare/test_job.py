"""What the commands of tools.prepare share."""

import contextlib
import itertools
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import refusal
from tqdm import tqdm

from flux_ref.errors import Fault, Refusal
from tools.prepare import job


def test_an_error_of_one_thread_ends_the_others():
    finished = []

    def task(item: int, advance: job.Advance) -> None:
        if item:
            raise Fault("broken")
        for _ in range(500):
            advance(1)
            time.sleep(0.01)
        finished.append(item)

    with pytest.raises(Fault):
        job.each(task, [0, 1], 2, tqdm(disable=True))
    assert not finished


class Kill(BaseException):
    """The process ends here."""


def test_a_kill_at_any_point_of_the_end_leaves_the_set_or_what_goes_on(tmp_path, monkeypatch):
    """Each change of a name or of a folder is such a point. The next start clears what is left beside a whole set."""
    real = {name: getattr(Path, name) for name in ("rename", "unlink", "rmdir", "mkdir", "write_text")}
    real["rmtree"] = shutil.rmtree
    for point in range(30):
        final = tmp_path / str(point) / "set"
        calls = itertools.count()

        def killing(name: str) -> Callable:
            def call(*given: object, **named: object) -> object:
                if next(calls) == point:
                    raise Kill
                return real[name](*given, **named)

            return call

        with monkeypatch.context() as patch, contextlib.suppress(Kill):
            for name in real:
                patch.setattr(shutil if name == "rmtree" else Path, name, killing(name))
            with job.growing(final, {"a": 1}) as folder:
                (folder / "set" / "x").touch()
                (folder / "rest").touch()
        was_whole = final.exists()
        if was_whole:
            assert "exists; choose another --output" in refusal(lambda: job.require_new(final))
        else:
            with job.growing(final, {"a": 1}) as folder:
                assert (folder / "set" / "x").exists() or not (folder / "rest").exists()
                (folder / "set" / "x").touch()
        assert {path.name for path in final.parent.iterdir()} == {"set", ".set.lock"}, point
        assert (final / "x").exists(), point
        if next(calls) <= point:
            break
    assert was_whole and 5 < point < 29


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    own = job.partial_of(tmp_path / "set")
    own.mkdir()
    (own / "mine").touch()
    with (
        pytest.raises(Refusal, match="holds files of something else; choose another"),
        job.growing(tmp_path / "set", {}),
    ):
        pass
    (tmp_path / "set").mkdir()
    assert "exists; choose another" in refusal(lambda: job.require_new(tmp_path / "set"))
    assert (own / "mine").exists()
