"""docs/architecture.md: its picture is drawn from the imports, and its ways name functions that exist.

PYTHONPATH=.:tests python tests/house/test_architecture.py          draw the picture anew
"""

import ast
import re

from conftest import ROOT
from test_layering import COMMANDS, COMPUTED, FILES, SCRIPTS, SHARED, TRAINING, TREES, own_imports, room

PATH = ROOT / "docs" / "architecture.md"
PAGE = PATH.read_text()
PICTURE = re.compile(r"(?<=```mermaid\n).*?(?=\n```)", re.S)
SUBGRAPHS = {
    "Scripts": {"train", "eval"},
    "Commands in tools/": COMMANDS | {SHARED},
    "Training folders": TRAINING,
    "Core: how it runs": {module for module in FILES if not room(module)} - COMPUTED,
    "Core: what is computed": COMPUTED,
}


def arrows() -> dict[str, set[str]]:
    """Which rooms each room imports. A room is a file of the core, a script or a folder."""
    imports = {name: set() for names in SUBGRAPHS.values() for name in names}
    for module, tree in (TREES | SCRIPTS).items():
        here = room(module) or module
        imports[here] |= {room(other) or other for other in own_imports(tree)} - {here}
    return imports


def below(imports: dict[str, set[str]], name: str) -> set[str]:
    """All rooms that a room imports, and what those import. There are no circles."""
    return set().union(*({other} | below(imports, other) for other in imports[name]))


def picture() -> str:
    """The rooms and their imports as mermaid; an arrow that a longer way implies is left out."""
    imports = arrows()
    lines = ["flowchart TD"]
    for number, (title, names) in enumerate(SUBGRAPHS.items()):
        ends = {name: "/" if name in TRAINING | COMMANDS | {SHARED} else ".py" for name in sorted(names)}
        shown = (f'        {name}["{name.removeprefix("tools.")}{end}"]' for name, end in ends.items())
        lines += [f'    subgraph room{number}["{title}"]', *shown, "    end"]
    for name, others in sorted(imports.items()):
        direct = others - set().union(*(below(imports, other) for other in others))
        lines += [f"    {name} --> {other}" for other in sorted(direct)]
    return "\n".join(lines)


def defined(path: str) -> set[str]:
    """The functions and classes of a file, methods as Class.method."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return names


def test_the_picture_is_drawn_from_the_imports():
    assert PICTURE.findall(PAGE) == [picture()], "draw it anew, see above"


def test_the_ways_name_what_exists():
    """A step begins with a file in code style; each further name in code style is a function of the file before it."""
    steps = re.findall(r"(?m)^\d+\. (.*(?:\n +.*)*)", PAGE)
    assert len(steps) > 20
    missing = []
    for step in steps:
        path = ""
        for name in re.findall(r"`([^`]+)`", step):
            path = name if name.endswith(".py") else path
            if not (ROOT / path).is_file() or (name != path and name not in defined(path)):
                missing.append(f"{path} {name}")
    assert not missing


def test_every_file_that_the_page_names_exists():
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE))
    assert len(named) > 50
    assert [name for name in named if not ((ROOT / name).is_file() or (ROOT / "flux_ref" / name).is_file())] == []


if __name__ == "__main__":
    PATH.write_text(PICTURE.sub(lambda old: picture(), PAGE))
