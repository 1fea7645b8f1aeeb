"""Reading a benchmark log of any submitter: result_N.txt.

A foreign log is the output of a whole terminal: launchers put ranks before lines, progress bars and colours lie between
lines, several ranks write the same entry, and a killed run leaves half a line. Whatever can be read is read. The rest
is reported. Lines are split as mlperf-logging's parser splits them, so that both see the same entries.
"""

import contextlib
import io
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

from flux_ref.benchmark.mllog import RESUMED
from flux_ref.errors import Refusal
from flux_ref.formats.outside import printable, read_bytes, shallow

TOKEN = ":::MLLOG "
SYSTEM_TOKEN = ":::SYSJSON "
LINE_LIMIT = 16_384  # characters; the official parser takes time that grows with the square of an entry's length
MOST = 1e15  # every count and time of a run is smaller
MOST_BYTES, MOST_LINES, MOST_ENTRIES = 2**28, 2_000_000, 200_000  # of a log
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
    lines: dict[int, str] = field(default_factory=dict)  # by number, those with an entry, for the official checkers
    problems: list[str] = field(default_factory=list)
    system: dict[str, object] = field(default_factory=dict)  # what the log says about the machine
    name: str = ""  # tells it from other logs of its system

    def all(self, key: str) -> list[Event]:
        return [event for event in self.events if event.key == key]

    @property
    def is_resumed(self) -> bool:
        return any(str(event.value).startswith(RESUMED) for event in self.all("disqualified"))

    def value(self, key: str) -> object:
        """The value of the first entry with this key; None without such an entry."""
        return next((event.value for event in self.events if event.key == key), None)


def read(path: Path) -> ResultLog:
    """Everything that can be read of a log; its problems name the rest. Raises nothing for any content."""
    log = ResultLog(path, name=printable(path.name))
    damaged: list[str] = []
    try:
        content = read_bytes(path, "log", MOST_BYTES)
    except Refusal as refusal:
        log.problems.append(f"cannot be read: {refusal}")
        return log
    for number, line in enumerate(io.TextIOWrapper(io.BytesIO(content), encoding="latin-1"), 1):
        if number > MOST_LINES or len(log.lines) > MOST_ENTRIES:  # the official checkers take minutes for so many
            problem = f"cannot be read: it has more than {MOST_LINES:,} lines or {MOST_ENTRIES:,} entries"
            return ResultLog(path, name=log.name, problems=[problem])
        if len(line) >= LINE_LIMIT:
            line = f"{TOKEN}\n" if TOKEN in line else ""
        if TOKEN in line:
            _take(log, number, line, damaged)
        elif SYSTEM_TOKEN in line and not log.system:
            log.system = _object(line.rpartition(SYSTEM_TOKEN)[2])[0]
        elif not log.events and (told := INTRODUCTION.fullmatch(line.rstrip())):
            log.system.setdefault(told[1], told[2])
    if damaged:
        more = f" and {len(damaged) - 1} more" if damaged[1:] else ""
        log.problems.append(f"{damaged[0]}{more}")
    if not log.events and not log.problems:
        log.problems.append("holds no :::MLLOG entry" if content else "is empty")
    return log


def _take(log: ResultLog, line_number: int, line: str, damaged: list[str]) -> None:
    log.lines[line_number] = line
    text = line.rpartition(TOKEN)[2].strip()
    if not text:
        damaged.append(f"line {line_number} has an entry that is empty or longer than {LINE_LIMIT:,} characters")
        return
    entry, rest = _object(text)
    if not isinstance(entry.get("key"), str):
        log.lines[line_number] = f"{TOKEN}\n"  # the official parser might read an entry that was refused here
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
