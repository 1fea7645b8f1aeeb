"""Which result files are given, which of them are one system, and what else lies beside them.

The runs in one folder are one system. Of our own runs, which each have a folder, those that lie side by side and whose
configs differ in nothing but run.* and train.seed are one system, too.
"""

import filecmp
import json
import os
import re
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.report.result_log import printable

RESULT_NAME = re.compile(r"result_.*\.txt(\.gz)?")
SIZE_LIMIT = 1 << 20  # of the small files that describe a run or a system
DULL = {"results", "flux1", "/"}  # folders of the benchmark's tree that name no system


@dataclass
class Group:
    """The result files of one system, in the order of their numbers."""

    name: str
    files: list[Path]


@dataclass
class Records:
    """What one of our runs has written beside its log; empty for a foreign one."""

    config: dict[str, object] = field(default_factory=dict)  # section.key
    steps: list[dict] = field(default_factory=list)
    evaluations: list[dict] = field(default_factory=list)


def find(arguments: list[str]) -> list[Group]:
    """The systems in files and folder trees. Raises: Refusal if an argument holds no result file."""
    files: dict[Path, Path] = {}
    for argument in arguments:
        if not argument:
            raise Refusal("an empty path is no result file; give . for the current folder")
        path = Path(argument)
        if path.is_dir():
            found = sorted(p for p in path.rglob("result_*") if RESULT_NAME.fullmatch(p.name) and p.is_file())
            found = [own for own in found if not _is_gathered(own)]
            if not found:
                raise Refusal(f"{argument} holds no result_*.txt or result_*.txt.gz; give a folder that does, or files")
        elif path.is_file():
            found = [path]
        else:
            raise Refusal(f"{argument} is not there; give result files or folders that hold some")
        for own in found:
            files.setdefault(own.resolve(), own)
    folders: dict[object, list[Path]] = {}
    for real, path in files.items():
        folders.setdefault(_system_of(real), []).append(path)
    groups = [sorted(group, key=_number) for group in folders.values()]
    homes = [Path(os.path.commonpath([path.resolve().parent for path in group])) for group in groups]
    return [Group(name, group) for name, group in zip(_names(homes), groups)]


def _is_gathered(path: Path) -> bool:
    """Whether this is the copy that launch/ makes of run_N/result_0.txt, beside which there is more to read."""
    number = re.fullmatch(r"result_(\d+)\.txt", path.name)
    origin = path.parent / f"run_{number[1]}" / "result_0.txt" if number else path
    return origin != path and origin.is_file() and filecmp.cmp(path, origin, shallow=False)


def _system_of(path: Path) -> object:
    """Equal for the files of one system."""
    config = _config(path.parent)
    if not config:
        return path.parent
    same = {key: value for key, value in config.items() if not key.startswith("run.") and key != "train.seed"}
    return path.parent.parent, json.dumps(same, sort_keys=True, default=str)


def _number(path: Path) -> tuple:
    """result_2 before result_10, run_2 before run_10."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path)))


def _names(folders: list[Path]) -> list[str]:
    """Short names of systems, by the folder of each: SUBMITTER/SYSTEM in the benchmark's tree."""
    parts = [[part for part in folder.parts if part not in DULL] or [str(folder)] for folder in folders]
    sizes = [2 if "results" in folder.parts else 1 for folder in folders]
    names = ["/".join(own[-size:]) for own, size in zip(parts, sizes)]
    while len(set(names)) < len(names) and max(sizes) < max(map(len, parts)):
        sizes = [size + (names.count(name) > 1) for size, name in zip(sizes, names)]
        names = ["/".join(own[-size:]) for own, size in zip(parts, sizes)]
    return [printable(name) for name in names]


def records(result: Path) -> Records:
    """What lies beside a result file of ours. Damaged lines and files are left out: they only feed charts."""
    config = _config(result.parent)
    if not config:
        return Records()
    return Records(config, _lines(result.with_name("metrics.jsonl")), _lines(result.with_name("eval.jsonl")))


def _config(folder: Path) -> dict[str, object]:
    """The resolved config of one of our runs, by section.key; {} without one."""
    path = folder / "config.toml"
    try:
        if not path.is_file() or path.stat().st_size > SIZE_LIMIT:
            return {}
        sections = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError):
        return {}
    flat = {}
    for section, values in sections.items():
        flat |= {f"{section}.{key}": value for key, value in values.items()} if isinstance(values, dict) else {}
    return flat


def _lines(path: Path) -> list[dict]:
    found = []
    try:
        for line in path.open(encoding="utf-8", errors="replace"):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict):
                found.append(record)
    except OSError:
        pass
    return found


def system_description(result: Path) -> dict[str, object]:
    """SUBMITTER/systems/SYSTEM.json of SUBMITTER/results/SYSTEM/BENCHMARK/result_N.txt; {} if there is none."""
    system = result.resolve().parent.parent
    path = system.parent.parent / "systems" / f"{system.name}.json"
    try:
        if path.is_file() and path.stat().st_size <= SIZE_LIMIT:
            found = json.loads(path.read_text(encoding="utf-8", errors="replace"))
            return found if isinstance(found, dict) else {}
    except (OSError, ValueError, RecursionError):
        pass
    return {}


def machine(result: Path, told: dict[str, object]) -> dict[str, str]:
    """What is known of the system: its description in the benchmark's tree, else what the log itself tells."""
    found: dict[str, str] = {}
    for key, value in (system_description(result) | told).items():
        items = value.items() if isinstance(value, dict) else [(key, value)]
        found |= {str(name): str(text) for name, text in items if isinstance(text, (str, int, float)) and str(text)}
    return found


def accelerators(machine: dict[str, str]) -> int | None:
    """How many the system has, all nodes together; of a run of ours, its ranks."""
    ranks = re.match(r"\d+", machine.get("ranks", ""))
    try:
        return int(ranks[0]) if ranks else int(machine["number_of_nodes"]) * int(machine["accelerators_per_node"])
    except (KeyError, ValueError):
        return None
