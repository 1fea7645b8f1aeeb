"""Finds result files, groups them into systems, and reads what is known of a system's machine.

The runs in one folder are one system. Our own runs have a folder each: such folders side by side are one system if
their configs differ only in run.* and train.seed.
"""

import filecmp
import json
import os
import re
from pathlib import Path

from flux_ref import config_file
from flux_ref.config import flat
from flux_ref.errors import Refusal
from flux_ref.formats import jsonl
from flux_ref.formats.outside import printable, whole_number

MOST_FOLDERS = 5_000  # that are searched for results; a round of MLPerf Training has about 1,000


def find(arguments: list[str]) -> list[tuple[str, list[Path]]]:
    """The systems in files and folder trees: the name of each, and its result files ordered by their numbers.

    Raises: Refusal if an argument holds no result file.
    """
    files: dict[Path, Path] = {}  # by the real path, so that a file given twice counts once
    for argument in arguments:
        for path in _results(argument):
            files.setdefault(path.resolve(), path)
    systems: dict[object, list[Path]] = {}
    for real, path in files.items():
        systems.setdefault(_system_of(real), []).append(path)
    groups = [sorted(group, key=_number) for group in systems.values()]
    homes = [Path(os.path.commonpath([path.resolve().parent for path in group])) for group in groups]
    common = Path(os.path.commonpath(homes))
    found = []
    for home, group in zip(homes, groups):
        name = home.relative_to(common.parent if common in homes else common)
        if homes.count(home) > 1:
            name = name / group[0].parent.name
        found.append((printable(name), group))
    return found


def _results(argument: str) -> list[Path]:
    """The results that an argument names, in order. Raises: Refusal if there are none, or for a whole disk's tree."""
    if not argument:
        raise Refusal("an empty path is no result file; give . for the current folder")
    path = Path(argument)
    if path.is_file():
        return [path]
    found = []
    folders = os.walk(path) if path.is_dir() else ()  # False of a name that no folder can have
    for number, (parent, _, names) in enumerate(folders):
        if number == MOST_FOLDERS:
            raise Refusal(f"{path} holds over {MOST_FOLDERS:,} folders; give the folders of the results")
        found += [Path(parent, name) for name in names if name.startswith("result_") and name.endswith(".txt")]
    found = sorted(filter(_is_result, found))
    if not found:
        raise Refusal(f"{argument} holds no result_*.txt; give result files or their folders")
    return found


def _is_result(path: Path) -> bool:
    """Whether this is a result file, but no copy that launch/ makes of run_N/result_0.txt for a submission."""
    origin = path.parent / path.stem.replace("result_", "run_") / "result_0.txt"
    return path.is_file() and not (origin.is_file() and filecmp.cmp(path, origin, shallow=False))


def _system_of(path: Path) -> object:
    """Equal for the files of one system."""
    try:
        config = flat(config_file.of_run(path.parent))
    except Refusal:  # a foreign run, or a config that this version cannot read
        return path.parent
    same = {key: value for key, value in config.items() if not key.startswith("run.") and key != "train.seed"}
    return path.parent.parent, json.dumps(same, sort_keys=True, default=str)


def _number(path: Path) -> tuple:
    """result_2 before result_10, run_2 before run_10."""
    return tuple(int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", str(path))))


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
        for name, text in value.items() if isinstance(value, dict) else [(key, value)]:
            if isinstance(text, (str, int, float)) and str(text):
                known[str(name)] = str(text)
    return known


def accelerators(machine: dict[str, str]) -> int | None:
    """Accelerators of the whole system; for our own runs the number of ranks."""
    ranks = machine.get("ranks", "").split(" ")[0]
    counts = [ranks, machine.get("number_of_nodes", ""), machine.get("accelerators_per_node", "")]
    ranks, nodes, per_node = (whole_number(count, 1, 10**7) for count in counts)
    return ranks or (nodes * per_node if nodes and per_node else None)
