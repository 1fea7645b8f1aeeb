"""How a command reads its options, speaks, and ends: an error becomes one line and an exit code. Needs no torch.

Exit codes: 0 done, 2 refused, 3 a fault stopped it, 128 + the number of a signal.
"""

import argparse
import errno
import functools
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn

from tqdm import tqdm

BROKEN_DISK = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,  # this and the rest: of a network
    errno.ETIMEDOUT,
    errno.ENOTCONN,
)
Say = Callable[[str], None]  # prints a line
Mark = Callable[[str], None]  # takes the name of what a rank does now; it may raise, on all ranks alike
LINGER_S = 5.0  # torchrun ends all ranks when one ends; the rank that knows the reason must print it before


def no_op_mark(place: str) -> None:
    """The Mark of those who watch nothing."""


class Stop(Exception):
    """A command ends early. The subclasses say how.

    alone: only this rank has the error, so this rank prints it. Otherwise all ranks raise it and one of each
    node prints it.
    """

    exit_code = 3

    def __init__(self, message: str, alone: bool = False):
        super().__init__(message)
        self.alone = alone


class Refusal(Stop):
    """The request cannot be honoured. Nothing has been trained."""

    exit_code = 2


class Fault(Stop):
    """Something broke while the command was under way."""


class Interrupted(Stop):
    """All ranks stop the command at one point, after a signal."""

    def __init__(self, number: int):
        """number: of the signal."""
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class Options(argparse.ArgumentParser):
    """A parser whose help is a module's docstring. What is wrong is refused in one line."""

    def __init__(self, prog: str, description: str, **others):
        super().__init__(
            prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **others,
        )
        self.register("type", Path, lambda text: Path(text).expanduser())  # shells leave --out=~/x as it is

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}; see --help")


def run(name: str, task: Callable[[list[str]], int], argv: list[str]) -> int:
    """Run a command and return its exit code. name: of the command, for its message."""
    with redirect_stdout(BrokenPipeSafeStream(sys.stdout)), redirect_stderr(BrokenPipeSafeStream(sys.stderr)):
        try:
            code = task(argv)
            sys.stdout.flush()
            return code
        except (Exception, KeyboardInterrupt) as error:
            stop = in_words(error)
            with suppress(OSError):  # standard error may be what is full
                if stop:
                    complain(name, stop)
                else:
                    traceback.print_exc()  # a defect of flux_ref
            return (stop or Fault).exit_code


def exit_now(code: int) -> NoReturn:
    """End the process at once: static destructors of a backend's threads can abort a finished run, and after a fault
    other ranks may wait in a collective.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            BrokenPipeSafeStream(stream).flush()
    os._exit(code)


def in_words(error: BaseException) -> Stop | None:
    """What an error means to a user; None for a defect of flux_ref."""
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, Stop):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(signal.SIGINT)
    if isinstance(error, ModuleNotFoundError):
        return Refusal(f"{error.name} is not here; install it, or change the key or option that asks for it")
    if isinstance(error, OSError):
        kind = Fault if error.errno in BROKEN_DISK else Refusal
        return kind(describe_os_error(error), alone=True)
    if isinstance(error, MemoryError) or re.search(r"out of memory|allocate memory", str(error)):
        text += "; free memory, or lower train.micro_batch, eval.batch or pictures.count"
        return Fault(f"out of memory: {text}", alone=True)
    if re.search(r"find C compiler|C\+\+ compiler found", text):  # Triton's words and Inductor's
        return Refusal(f"{text}; install gcc and g++, or set compute.compile=false")
    if isinstance(error, RuntimeError) and re.search(r"peer|Connection|[Tt]imed out", str(error)):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(LINGER_S)  # another rank broke and prints the reason; meanwhile torchrun ends this rank
        return Fault(f"lost another rank: {text}", alone=True)
    return None


@contextmanager
def os_errors_as_faults() -> Iterator[None]:
    """For a block that trains: an OSError in it is a fault, since a start may find another disk."""
    try:
        yield
    except OSError as error:
        raise Fault(describe_os_error(error), alone=True) from error


def complain(name: str, stop: Stop) -> None:
    """Print the one line with which a command ends, on the rank that has to say it."""
    if not stop.alone and os.environ.get("LOCAL_RANK", "0") != "0":  # one rank of each node prints
        if stop.exit_code != 128 + signal.SIGINT:  # for Ctrl-C torchrun waits until all ranks have ended
            time.sleep(LINGER_S)
        return
    who = f"rank {os.environ['RANK']}: " if stop.alone and "RANK" in os.environ else ""
    print(one_line(f"{name}: {who}{stop}"), file=sys.stderr, flush=True)


@functools.cache
def notice(line: str) -> None:
    """Tell once what is done otherwise than a user may think."""
    if os.environ.get("RANK", "0") == "0":
        print(one_line(line), file=sys.stderr, flush=True)


class BrokenPipeSafeStream:
    """A stream whose reader may go away, as `| tee` does at Ctrl-C. What follows is then written nowhere.

    stream: None is one that was closed at the start, as by `>&-`. Letters that its encoding lacks are written as in
    \\xe9.
    """

    def __init__(self, stream: Any):
        self.stream = stream or open(os.devnull, "w")
        self.stream.reconfigure(errors="backslashreplace")

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._patiently(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._patiently(self.stream.flush)

    def _patiently(self, do: Callable[[], object]) -> None:
        try:
            do()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            if error.errno not in (errno.EPIPE, errno.EIO):  # of a pipe and of a terminal
                error.filename = self.stream.name
                raise


class ProgressCount:
    """What this process has done: items of loops over files, bytes of weights. The hang watch sees whether it grows."""

    total = 0


def count_progress(items: Iterable) -> Iterator:
    """The items of a loop over files. Each counts as progress, so a long loop is no hang."""
    for item in items:
        yield item
        ProgressCount.total += 1


def progress(iterable=None, **options: Any) -> tqdm:
    """tqdm, with a line every ten seconds in a log file, over items that count as progress; options are tqdm's."""
    if hasattr(iterable, "__len__"):
        options.setdefault("total", len(iterable))
    iterable = iterable and count_progress(iterable)
    if not sys.stderr.isatty():
        options |= {"mininterval": 10.0, "position": 0, "file": LogFileBar()}
    return tqdm(iterable, **options)


class LogFileBar:
    """Standard error for a bar in a log file: a line for each state, where a terminal's cursor would move."""

    newest = ""

    def write(self, text: str) -> None:
        line = text.strip()
        if line and line != self.newest:
            print(line, file=sys.stderr, flush=True)
            self.newest = line

    def flush(self) -> None:
        """Nothing waits."""


def describe_os_error(error: OSError) -> str:
    """An error of the system in words: the file, what is wrong and what to do."""
    if error.filename is None:
        return str(error.strerror or error)
    remedy = "free or mend its disk" if error.errno in BROKEN_DISK else "make it readable and writable"
    return f"{error.filename}: {error.strerror}; {remedy}, or give another path"


def printable(text: object) -> str:
    """Foreign text for a terminal, a page or a picture; control characters and lone surrogates as in \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def one_line(text: object, most: int = 2000) -> str:
    """Text with foreign parts as one printable line of at most `most` characters."""
    line = printable(" ".join(str(text).splitlines()))
    return line if len(line) <= most else f"{line[: most - 4]} ..."


def shown(value: object) -> str:
    """A foreign value as in a source text, cut."""
    return one_line(repr(value), 200)
