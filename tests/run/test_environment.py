"""What a run says of the code that runs, and the folder of its compiler."""

import os
import stat
import subprocess
import tempfile
from contextlib import ExitStack
from pathlib import Path

from conftest import own_settings

from flux_ref import config, ranks
from flux_ref.report import commit
from flux_ref.sharding import choose_compiler_folder

ME = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}

COMPILED = config.Config(parallel=config.ParallelConfig(compile=True))


def test_the_commit_is_told_without_writing_to_the_repository(tmp_path):
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | ME).stdout

    assert commit(tmp_path) == ""
    git("init", "-q")
    assert commit(tmp_path) == ""  # no commit yet
    code, index = tmp_path / "code.py", tmp_path / ".git" / "index"
    code.write_text("1")
    git("add", "code.py")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")[:12]
    for content, want in (("1", head), ("2", f"{head}+")):
        code.write_text(content)
        os.utime(code, (10, 10))  # git would like to note the time in its index
        before = index.read_bytes()
        assert commit(tmp_path) == want and index.read_bytes() == before
        (tmp_path / "new.py").write_text("not in the repository")


def test_a_start_has_a_compiler_folder_of_its_own_which_ends_with_it(tmp_path: Path, monkeypatch):
    world = ranks.start(config.ParallelConfig())
    for given in ("", "/mine"):
        with own_settings():
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given)
            with ExitStack() as stack:
                choose_compiler_folder(COMPILED, world, stack)
                (own,) = tmp_path.iterdir()
                assert (stat.S_IMODE(own.stat().st_mode), own.stat().st_uid) == (0o700, os.geteuid())
                assert os.environ["TMPDIR"] == tempfile.gettempdir() == str(own)
                assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{given or own}/chosen_by_torch"
            assert list(tmp_path.iterdir()) == []
    ranks.stop()
