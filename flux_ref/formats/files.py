"""Files, folders and lines that appear whole or not at all.

What is being written lies beside its place as `.NAME.flux_ref_partial`. Its claim, `.NAME.flux_ref_claim`, names the
one process that may write it. No reader looks at such names.
"""

import codecs
import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.formats import claim

# How the names of what is being written end.
CLAIM = ".flux_ref_claim"
PARTIAL = ".flux_ref_partial"


def claim_of(path: Path) -> Path:
    """The claim of the process that writes `path`."""
    return path.with_name(f".{path.name}{CLAIM}")


def partial_of(path: Path) -> Path:
    """The place where what becomes `path` is written."""
    return path.with_name(f".{path.name}{PARTIAL}")


@contextlib.contextmanager
def whole(path: Path, is_new: bool = False) -> Iterator[Path]:
    """Gives the place for a new file or folder. It becomes `path` if the block ends well, else it is removed.

    A file replaces an older one of its name, unless it must be new. A folder must be new.
    The bytes are on the disk before the name is. Files inside a folder are synced by who writes them.
    Raises: Refusal if another process writes the same, or if what must be new exists; OSError, which names the file.
    """
    partial = partial_of(path)
    remedy = "wait for it or choose another name"
    with naming(path), claim.hold(claim_of(path), f"{path} is being written", remedy):
        if is_new and path.exists():  # asked under the claim, since another process may just have written it
            raise Refusal(f"{path} exists; remove it or choose another name")
        remove(partial)  # a process that was killed may have left one
        try:
            yield partial
            sync(partial)
            partial.rename(path)
            sync(path.parent)
        finally:
            remove(partial)


def write_whole(path: Path, text: str) -> None:
    """Write a text file that is there whole or not at all. Raises: OSError."""
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


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block names a file. The system's errors of writing, such as a full disk, name none.

    An error of the claim or of the partial file is told of the file that the user knows.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(partial_of(path)), str(claim_of(path))):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def append(path: Path, content: str | bytes, on_disk: bool = False) -> None:
    """Append text or bytes to a file. on_disk: wait until it is on the disk. After an OSError the file is as before."""
    with naming(path), open(path, "ab", buffering=0, opener=_never_waiting) as file:
        size = file.seek(0, os.SEEK_END)
        rest = content.encode() if isinstance(content, str) else content
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[file.write(rest) :]
            if on_disk:
                os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(size)
            raise


def _never_waiting(path: str, flags: int) -> int:
    """Open a file for `open`. A pipe that nobody reads is an OSError; without O_NONBLOCK it would wait for ever."""
    return os.open(path, flags | os.O_NONBLOCK, 0o666)


def decode_text(content: bytes) -> str:
    """Text that people have written: UTF-8, or UTF-16 that begins with its mark. A mark is left out.

    Raises: ValueError for other bytes, and for NULs: UTF-16 without its mark shows as such.
    """
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if is_wide else "utf-8-sig")
    if "\0" in text:
        raise ValueError("it holds NULs, as UTF-16 without its mark would")
    return text
