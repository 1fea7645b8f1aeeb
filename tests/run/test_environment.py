"""What environment.json says of the code that runs, and that asking for it changes nothing."""

import os
import subprocess
from pathlib import Path

from flux_ref.environment import commit

ME = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}


def test_the_commit_is_told_without_writing_to_the_repository(tmp_path):
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **ME}).stdout

    def files() -> dict[Path, tuple[bytes, int]]:
        return {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in tmp_path.rglob("*") if path.is_file()}

    assert commit(tmp_path) == ""
    git("init", "-q")
    assert commit(tmp_path) == ""  # no commit yet
    (tmp_path / "code.py").write_text("1")
    git("add", "code.py")
    git("commit", "-qm", "one")
    head = git("rev-parse", "HEAD")[:12]
    for content, touched, want in (("1", 10, head), ("2", 20, f"{head}+")):
        (tmp_path / "code.py").write_text(content)
        os.utime(tmp_path / "code.py", (touched, touched))  # git would like to note the time in its index
        before = files()
        assert commit(tmp_path) == want
        assert files() == before
        (tmp_path / "new.py").write_text("not in the repository")
