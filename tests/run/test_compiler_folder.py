"""The folder of torch's compiler: one for each start, or the one that the user gives."""

import os
import stat
import tempfile
from contextlib import ExitStack

from flux_ref import compiler_folder, config, ranks


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
