"""The folder of torch's compiler: one for each start, or the user's own, in which a second start finds all code."""

import os
import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest
from conftest import micro_run, script

from flux_ref import config, ranks
from flux_ref.run import compiler_folder


def test_a_start_has_a_folder_of_its_own_which_ends_with_it(tmp_path, monkeypatch):
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "mine")
    cfg, world = config.Config(), ranks.start(config.ParallelConfig())
    for given in ("", "/mine"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
        before = {name: os.environ.get(name) for name in names}
        with ExitStack() as stack:
            compiler_folder.choose(cfg, world, stack)
            (own,) = tmp_path.iterdir()
            assert (stat.S_IMODE(own.stat().st_mode), own.stat().st_uid) == (0o700, os.geteuid())
            assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(own)
            assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{given or f'{own}/code'}/chosen_by_torch"
            assert os.environ["TRITON_CACHE_DIR"] == "mine"
        assert list(tmp_path.iterdir()) == [] and tempfile.gettempdir() == str(tmp_path)
        assert {name: os.environ.get(name) for name in names} == before
    ranks.stop()


@pytest.mark.nightly
def test_a_second_start_finds_all_code_in_the_folder_of_the_user(shapes_dir, tmp_path):
    def code(run: str) -> set[str]:
        argv = micro_run(shapes_dir, tmp_path / run, "--parallel.compile=true")
        own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code"), "TMPDIR": str(tmp_path / "tmp")}
        ran = script("train.py", *argv, ranks=2, timeout=600, **own)
        assert ran.returncode == 0, ran.stderr[-2000:]
        return {str(path) for path in Path(tmp_path / "code").rglob("*") if path.suffix in (".py", ".so")}

    (tmp_path / "tmp").mkdir()
    first = code("first")
    assert first and code("second") == first
    assert [path for path in (tmp_path / "tmp").iterdir() if not path.name.startswith("torchelastic_")] == []
