"""How a command of one process ends: an error becomes one line and an exit code. For ranks see cli.py."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from flux_ref.errors import Fault, Interrupted, Refusal, Stop
from flux_ref.formats.outside import BROKEN_DISK, one_line, told


def attempt(name: str, task: Callable[[], int]) -> int:
    """Run a command of one process; an error becomes one line. Returns the exit code. For ranks see run/cli.py."""
    make_terminal_patient()
    try:
        return task()
    except (Refusal, Fault, KeyboardInterrupt) as error:
        stop = Interrupted(signal.SIGINT) if isinstance(error, KeyboardInterrupt) else error
        complain(name, stop)
        give_up_full_streams()
        return stop.exit_code
    except OSError as error:
        complain(name, error)
        give_up_full_streams()
        return Fault.exit_code if error.errno in BROKEN_DISK and error.filename else Refusal.exit_code


class Terminal:
    """A stream whose reader may go away, as `| tee` does at Ctrl-C. What follows is then written nowhere.

    kind: of errors after which this is so; OSError also for a full disk.
    """

    def __init__(self, stream: TextIO, kind: type[OSError] = BrokenPipeError):
        self.stream = stream
        self.kind = kind

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._patiently(self.stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._patiently(self.stream.flush)

    def _patiently(self, do: Callable[..., object], *args: str) -> None:
        try:
            do(*args)
        except self.kind:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


@contextmanager
def lasting_terminal() -> Iterator[None]:
    """In this block nothing ends if the program that reads stdout or stderr ends."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(Terminal, before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def make_terminal_patient() -> None:
    """Escape what a terminal or a file in another encoding than UTF-8 cannot show. A closed stream shows nothing."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # as after `>&-`
            setattr(sys, name, open(os.devnull, "w"))
        if hasattr(stream := getattr(sys, name), "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def complain(name: str, error: Stop | OSError | str) -> None:
    """Print the one line with which a command ends. A full stderr takes no line; the exit code still tells."""
    line = one_line(f"{name}: {told(error) if isinstance(error, OSError) else error}")
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun prints it at the end of its own report
        cause = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": cause}))


def give_up_full_streams() -> None:
    """Close full streams. Otherwise Python writes to them again at its end, and changes the exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
