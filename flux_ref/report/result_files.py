"""Finds result files, groups them into systems, and reads what lies beside them.

The runs in one folder are one system. Our own runs have a folder each: such folders side by side are one system if
their configs differ only in run.* and train.seed.
"""

import filecmp
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from flux_ref import config_file
from flux_ref.config import flat
from flux_ref.errors import Refusal
from flux_ref.formats import jsonl
from flux_ref.report.result_log import printable

RESULT_NAME = re.compile(r"result_.*\.txt(\.gz)?")
DULL = {"results", "flux1", "/"}  # names of folders that do not tell systems apart


@dataclass
class Group:
    """The result files of one system, ordered by their numbers."""

    name: str
    files: list[Path]


@dataclass
class Records:
    """What one of our runs wrote beside its log; empty for a foreign run."""

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
            results = sorted(p for p in path.rglob("result_*") if RESULT_NAME.fullmatch(p.name) and p.is_file())
            results = [result for result in results if not _is_gathered(result)]
            if not results:
                raise Refusal(f"{argument} holds no result_*.txt or result_*.txt.gz; give a folder that does, or files")
        elif path.is_file():
            results = [path]
        else:
            raise Refusal(f"{argument} is not there; give result files or folders that hold some")
        for result in results:
            files.setdefault(result.resolve(), result)
    folders: dict[object, list[Path]] = {}
    for real, path in files.items():
        folders.setdefault(_system_of(real), []).append(path)
    groups = [sorted(group, key=_number) for group in folders.values()]
    homes = [Path(os.path.commonpath([path.resolve().parent for path in group])) for group in groups]
    return [Group(name, group) for name, group in zip(_names(homes), groups)]


def _is_gathered(path: Path) -> bool:
    """Whether this file is the copy that launch/ makes of run_N/result_0.txt; that folder holds more to read."""
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
    """Short names of systems, from their folders: SUBMITTER/SYSTEM in the benchmark's tree."""
    parts = [[part for part in folder.parts if part not in DULL] or [str(folder)] for folder in folders]
    sizes = [2 if "results" in folder.parts else 1 for folder in folders]
    names = ["/".join(names[-size:]) for names, size in zip(parts, sizes)]
    while len(set(names)) < len(names) and max(sizes) < max(map(len, parts)):
        sizes = [size + (names.count(name) > 1) for size, name in zip(sizes, names)]
        names = ["/".join(names[-size:]) for names, size in zip(parts, sizes)]
    return [printable(name) for name in names]


def records(result: Path) -> Records:
    """What lies beside a result file of ours. Damaged lines and files are left out: charts alone use them."""
    config = _config(result.parent)
    names = ("metrics.jsonl", "eval.jsonl") if config else ()
    return Records(config, *(jsonl.records(result.with_name(name), skip_damaged=True) for name in names))


def _config(folder: Path) -> dict[str, object]:
    """The config of one of our runs, by section.key; {} for a foreign run or a config that this version cannot read."""
    try:
        return flat(config_file.of_run(folder))
    except Refusal:
        return {}


def machine(result: Path, logged: dict[str, object]) -> dict[str, str]:
    """What is known of the machine: SUBMITTER/systems/SYSTEM.json in the benchmark's tree, and what the log says.

    The tree holds result as SUBMITTER/results/SYSTEM/BENCHMARK/result_N.txt.
    """
    system = result.resolve().parent.parent
    try:
        described = jsonl.json_object(system.parent.parent / "systems" / f"{system.name}.json")
    except (Refusal, OSError):
        described = {}
    known: dict[str, str] = {}
    for key, value in (described | logged).items():
        items = value.items() if isinstance(value, dict) else [(key, value)]
        known |= {str(name): str(text) for name, text in items if isinstance(text, (str, int, float)) and str(text)}
    return known


def accelerators(machine: dict[str, str]) -> int | None:
    """Accelerators of the whole system; for our own runs the number of ranks."""
    ranks = re.match(r"\d+", machine.get("ranks", ""))
    try:
        return int(ranks[0]) if ranks else int(machine["number_of_nodes"]) * int(machine["accelerators_per_node"])
    except (KeyError, ValueError):
        return None
