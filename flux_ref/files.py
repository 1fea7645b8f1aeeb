"""Reading regular files; files and folders that appear whole or not at all; lines that are appended; locks; records.

What is being written lies beside its place, under a hidden name that ends in `.flux_ref_partial`. No reader looks at
such names.
"""

import codecs
import contextlib
import errno
import fcntl
import glob
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from flux_ref.cli import ProgressCount, Refusal, notice

PARTIAL = ".flux_ref_partial"  # how the names of what is being written end


def read_bytes(path: Path) -> bytes:
    """The bytes of a regular file. Raises: Refusal, OSError."""
    if not path.is_file():  # a pipe would wait for ever
        raise Refusal(f"{path.absolute()} is no file; give a file")
    return path.read_bytes()


def read_text(path: Path) -> str:
    """The text of a file. Raises: Refusal, OSError."""
    try:
        return decode(read_bytes(path))
    except ValueError as error:
        raise Refusal(f"{path} is not UTF-8: {error}; save it as UTF-8") from None


def decode(content: bytes) -> str:
    """Text that people have written: UTF-8, or UTF-16 that begins with its mark. A mark is left out.

    Raises: ValueError for other bytes, and for NULs: UTF-16 without its mark shows as such.
    """
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if is_wide else "utf-8-sig")
    if "\0" in text:
        raise ValueError("it holds NULs, as UTF-16 without its mark would")
    return text


def matching(folder: Path, pattern: str) -> list[Path]:
    """What lies in a folder under names of a pattern, sorted; nothing if there is no folder.

    Path.glob would leave out what it may not read. Raises: OSError.
    """
    try:
        return sorted(folder / name for name in os.listdir(folder) if fnmatch(name, pattern))
    except (FileNotFoundError, NotADirectoryError):
        return []


def reraise(error: OSError) -> NoReturn:
    """For os.walk, which would leave out a folder that it may not read."""
    raise error


def json_object_or_empty(text: str | bytes) -> dict:
    """A JSON object; {} for anything else."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}


@contextlib.contextmanager
def whole(path: Path, is_new: bool = False) -> Iterator[Path]:
    """Gives the place for a new file or folder. It becomes `path` if the block ends well, else it is removed.

    A file replaces an older one of its name; a folder does not. Of several writers the last one wins; each writes to a
    place of its own. The bytes are on the disk before the name is. Files inside a folder are synced by who writes them.
    is_new: nothing may be at `path` when the block begins.
    Raises: Refusal if something is; OSError, which names the file.
    """
    if is_new and path.exists():
        raise Refusal(f"{path} exists; choose another name")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    with naming(path):
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


def write_png(path: Path, image: Any) -> None:
    """Write a picture of PIL that is there whole or not at all. Raises: OSError."""
    with whole(path) as partial:
        image.save(partial, "PNG")


def remove(path: Path) -> None:
    """Delete a file or a folder with all that is in it, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_partial_files(folder: Path, name: str = "") -> None:
    """Remove what killed processes left in a folder: all unfinished files, or those that would become `name`.

    Nobody else may be writing such files now. What cannot be removed stays.
    """
    for path in matching(folder, f".{glob.escape(name)}.????????{PARTIAL}" if name else f".*{PARTIAL}"):
        with contextlib.suppress(OSError):
            remove(path)


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:  # shares of Windows and some FUSE file systems sync no folder
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block names a file. The system's errors of writing, such as a full disk, name none."""
    try:
        yield
    except OSError as error:
        if not error.filename or error.filename.endswith(PARTIAL):
            error.filename = str(path)
        raise


def append(path: Path, content: str, on_disk: bool = False) -> None:
    """Append text to a file. on_disk: wait until it is on the disk. Raises: OSError, which names the file."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        if on_disk:
            os.fsync(file.fileno())


@contextlib.contextmanager
def lock(path: Path, what: str, waits: bool = False) -> Iterator[None]:
    """Hold the lock at `path` in this block. It ends with its process, however that ends; the empty file stays.

    The standard library's flock: the package filelock would fall back to a file that outlives its process.
    what: what is in use, for the message. waits: until another job is done, in place of a refusal.
    Where there are no locks, one line says so, and nothing is locked. Raises: Refusal.
    """
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("ab"))  # NFS locks no file that is open for reading
            while not _is_locked(file):
                if not waits:
                    raise Refusal(f"{what} is in use by another job; wait for it, or choose another folder")
                notice(f"{what} is in use by another job; this job waits for it")
                time.sleep(0.2)
                ProgressCount.total += 1  # the job that has the lock watches itself
        except OSError as error:
            notice(f"warning: {path} cannot be locked ({error.strerror}), so another job would not be noticed")
        yield


def _is_locked(file: BinaryIO) -> bool:
    """Whether this process has the lock now, of a file that it has opened."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def records(path: Path, figure: str) -> list[dict]:
    """The records of a .jsonl file; none if there is no file.

    figure: a name under which each record has a number.
    Raises: Refusal for a damaged line. Text after the last newline is left out: a killed run may have left half a line.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found = list(map(json_object_or_empty, lines))
    for number, record in enumerate(found, 1):
        if not all(type(record.get(name)) in (int, float) for name in ("samples", figure)):
            raise Refusal(
                f"{path}, line {number} is no record with the numbers samples and {figure}; mend it or set run.dir to"
                " another folder"
            )
    return found
