"""Reading with a limit; files and folders that appear whole or not at all; lines that are appended; locks; records.

What is being written lies beside its place as `.NAME.XXXXXXXX.flux_ref_partial`. No reader looks at such names.
"""

import codecs
import contextlib
import fcntl
import json
import math
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from flux_ref.errors import Refusal

TEXT_BYTES = 64 * 2**20  # no config, index or list of people is longer
OWN_BYTES = 2**31  # of a list that a data set may have: a line for each picture
PARTIAL = ".flux_ref_partial"  # how the names of what is being written end
POLL_S = 0.1
MOST = 1e100  # of figures in records: sums, squares and ratios of these are finite, too


@contextlib.contextmanager
def opened(path: Path, what: str) -> Iterator[BinaryIO]:
    """A regular file, open for reading. what: its kind, for the message. Raises: Refusal, also while it is read.

    Pipes and devices are refused: some never end, and some wait for ever.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise Refusal(f"{what} {path} is not a regular file; give a file")
            yield file
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        raise Refusal(f"{what} {path}: {getattr(error, 'strerror', None) or error}") from None


def read_bytes(path: Path, what: str, most: int = TEXT_BYTES) -> bytes:
    """The bytes of a regular file of at most `most`. what: its kind, for the message. Raises: Refusal."""
    with opened(path, what) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise Refusal(f"{what} {path} is larger than {most:,} bytes; give the right file")
        return file.read()


def read_text(path: Path, what: str, most: int = TEXT_BYTES) -> str:
    """The text of a regular file of at most `most` bytes, as `decode_text` reads it. Raises: Refusal."""
    try:
        return decode_text(read_bytes(path, what, most))
    except ValueError as error:
        raise Refusal(f"{what} {path} is not UTF-8: {error}; save it as UTF-8") from None


def read_json(path: Path, what: str) -> dict:
    """The JSON object in a file. Raises: Refusal."""
    try:
        content = json.loads(read_bytes(path, what))
    except ValueError as error:
        raise Refusal(f"{what} {path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise Refusal(f"{what} {path} holds no JSON object")
    return content


def decode_text(content: bytes) -> str:
    """Text that people have written: UTF-8, or UTF-16 that begins with its mark. A mark is left out.

    Raises: ValueError for other bytes, and for NULs: UTF-16 without its mark shows as such.
    """
    is_wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if is_wide else "utf-8-sig")
    if "\0" in text:
        raise ValueError("it holds NULs, as UTF-16 without its mark would")
    return text


@contextlib.contextmanager
def whole(path: Path, is_new: bool = False) -> Iterator[Path]:
    """Gives the place for a new file or folder. It becomes `path` if the block ends well, else it is removed.

    A file replaces an older one of its name; a folder does not. Of several writers the last one wins; each writes to a
    place of its own. The bytes are on the disk before the name is. Files inside a folder are synced by who writes them.
    is_new: nothing may be at `path` when the block begins.
    Raises: Refusal if something is; OSError, which names the file.
    """
    if is_new and path.exists():
        raise Refusal(f"{path} exists; remove it or choose another name")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    with naming(path, partial):
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
def naming(path: Path, partial: Path | None = None) -> Iterator[None]:
    """An OSError of the block names a file. The system's errors of writing, such as a full disk, name none.

    partial: what lies in its place meanwhile; the user knows only `path`.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(partial)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def append(path: Path, content: str, on_disk: bool = False) -> None:
    """Append text to a file. on_disk: wait until it is on the disk. After an OSError the file is as before."""
    with naming(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        rest = content.encode()
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[file.write(rest) :]
            if on_disk:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise


@contextlib.contextmanager
def lock(path: Path, what: str, remedy: str, wait_s: float = 0.0) -> Iterator[str]:
    """Hold the lock at `path` in this block. It ends with its process, however that ends; a file that is left is none.

    The standard library's flock: the package filelock would fall back to a file that outlives its process.
    Gives "", or why there is no lock: the file system has none, or the file is another user's.
    Raises: Refusal of `what`, which another process is still doing after wait_s seconds.
    """
    deadline = time.monotonic() + wait_s
    try:
        while (file := _taken(path)) is None:
            if time.monotonic() >= deadline:
                raise Refusal(f"{what} by another job; {remedy}")
            time.sleep(POLL_S)
    except OSError as error:
        yield f"{path} cannot be locked ({error.strerror}), so another job would not be noticed"
        return
    with file:
        try:
            yield ""
        finally:
            with contextlib.suppress(OSError):  # a disk that is read-only now; the file locks nobody out
                path.unlink()


def _taken(path: Path) -> BinaryIO | None:
    """The locked file; None if another process has it. Raises: OSError where there are no locks."""
    file = open(os.open(path, os.O_RDONLY | os.O_CREAT, 0o666), "rb")  # open for writing, it would hold a disk busy
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else the last holder has just removed it
            return file
    file.close()
    return None


def records(path: Path, samples: float = math.inf, figures: tuple[str, ...] = ()) -> list[dict]:
    """The records of a .jsonl file, with `samples` up to a number; none if there is no file.

    figures: what else each must hold. Raises: Refusal for a damaged line. Text after the last newline is left out:
    a killed run may have left half a line.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found = [json_object(line) for line in lines]
    want = ("samples", *figures)
    for number, record in enumerate(found, 1):
        if not all(is_number(record.get(key)) for key in want):
            rule = f"no record with {', '.join(want)}"
            raise Refusal(f"{path} line {number} is damaged ({rule}); mend it or set run.dir to another folder")
    return [record for record in found if record["samples"] <= samples]


def write_records(path: Path, kept: list[dict]) -> None:
    """Write a .jsonl file anew."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))


def is_number(value: object) -> bool:
    """Whether a value from JSON is a number within +-MOST."""
    return type(value) in (int, float) and -MOST < value < MOST


def json_object(text: str | bytes) -> dict:
    """A JSON object; {} for anything else."""
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
