"""Files and folders that appear whole or not at all, lines that are appended, locks, and records as JSON lines.

What is being written lies beside its place as `.NAME.XXXXXXXX.flux_ref_partial`. No reader looks at such names.
"""

import codecs
import contextlib
import errno
import fcntl
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.formats import outside

PARTIAL = ".flux_ref_partial"  # how the names of what is being written end
POLL_S = 0.1
HELD = (errno.EAGAIN, errno.EACCES, errno.ENOENT)  # of a lock that another process has or had
MOST = 1e100  # of figures in records: sums, squares and ratios of these are finite, too


@contextlib.contextmanager
def whole(path: Path, is_new: bool = False) -> Iterator[Path]:
    """Gives the place for a new file or folder. It becomes `path` if the block ends well, else it is removed.

    A file replaces an older one of its name, unless it must be new. A folder must be new. Of several writers the last
    one wins; each writes to a place of its own. The bytes are on the disk before the name is. Files inside a folder
    are synced by who writes them.
    Raises: Refusal if what must be new exists; OSError, which names the file.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}")
    with naming(path, partial):
        try:
            _require_absent(path, is_new)
            yield partial
            sync(partial)
            _require_absent(path, is_new)  # another process may just have written it
            partial.rename(path)
            sync(path.parent)
        finally:
            remove(partial)


def _require_absent(path: Path, is_new: bool) -> None:
    if is_new and path.exists():
        raise Refusal(f"{path} exists; remove it or choose another name")


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
    with naming(path), open(path, "ab", buffering=0, opener=_never_waiting) as file:
        size = file.seek(0, os.SEEK_END)
        rest = content.encode()
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


@contextlib.contextmanager
def lock(path: Path, what: str, remedy: str, wait_s: float = 0.0) -> Iterator[str]:
    """Hold the lock at `path` in this block. It ends with its process, however that ends; a file that is left is none.

    The standard library's flock: the package filelock would fall back to a file that outlives its process.
    Gives "", or why there is no lock: the file system has none, or the file is another user's.
    Raises: Refusal of `what`, which another process is still doing after wait_s seconds.
    """
    deadline = time.monotonic() + wait_s
    descriptor = None
    reason = ""
    try:
        while (descriptor := _take(path)) is None:
            if time.monotonic() >= deadline:
                raise Refusal(f"{what} by another job; {remedy}")
            time.sleep(POLL_S)
    except OSError as error:
        reason = f"{path} cannot be locked ({error.strerror}), so another job would not be noticed"
    try:
        yield reason
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def _take(path: Path) -> int | None:
    """The descriptor of a lock, if this process has got it. Raises: OSError where there are no locks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.stat()):  # else the last holder has just removed it
            return descriptor
    except OSError as error:
        if error.errno not in HELD:
            os.close(descriptor)
            raise
    os.close(descriptor)
    return None


def records(path: Path, samples: float = math.inf, figures: tuple[str, ...] = ()) -> list[dict]:
    """The records of a .jsonl file, with `samples` up to a number; none if there is no file.

    figures: what else each must hold. Raises: Refusal for a damaged line. Text after the last newline is left out:
    a killed run may have left half a line.
    """
    content = outside.read_bytes(path, "records", outside.OWN_BYTES) if path.exists() else b""
    kept = []
    for number, line in enumerate(content.split(b"\n")[:-1], 1):
        record = json_object(line)
        if not all(is_number(record.get(key)) for key in ("samples", *figures)):
            want = ", ".join(("samples", *figures))
            raise Refusal(
                f"{path} line {number} is damaged (no record with {want}); mend it or set run.dir to another folder"
            )
        kept.append(record)
    return [record for record in kept if record["samples"] <= samples]


def write_records(path: Path, kept: list[dict]) -> None:
    """Write a .jsonl file anew."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))


def is_number(value: object) -> bool:
    """Whether a value from JSON is a number within +-MOST."""
    return type(value) in (int, float) and -MOST < value < MOST


def json_object(text: str | bytes) -> dict:
    """A JSON object; {} for anything else."""
    try:
        content = outside.parse_json(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
