"""What a run says of the code that runs, and the folder of its compiler."""

import os
import stat
import subprocess

import torch
from conftest import own_settings, refusal
from torch._inductor.runtime.cache_dir_utils import cache_dir

from flux_ref import config, ranks
from flux_ref.report import commit
from flux_ref.sharding import choose_compile_cache

ME = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}

COMPILED = config.Config(compute=config.ComputeConfig(compile=True))


def test_the_commit_is_told_without_writing_to_the_repository(tmp_path):
    def git(*words):
        command = ["git", "-C", str(tmp_path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | ME).stdout

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


def test_compiled_code_is_kept_in_a_folder_of_the_user_and_of_nobody_else(tmp_path, monkeypatch):
    world = ranks.start(config.ParallelConfig())
    host = f"flux_ref/{os.uname().nodename}_{torch.__version__}"
    for home, given, want in (("", "", f".cache/{host}"), ("cache", "", f"cache/{host}"), ("cache", "mine", "mine")):
        with own_settings():
            monkeypatch.setenv("HOME", str(tmp_path))
            monkeypatch.setenv("XDG_CACHE_HOME", home and str(tmp_path / home))
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", given and str(tmp_path / given))
            choose_compile_cache(COMPILED, world)
            own = tmp_path / want / "chosen_by_torch"
            assert stat.S_IMODE(own.stat().st_mode) == 0o700 and os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(own)
            assert cache_dir() == str(own)
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    assert "belongs to another user" in refusal(choose_compile_cache, COMPILED, world)
    ranks.stop()
