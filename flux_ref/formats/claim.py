"""A claim: a small file that names the one process which may write at a place. It needs no locks of the file system.

A process makes the file exclusively, so one of two processes gets the claim. The file stays when its process is killed.
On the same host the next process sees this and takes the claim. A process on another host cannot see it: it is
refused, and `owner` says which file to delete.
"""

import contextlib
import errno
import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.formats import outside

POLL_S = 0.1
NAMELESS_S = 1.0  # a claim that names no process is damaged, or its process is about to write the name
MOST_BYTES = 4096
LOCAL = "/dev/shm"  # a folder with locks: processes that take over a claim are on one host


@dataclass(frozen=True)
class Claim(contextlib.AbstractContextManager):
    """A claim of this process until `close`. `take` makes claims."""

    path: Path
    content: str

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the claim up. A claim that a user has deleted may be another process's by now."""
        with contextlib.suppress(OSError):
            if _read(self.path) == self.content:
                self.path.unlink()


def take(path: Path, wait_s: float = 0.0) -> Claim | None:
    """Claim a path for this process. None if another process has the claim after wait_s seconds. Raises: OSError."""
    pid = os.getpid()
    who = f"process {pid} on {os.uname().nodename} since {time.strftime('%Y-%m-%d %H:%M:%S %z')}"
    own = Claim(path, f"{who}\n{_place()}\n{pid}\n{_started(pid)}\n")
    begin = time.monotonic()
    while not _make(own):
        if _has_ended(path):
            _remove_ended(path)
            continue
        waited = time.monotonic() - begin
        if waited >= wait_s or (waited >= NAMELESS_S and not _owner(path)):
            return None
        time.sleep(POLL_S)
    return own


def hold(path: Path, what: str, remedy: str, wait_s: float = 0.0) -> Claim:
    """`take`, or a Refusal of `what`, which another process is doing. Raises: OSError."""
    own = take(path, wait_s)
    if own is None:
        raise Refusal(f"{what} by another job ({owner(path)}); {remedy}")
    return own


def owner(path: Path) -> str:
    """The process that has a claim, and what to delete if it has ended, in words."""
    return outside.printable(f"{_owner(path) or 'an unknown process'}; if it has ended, delete {path}")


def _owner(path: Path) -> str:
    return _read(path).partition("\n")[0]


def _make(own: Claim) -> bool:
    """Write a claim unless there is one. Returns whether there was none. Raises: OSError."""
    try:
        file = own.path.open("xb", buffering=0)
    except FileExistsError:
        return False
    rest = own.content.encode()
    with file:
        try:
            while rest:  # a disk that is nearly full takes a part
                rest = rest[file.write(rest) :]
        except OSError as error:
            own.path.unlink()
            raise OSError(error.errno, error.strerror, str(own.path)) from None
    return True


def _read(path: Path) -> str:
    """What a claim says. "" if it is gone or no file."""
    with contextlib.suppress(Refusal):
        return outside.read_bytes(path, "claim", MOST_BYTES).decode(errors="replace")
    return ""


def _has_ended(path: Path) -> bool:
    """Whether the process of a claim has ended. False if this process cannot know: on another host or container."""
    _, place, process, started, *_ = [*_read(path).split("\n"), "", "", "", ""]
    pid = outside.whole_number(process, 1, 2**31 - 1)
    if not place or place != _place() or pid is None:
        return False
    try:
        os.kill(pid, 0)  # sends nothing
    except OSError as error:
        return error.errno == errno.ESRCH  # else it is another user's, and /proc may hide it
    return _started(pid) != started


def _remove_ended(path: Path) -> None:
    """Remove a claim whose process has ended, unless another process of this host has taken it meanwhile."""
    descriptor = os.open(LOCAL, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # a process that is killed gives it back
        if _has_ended(path):
            path.unlink()
    finally:
        os.close(descriptor)


def _place() -> str:
    """This boot of this host and this container, where a number names one process. "" on systems without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{os.uname().nodename} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process began, in ticks since the boot. "" if it has ended."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return ""
    return "" if state in "ZX" else rest[18]
