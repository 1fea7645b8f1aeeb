"""Files and folders that appear whole or not at all, and locks on them.

What is being written lies beside its place as `.NAME.partial`. No reader looks at such a name.
"""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO


def partial_of(path: Path) -> Path:
    """The place where what becomes `path` is written."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Gives the place for a new file or folder. It becomes `path` if the block ends well, else it is removed.

    A file replaces an older one of its name. A folder does not: an OSError is raised if `path` holds something.
    The bytes are on the disk before the name is. Files inside a folder are synced by who writes them.
    """
    partial = partial_of(path)
    remove(partial)  # a process that was killed may have left one
    try:
        yield partial
        sync(partial)
        partial.rename(path)
        sync(path.parent)
    finally:
        remove(partial)


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is there whole or not at all."""
    with whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def remove(path: Path) -> None:
    """Delete a file or a folder with all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def locked(path: Path) -> IO | None:
    """Lock a file for this process, and make it if it is missing. None if another process holds or removes it.

    The lock lasts until the returned file is closed or the process ends.
    """
    file = open(path, "a+", encoding="utf-8", errors="replace", opener=_open_no_link)
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    file.close()
    return None


def _open_no_link(path: str, flags: int) -> int:
    """Open a file for the one who locks it, who may cut it off: a link could lead to a file of another."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
