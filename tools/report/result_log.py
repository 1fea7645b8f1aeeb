"""Result files of any submitter, result_N.txt: which there are, which belong together, and what they hold.

The runs in one folder are one system. Our own runs have a folder each: such folders side by side are one system if
their configs differ only in run.* and train.seed.
"""

import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mlperf_logging.compliance_checker import mlp_parser

from flux_ref.cli import Refusal, printable
from flux_ref.files import matching, read_bytes, read_text, reraise

LONG = re.compile(rb":::MLLOG.{10000}")  # mlperf-logging searches a line in a time that grows with its square


class Event(NamedTuple):
    """One entry of a log."""

    time_ms: float  # since 1970
    key: str
    value: Any
    metadata: dict[str, Any]


class ResultLog:
    """The entries of a log. One that mlperf-logging cannot parse has none; its checkers say why.

    name: the path below `home`, the folder of its system.
    """

    def __init__(self, path: Path, home: str, ruleset: str):
        self.path = path
        self.name = printable(os.path.relpath(path, home))
        self.events: list[Event] = []
        with suppress(KeyError, TypeError, ValueError, AttributeError, RecursionError):
            for line in mlp_parser.parse_file(path, ruleset)[0]:
                event = Event(line.timestamp, line.key, line.value["value"], dict(line.value["metadata"]))
                self.events.append(event)

    def all(self, key: str) -> list[Event]:
        return [event for event in self.events if event.key == key]

    def first(self, key: str) -> Event | None:
        return next(iter(self.all(key)), None)

    def value(self, key: str) -> Any:
        """The value of the first entry with this key; None without such an entry."""
        first = self.first(key)
        return first.value if first else None


def find(arguments: list[Path]) -> list[tuple[str, list[Path]]]:
    """The systems in files and folder trees: the name of each, and its result files by their numbers.

    A log counts once, even if it is named twice or has a copy. Raises: Refusal, OSError.
    """
    files: dict[bytes, Path] = {}  # by content
    for argument in arguments:
        found = [argument] if argument.is_file() else _below(argument)
        if not found:
            raise Refusal(f"{argument} holds no result_*.txt; give result files or their folders")
        for path in found:
            content = read_bytes(path)
            if LONG.search(content):
                raise Refusal(f"log {path} has an entry of more than 10,000 bytes; mend it")
            files.setdefault(content, path.resolve())

    systems: dict[tuple, list[Path]] = {}
    for path in files.values():
        systems.setdefault(_system(path), []).append(path)

    return [
        # result_2 before result_10, run_2 before run_10
        (printable(os.path.relpath(home_of(paths))), sorted(paths, key=lambda path: (len(str(path)), str(path))))
        for paths in systems.values()
    ]


def home_of(paths: list[Path]) -> str:
    """The folder of a system: our own runs have a folder each in it."""
    return os.path.commonpath([path.parent for path in paths])


def _below(folder: Path) -> list[Path]:
    """The result files below a folder. Those of run folders come before copies that were made for a submission."""
    found = []
    for parent, _, _ in os.walk(folder, onerror=reraise):  # a folder left out could hold a failed run
        found += matching(Path(parent), "result_*.txt")
    return sorted(found, key=lambda path: (-len(path.parts), path))


def _system(path: Path) -> tuple:
    """Equal for the files of one system."""
    if not (path.parent / "config.toml").is_file():
        return (path.parent,)
    lines = read_text(path.parent / "config.toml").split("\n")
    return path.parent.parent, *(line for line in lines if not line.startswith(("run.", "train.seed")))


def number(value: Any) -> float:
    """The value if it is a number; NaN for anything else, also for a truth value."""
    return value if type(value) in (int, float) else math.nan
