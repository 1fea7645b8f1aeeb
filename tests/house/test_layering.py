"""The rule of the house, read from the syntax trees: who may import whom, and how long a function or a file may be."""

import ast
import re
from collections.abc import Iterator

from conftest import ROOT

TAKEN_AWAY = ("precision", "pictures", "benchmark")  # folders of flux_ref that scripts hand in
SHARED = "tools.shared"  # what several commands use
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 400
BACKENDS = ("cuda", "nccl", "gloo")
NAMES_A_BACKEND = {"ranks", "graphs", "attention"}


def named(path) -> str:
    """A module's dotted name; those of flux_ref lack its name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("flux_ref.")


BOTH = [path for folder in ("flux_ref", "tools") for path in (ROOT / folder).rglob("*.py")]
FILES = {named(path): path for path in BOTH if path.name != "__init__.py"}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}
SCRIPTS = {name: ast.parse((ROOT / f"{name}.py").read_text()) for name in ("train", "eval")}


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported in a tree, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(tree: ast.AST) -> set[str]:
    """The modules of flux_ref and tools among them."""
    names = {name.removeprefix("flux_ref.") for name in imported(tree) if name.startswith(("flux_ref.", "tools."))}
    return {name if name in FILES else name.rpartition(".")[0] for name in names} & FILES.keys()


def reached(tree: ast.AST) -> set[str]:
    """The modules that a file imports, those that these import, and so on."""
    found, rest = set(), own_imports(tree)
    while rest:
        module = rest.pop()
        found.add(module)
        rest |= own_imports(TREES[module]) - found
    return found


def room(module: str) -> str:
    """The folder of a module; "" for the core."""
    return module.rpartition(".")[0]


def command(module: str) -> str:
    """The command of tools/ that a module belongs to, as tools.NAME; "" for flux_ref and for what commands share."""
    name = ".".join(module.split(".")[:2])
    return name if name.startswith("tools.") and name != SHARED else ""


def forbidden(module: str, other: str) -> bool:
    """Whether the rule of the house forbids a module to import another."""
    if command(other):
        return command(module) != command(other)
    if room(other) == SHARED:
        return not module.startswith("tools.")
    if room(other) in TAKEN_AWAY:  # train.py and tools hand it in
        return room(module) != room(other) and not module.startswith("tools.")
    return False


def long_functions(tree: ast.AST, limit: int) -> list[str]:
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    return [node.name for node in functions if node.end_lineno - node.lineno + 1 > limit]


def backend_words(tree: ast.AST) -> list[str]:
    """String literals and attributes that name a backend, as in "cuda:0" or torch.cuda."""
    words = []
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else node.attr if isinstance(node, ast.Attribute) else None
        if isinstance(text, str) and any(backend in text.lower() for backend in BACKENDS):
            words.append(f"line {node.lineno}: {text!r}")
    return words


# They pickle what they save or send.
PICKLING = re.compile(r"torch\.(load|save)|(torch\.distributed|dist)\.\w*_object(s|_list)?")


def unsafe(tree: ast.AST) -> list[str]:
    """Bare excepts, strict=False, pickle in any form."""
    found = [f"imports {name}" for name in imported(tree) if name.split(".")[0] in ("pickle", "dill", "shelve")]
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"line {node.lineno}: bare except")
        is_pickling = isinstance(node, ast.Call) and PICKLING.fullmatch(ast.unparse(node.func))
        if is_pickling:
            found.append(f"line {node.lineno}: {ast.unparse(node.func)} pickles")
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            if (node.arg, node.value.value) in (("strict", False), ("allow_pickle", True)):
                found.append(f"line {node.value.lineno}: {node.arg}={node.value.value}")
    return found


def cycle(imports: dict[str, set[str]]) -> set[str]:
    """The modules that import each other in a circle, or lead to one."""
    rest = {module: set(others) for module, others in imports.items()}
    while leaves := {module for module, others in rest.items() if not others & rest.keys()}:
        rest = {module: others for module, others in rest.items() if module not in leaves}
    return set(rest)


def test_imports_keep_to_the_rule_of_the_house():
    """flux_ref imports nothing of tools, commands not each other, the core nothing of a run; no circle."""
    packages = [path for path in BOTH if path.name == "__init__.py"]
    assert [path for path in packages if own_imports(ast.parse(path.read_text()))] == []
    imports = {module: own_imports(tree) for module, tree in TREES.items()}
    assert [(module, other) for module in imports for other in imports[module] if forbidden(module, other)] == []
    assert not cycle(imports)


def test_flux_ref_holds_what_training_and_evaluation_run():
    """And nothing else: what only a command needs stands in tools/."""
    loaded = ["precision.hooks", "pictures.drawing"]  # by folders.module
    used = set().union(*map(reached, SCRIPTS.values()), loaded, *(reached(TREES[module]) for module in loaded))
    assert used == {module for module in FILES if not module.startswith("tools.")}


def test_functions_and_files_are_small():
    wrong = [(m, name) for m, tree in (TREES | SCRIPTS).items() for name in long_functions(tree, MAX_FUNCTION_LINES)]
    wrong = [pair for pair in wrong if pair != ("train", "main")]  # a script: the order of a run on one page
    lengths = {module: len(path.read_text().splitlines()) for module, path in FILES.items()}
    wrong += [(module, length) for module, length in lengths.items() if length > MAX_FILE_LINES]
    limits = f"{MAX_FUNCTION_LINES} lines of a function, {MAX_FILE_LINES} of a file"
    assert not wrong, f"above {limits}: split them, or move what belongs together into a file of its own"


def test_few_files_name_a_backend_and_none_is_unsafe():
    """Unsafe are a bare except, a lenient load and pickle."""
    trees = TREES | SCRIPTS
    assert {module for module, tree in trees.items() if backend_words(tree)} == NAMES_A_BACKEND
    assert {module: words for module, tree in trees.items() if (words := unsafe(tree))} == {}
