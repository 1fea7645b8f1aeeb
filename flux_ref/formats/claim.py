"""A claim: a small file that names the one process which may write beside it. It needs no locks of the file system.

Some shared disks have no locks, and on others each host sees only its own locks. So the owner writes its name into the
file, and a new count every BEAT_S seconds. On the owner's host a claim ends with the owner's process. On other hosts
it ends when its count has stood still for LEASE_S seconds. An owner that was frozen for so long may find that its claim
was taken; its process then ends.
"""

import contextlib
import json
import os
import secrets
import sys
import threading
import time
from pathlib import Path
from typing import IO

from flux_ref.errors import Fault, Refusal
from flux_ref.formats import files, jsonl, outside

BEAT_S, LEASE_S = 5.0, 90.0  # some network disks show a new count after up to 60 seconds
SETTLE_S = 0.3  # two processes that take over the same claim write it within this time
POLL_S = 0.1
MOST_BYTES = 4096


class Claim:
    """A claim of this process until `close`."""

    def __init__(self, path: Path):
        """`take` makes claims."""
        pid = os.getpid()
        self.path = path
        self.count = 0
        self.closed = threading.Event()
        self.name = {"owner": f"process {pid} on {os.uname().nodename}", "nonce": secrets.token_hex(8)}
        self.name |= {"place": _place(), "pid": pid, "started": _started(pid)}
        self.thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> "Claim":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the claim up."""
        self.closed.set()
        self.thread.join(BEAT_S)
        with contextlib.suppress(OSError):
            if self._is_in(_content(self.path)):
                self.path.unlink()

    def _write(self, file: IO) -> None:
        """Write name and count, always equally many bytes."""
        self.count += 1
        file.seek(0)
        file.write(json.dumps(self.name | {"count": f"{self.count:012}"}).encode())
        file.flush()
        os.fsync(file.fileno())

    def _make(self) -> bool:
        """Write the claim unless there is one. Returns whether there was none. Raises: OSError."""
        try:
            with files.naming(self.path), self.path.open("xb") as file:
                try:
                    self._write(file)
                except OSError:
                    self.path.unlink()
                    raise
        except FileExistsError:
            return False
        return True

    def _replace(self) -> bool:
        """Put the claim in the place of one that has ended. Returns whether no other process did the same."""
        own = self.path.with_name(f"{self.path.name}.{self.name['nonce']}")
        try:
            with files.naming(self.path), own.open("xb") as file:
                self._write(file)
            own.replace(self.path)
        finally:
            own.unlink(missing_ok=True)
        time.sleep(SETTLE_S)
        return self._is_in(_content(self.path))

    def _is_in(self, content: bytes) -> bool:
        return _parsed(content).get("nonce") == self.name["nonce"]

    def _keep(self) -> None:
        """Renew the claim. Each time this looks first whether it is still there, so one of two owners goes on."""
        while not self.closed.wait(BEAT_S):
            with contextlib.suppress(OSError):  # the disk is full or away: what the owner writes will tell
                if not self.path.exists() and self._make():
                    continue
                with self.path.open("r+b") as file:
                    content = file.read(MOST_BYTES)
                    if self._is_in(content):
                        self._write(file)
                    elif other := _parsed(content).get("owner"):  # else it is just being written
                        self._leave(outside.printable(other))

    def _leave(self, other: str) -> None:
        print(f"{self.path}: {other} has taken this claim; this process ends", file=sys.stderr, flush=True)
        os._exit(Fault.exit_code)


def take(path: Path, wait_s: float = 0.0) -> Claim | None:
    """Claim a path for this process. None if another process has the claim after wait_s seconds. Raises: OSError.

    It takes LEASE_S seconds longer to see that an owner on another host has ended without a word.
    """
    own = Claim(path)
    begin = time.monotonic()
    seen = None
    since = begin
    moves = False
    while not own._make():
        asked = time.monotonic()
        content = _content(path)
        now = time.monotonic()
        if content != seen:
            seen, since, moves = content, now, seen is not None
        elif now - asked > BEAT_S:
            since = now  # the disk stalled, so the owner may have written nothing
        lives = _lives(_parsed(content))
        if lives is False or now - since > LEASE_S:
            if own._replace():
                break
        elif (lives or moves) and now - begin > wait_s:
            return None
        time.sleep(POLL_S)
    own.thread.start()
    return own


def owner(path: Path) -> str:
    """The process that has a claim, in words."""
    return outside.printable(_parsed(_content(path)).get("owner", "unknown"))


def _content(path: Path) -> bytes:
    """The bytes of a claim. Empty if it is gone or no file."""
    with contextlib.suppress(Refusal):
        return outside.read_bytes(path, "claim", MOST_BYTES)
    return b""


def _parsed(content: bytes) -> dict:
    """What a claim says. {} for anything else."""
    return jsonl.parsed(content) or {}


def _lives(name: dict) -> bool | None:
    """Whether an owner is running. None if this process cannot see it: on another host or in another container."""
    pid = name.get("pid")
    if not _place() or name.get("place") != _place() or type(pid) is not int or not 0 < pid < 2**31:
        return None
    try:
        os.kill(pid, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user, so /proc may hide it
        return None
    return _started(pid) == name.get("started")


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
