"""Result files of any submitter, result_N.txt: which there are, which belong together, and what they hold.

The runs in one folder are one system. Our own runs have a folder each: such folders side by side are one system if
their configs differ only in run.* and train.seed.
"""

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, NoReturn

from mlperf_logging.compliance_checker import mlp_parser

from flux_ref.errors import Refusal, printable
from flux_ref.files import read_bytes, read_json, read_text

MOST_BYTES = 2**30  # of a log


class Event(NamedTuple):
    """One entry of a log."""

    place: int  # among the entries
    time_ms: float  # since 1970
    key: str
    value: object
    metadata: dict


@dataclass
class ResultLog:
    path: Path
    name: str  # tells it from other logs of its system
    events: list[Event]

    def all(self, key: str) -> list[Event]:
        return [event for event in self.events if event.key == key]

    def value(self, key: str) -> object:
        """The value of the first entry with this key; None without such an entry."""
        return next((event.value for event in self.all(key)), None)


def find(arguments: list[Path]) -> list[tuple[str, list[Path]]]:
    """The systems in files and folder trees: the name of each, and its result files ordered by their numbers.

    A log counts once, even if it is named twice or has a copy. Raises: Refusal, OSError.
    """
    files: dict[bytes, Path] = {}
    for argument in arguments:
        found = [argument] if argument.is_file() else _results(argument)
        if not found:
            raise Refusal(f"{argument} holds no result_*.txt; give result files or their folders")
        for path in found:
            files.setdefault(hashlib.sha256(read_bytes(path, "log", MOST_BYTES)).digest(), path.resolve())
    groups: dict[tuple, list[Path]] = {}
    for path in files.values():
        groups.setdefault(_system(path), []).append(path)
    homes = [os.path.commonpath([path.parent for path in group]) for group in groups.values()]
    common = os.path.commonpath(homes)
    names = [os.path.relpath(home, common if len(homes) > 1 else os.path.dirname(home)) for home in homes]
    return [(printable(name), sorted(group, key=_by_number)) for name, group in zip(names, groups.values())]


def _results(folder: Path) -> list[Path]:
    """The result files below a folder. Those of run folders come before copies that were made for a submission."""
    found = []
    for parent, folders, names in os.walk(folder, onerror=_refuse):
        found += [Path(parent, name) for name in (*folders, *names) if fnmatch(name, "result_*.txt")]
    return sorted(found, key=lambda path: (-len(path.parts), path))


def _refuse(error: OSError) -> NoReturn:
    raise error


def _by_number(path: Path) -> tuple[int, str]:
    """result_2 before result_10, run_2 before run_10."""
    return len(str(path)), str(path)


def _system(path: Path) -> tuple:
    """Equal for the files of one system."""
    if not (path.parent / "config.toml").is_file():
        return (path.parent,)
    lines = read_text(path.parent / "config.toml", "config").splitlines()
    return path.parent.parent, *(line for line in lines if not line.startswith(("run.", "train.seed")))


def read(paths: list[Path], ruleset: str) -> list[ResultLog]:
    """The logs of one system. A log with an entry that mlperf-logging cannot parse is empty; its checkers say why."""
    is_named = len({path.name for path in paths}) == len(paths)  # each run of ours is result_0.txt in its own folder
    logs = []
    for path in paths:
        log = ResultLog(path, printable(path.name if is_named else f"{path.parent.name}/{path.name}"), [])
        with suppress(KeyError, TypeError, AttributeError):
            for line in mlp_parser.parse_file(path, ruleset)[0]:
                value, metadata = line.value["value"], line.value["metadata"]
                metadata = metadata if isinstance(metadata, dict) else {}
                log.events.append(Event(len(log.events), line.timestamp, line.key, value, metadata))
        logs.append(log)
    return logs


def machine(path: Path) -> tuple[int | None, str]:
    """How many devices a result file's system has, and their model.

    environment.json of our own runs says it, or the submitter: the benchmark's tree holds
    SUBMITTER/results/SYSTEM/BENCHMARK/result_N.txt and SUBMITTER/systems/SYSTEM.json.
    """
    system = path.parent.parent
    for file in (path.with_name("environment.json"), system.parent.parent / "systems" / f"{system.name}.json"):
        with suppress(Refusal, KeyError, TypeError, ValueError):
            told = read_json(file, "description of a machine")
            if "ranks" in told:
                return int(told["ranks"]), str(told["device"])
            count = int(told["number_of_nodes"]) * int(told["accelerators_per_node"])
            return count, str(told["accelerator_model_name"])
    return None, "device"


def number(value: object) -> float | None:
    """The value if it is a number; None for anything else, also for a truth value."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None
