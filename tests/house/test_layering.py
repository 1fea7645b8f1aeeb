"""The rule of the house, read from the syntax trees: who may import whom, and how long a function or a file may be."""

import ast
import re

from conftest import ROOT

PICTURES = "pictures"  # the folder of flux_ref that training does not need
ASKED = {  # what is imported in the one function that a key asks
    ("train", "pictures.artist"),
    ("train", "pictures.toy_from_pictures"),
    ("eval", "pictures.artist"),
}
SHARED = {"tools.figures", "tools.flops_and_bytes"}  # what several commands use
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 400
BACKENDS = re.compile("cuda(?!_graphs)|nccl|gloo", re.IGNORECASE)
NAMES_A_BACKEND = {"graphs", "ranks", "sharding", "watchdog"}
# A bare except, a lenient load, and what pickles what it saves or sends.
UNSAFE = re.compile(
    r"^ *(except:|(import|from) (pickle|dill|shelve)\b.*)|strict=False|allow_pickle=True"
    r"|(?<!safetensors\.)torch\.(load|save)\(|\b(torch\.distributed|dist)\.\w*_object(s|_list)?\(",
    re.MULTILINE,
)


def named(path):
    """A module's dotted name; those of flux_ref lack its name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("flux_ref.")


FILES = {named(path): path for folder in ("flux_ref", "tools") for path in (ROOT / folder).rglob("*.py")}
FILES = {module: path for module, path in FILES.items() if path.name != "__init__.py"}
FILES |= {name: ROOT / f"{name}.py" for name in ("train", "eval")}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}
CORE = [module for module in FILES if not module.startswith("tools.")]


def imported(tree):
    """Dotted names of everything imported in a tree, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(tree):
    """The modules of flux_ref and tools among them."""
    names = {name.removeprefix("flux_ref.") for name in imported(tree) if name.startswith(("flux_ref.", "tools."))}
    return {name if name in FILES else name.rpartition(".")[0] for name in names} & FILES.keys()


def first_imports(tree):
    """Those that are imported at the head of the file."""
    return own_imports(ast.Module([node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]))


def room(module):
    """The folder of a module; "" for the core."""
    return module.rpartition(".")[0]


def command(module):
    """The command of tools/ that a module belongs to, as tools.NAME; "" for flux_ref and for what commands share."""
    name = ".".join(module.split(".")[:2])
    return name if name.startswith("tools.") and name not in SHARED else ""


def forbidden(module, other):
    """Whether the rule of the house forbids a module to import another at its head."""
    if command(other):
        return command(module) != command(other)
    if other in SHARED:
        return not module.startswith("tools.")
    return room(other) == PICTURES and room(module) != PICTURES and not module.startswith("tools.")


def test_imports_keep_to_the_rule_of_the_house():
    """flux_ref imports nothing of tools, commands not each other, the core no pictures; no circle."""
    first = {module: first_imports(tree) for module, tree in TREES.items()}
    assert [(module, other) for module in first for other in first[module] if forbidden(module, other)] == []
    later = {(module, other) for module in CORE for other in own_imports(TREES[module]) - first[module]}
    assert later == ASKED
    while leaves := [module for module, others in first.items() if not others & first.keys()]:
        for module in leaves:
            del first[module]
    assert not first, "modules that import each other in a circle, or lead to one"


def test_flux_ref_holds_what_training_and_evaluation_run():
    """And nothing else: what only a command needs stands in tools/."""
    used = set()
    rest = {"train", "eval"}
    while rest:
        used |= rest
        rest = set().union(*(own_imports(TREES[module]) for module in rest)) - used
    assert used == set(CORE)


def test_functions_and_files_are_small():
    wrong = []
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
                wrong.append((module, node.name))
        if len(FILES[module].read_text().splitlines()) > MAX_FILE_LINES:
            wrong.append((module, ""))
    assert wrong == [("train", "main")], "its order of a run stands on one page; divide what else is long by topic"


def test_few_files_name_a_backend_and_none_is_unsafe():
    texts = {module: ast.unparse(tree) for module, tree in TREES.items()}
    assert {module for module, text in texts.items() if BACKENDS.search(text)} == NAMES_A_BACKEND
    assert {module: found[0] for module, text in texts.items() if (found := UNSAFE.search(text))} == {}
