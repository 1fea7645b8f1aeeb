"""Reading a benchmark log of any submitter: result_N.txt, plain or gzipped.

A foreign log is the output of a whole terminal: launchers put ranks before lines, progress bars and colours lie between
lines, several ranks write the same entry, and a killed run leaves half a line. Whatever can be read is read. The rest
is reported. Lines are split as mlperf-logging's parser splits them, so that both see the same entries.
"""

import contextlib
import gzip
import io
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from flux_ref.formats.outside import printable, shallow

TOKEN, SYSTEM_TOKEN = ":::MLLOG ", ":::SYSJSON "
LINE_LIMIT = 16_384  # characters; the official parser takes time that grows with the square of an entry's length
MOST = 1e15  # every count and time of a run is smaller
MOST_BYTES, MOST_LINES, MOST_ENTRIES = 2**28, 2_000_000, 200_000  # of a log; a few packed bytes can be many more
INTRODUCTION = re.compile(r"  (ranks|compute|steps|batch|data) +(\S.*)")  # lines of run.reporter.Reporter.introduce


@dataclass(frozen=True)
class Event:
    """One entry. line: its number in the file, from 1; time_ms: milliseconds since 1970, NaN if it was no number."""

    line: int
    time_ms: float
    key: str
    value: object
    metadata: dict


@dataclass
class ResultLog:
    path: Path
    events: list[Event] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # the unchanged lines with an entry; the official checkers get these
    numbers: list[int] = field(default_factory=list)  # the line numbers of `lines`
    problems: list[str] = field(default_factory=list)
    system: dict[str, object] = field(default_factory=dict)  # what the log says about the machine
    name: str = ""  # tells it from other logs of its system

    def all(self, key: str) -> list[Event]:
        return [event for event in self.events if event.key == key]

    def value(self, key: str) -> object:
        """The value of the first entry with this key; None without such an entry."""
        return next((event.value for event in self.events if event.key == key), None)


def read(path: Path) -> ResultLog:
    """Everything that can be read of a log; its problems name the rest. Raises nothing for any content."""
    log = ResultLog(path, name=printable(path.name))
    damaged: list[str] = []
    try:
        if not path.is_file():
            raise OSError("it is not a regular file")
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            stream = gzip.GzipFile(fileobj=file) if packed else file
            for number, line in enumerate(_lines(io.TextIOWrapper(stream, encoding="latin-1")), 1):
                if number > MOST_LINES or len(log.lines) > MOST_ENTRIES:
                    log.events, log.lines, log.numbers = [], [], []  # the official checkers take minutes for so many
                    raise OSError(f"it has more than {MOST_LINES:,} lines or {MOST_ENTRIES:,} entries")
                if TOKEN in line:
                    _take(log, number, line, damaged)
                elif SYSTEM_TOKEN in line and not log.system:
                    log.system = _object(line.rpartition(SYSTEM_TOKEN)[2])[0]
                elif not log.events and (told := INTRODUCTION.fullmatch(line.rstrip())):
                    log.system.setdefault(told[1], told[2])
    except (OSError, EOFError, zlib.error) as error:
        log.problems.append(f"cannot be read to its end: {getattr(error, 'strerror', None) or error}")
    if damaged:
        more = f" and {len(damaged) - 1} more" if damaged[1:] else ""
        log.problems.append(f"{damaged[0]}{more}")
    if not log.events and not log.problems:
        log.problems.append("holds no :::MLLOG entry" if path.stat().st_size else "is empty")
    return log


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    """The lines of a text. A line above the limit becomes the token if it holds the token, else an empty line.

    Memory never holds such a line: a few packed bytes can be a line of many gigabytes.
    """

    def read() -> str:
        nonlocal size
        piece = text.readline(LINE_LIMIT)
        size += len(piece)
        if size > MOST_BYTES:
            raise OSError(f"it has more than {MOST_BYTES:,} bytes")
        return piece

    size = 0
    while piece := read():
        if len(piece) < LINE_LIMIT:
            yield piece
            continue
        has_token, end = TOKEN in piece, piece
        while piece and not piece.endswith("\n"):
            piece = read()
            end = end[-len(TOKEN) :] + piece  # the token may lie across two pieces
            has_token = has_token or TOKEN in end
        yield f"{TOKEN}\n" if has_token else "\n"


def _take(log: ResultLog, line_number: int, line: str, damaged: list[str]) -> None:
    log.lines.append(line)
    log.numbers.append(line_number)
    text = line.rpartition(TOKEN)[2].strip()
    if not text:
        damaged.append(f"line {line_number} has an entry that is empty or longer than {LINE_LIMIT:,} characters")
        return
    entry, rest = _object(text)
    if not isinstance(entry.get("key"), str):
        damaged.append(f"line {line_number} has an entry that is cut off or damaged")
        return
    if rest:
        damaged.append(f"line {line_number} goes on after its entry with {rest[:20]!r}")
    time_ms = number(entry.get("time_ms"))
    if time_ms is None:
        time_ms = math.nan
        damaged.append(f"line {line_number} has time_ms={str(entry.get('time_ms'))[:20]}, which is no time")
    metadata = entry["metadata"] if isinstance(entry.get("metadata"), dict) else {}
    log.events.append(Event(line_number, time_ms, entry["key"], entry.get("value"), metadata))


def _object(text: str) -> tuple[dict, str]:
    """The JSON object at the start of a text, {} without one, and what follows it."""
    with contextlib.suppress(UnicodeError):
        text = text.encode("latin-1").decode("utf-8")  # names beyond ASCII are UTF-8 if they can be
    text = text.strip()
    try:
        content, end = json.JSONDecoder().raw_decode(text)
        shallow(content)
    except (ValueError, RecursionError):
        return {}, ""
    return (content, text[end:].strip()) if isinstance(content, dict) else ({}, "")


def number(value: object) -> float | None:
    """The value if it is a number that a run can log; None for anything else, also for a truth value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if abs(value) < MOST else None
