"""launch/stage.sh on one machine; test_slurm.py runs it on several nodes."""

import hashlib
import os
import shutil
import subprocess

import pytest
from conftest import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("rsync"), reason="no rsync: apt-get install rsync")


def tree(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def stage(src, dst, says=""):
    """The exit code."""
    done = subprocess.run([ROOT / "launch" / "stage.sh", src, dst], capture_output=True, text=True, timeout=60)
    assert says in done.stdout + done.stderr
    return done.returncode


@pytest.fixture
def src(tmp_path):
    src = tmp_path / "src"
    for name, size in (("train/a b.tar", 3_000_000), ("val/c.tar", 700), ("train/.nv-meta/index", 0)):
        (src / name).parent.mkdir(parents=True, exist_ok=True)
        (src / name).write_bytes(os.urandom(size))
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in tree(src).items()]
    (src / "manifest.sha256").write_text("".join(lines))
    return src


def test_a_copy_is_whole_goes_on_and_is_checked(src, tmp_path):
    dst, partial, shard = tmp_path / "local" / "set", tmp_path / "local" / "set.partial", "train/a b.tar"
    assert stage(src, dst, "is whole") == 0 and tree(dst) == tree(src)
    inode = (dst / "val/c.tar").stat().st_ino
    dst.rename(partial)  # as after a stop, with half a file
    (partial / shard).write_bytes(b"half")
    assert stage(src, dst) == 0 and tree(dst) == tree(src) and not partial.exists()
    assert (dst / "val/c.tar").stat().st_ino == inode, "what is there is not copied again"
    times = (dst / shard).stat()
    (dst / shard).write_bytes(bytes(3_000_000))  # damage that neither size nor time shows
    os.utime(dst / shard, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert stage(src, dst, f"{shard}: FAILED") == 1 and not dst.exists()


def test_what_could_be_lost_or_trained_on_by_mistake_is_refused(src, tmp_path):
    dst = tmp_path / "dst"
    assert stage(src, src / "below", "lie inside each other") == stage(tmp_path / "none", dst, "give SRC") == 2
    (dst / "train").mkdir(parents=True)
    (dst / "train" / "old.tar").write_text("mine")
    assert stage(src, dst, "train/old.tar is not in") == 2 and (dst / "train" / "old.tar").read_text() == "mine"
