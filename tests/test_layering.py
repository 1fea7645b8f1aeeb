"""How the source is layered and how large it may grow, read from its syntax trees."""

import ast
from collections.abc import Iterator

import pytest
from conftest import ROOT

# Imports go to lower levels only. Levels 0 and 1 are arithmetic, files and the objective; 2 and 3 the network,
# the loader and what shards them; above are the parts of a run. A new module gets a level here.
LEVELS = (
    {"decisions", "drawing", "draws", "errors", "latents", "node_facts", "pictures", "progress", "result_log"}
    | {"schedule", "verdict"},
    {"axes", "golden_places", "hardware", "listing", "official", "preflight", "records", "result_files", "rules"}
    | {"tar_index", "topology"},
    {"config", "flow", "score", "shapes", "shards", "storage"},
    {"convergence", "data", "device", "flops", "golden", "mllog", "model", "precision", "regions", "run_folder"}
    | {"shard_check", "shard_writer", "vae"},
    {"charts", "early_warning", "golden_hooks", "mlcommons", "names", "parallel", "prepare", "verify"},
    {"encoders", "fitness", "footprint", "hang", "optim", "raw_images", "report_html", "sample", "stopping"}
    | {"tensorboard", "watch", "weights"},
    {"cli", "memory", "report", "step"},
    {"checkpoint", "evaluate", "graph", "images", "stage", "step_time"},
    {"golden_values", "metrics", "plan_check", "tables"},
    {"eval", "plan", "train"},
)
LEVEL = {module: level for level, modules in enumerate(LEVELS) for module in modules}
# A port to another framework takes these as they are.
WITHOUT_TORCH = {
    "axes",
    "charts",
    "config",
    "convergence",
    "decisions",
    "drawing",
    "draws",
    "early_warning",
    "errors",
    "flops",
    "hardware",
    "listing",
    "mlcommons",
    "mllog",
    "node_facts",
    "official",
    "prepare",
    "progress",
    "records",
    "report",
    "report_html",
    "result_files",
    "result_log",
    "rules",
    "schedule",
    "score",
    "shapes",
    "shard_check",
    "shard_writer",
    "shards",
    "tar_index",
    "topology",
    "verdict",
    "verify",
    "watch",
}
FILES = {path.stem: path for path in [*(ROOT / "flux_ref").glob("*.py"), ROOT / "train.py", ROOT / "eval.py"]}
TREES = {module: ast.parse(path.read_text()) for module, path in FILES.items()}
MAX_FUNCTION_LINES, MAX_FILE_LINES = 60, 400
BACKENDS = ("cuda", "nccl", "gloo")

every_file = pytest.mark.parametrize("module", sorted(TREES))


def imported(tree: ast.AST) -> Iterator[str]:
    """Dotted names of everything imported anywhere in a tree, `from a import b` as a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_imports(tree: ast.AST) -> set[str]:
    """The modules of flux_ref among them."""
    return {name.split(".")[1] for name in imported(tree) if name.startswith("flux_ref.")}


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


def unsafe(tree: ast.AST) -> list[str]:
    """Bare excepts, strict=False, pickle in any form."""
    found = [f"imports {name}" for name in imported(tree) if name.split(".")[0] in ("pickle", "dill", "shelve")]
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler) and node.type is None:
            found.append(f"line {node.lineno}: bare except")
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "torch.save"):
            found.append(f"line {node.lineno}: {ast.unparse(node.func)} pickles")
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            if (node.arg, node.value.value) in (("strict", False), ("allow_pickle", True)):
                found.append(f"line {node.value.lineno}: {node.arg}={node.value.value}")
    return found


def test_every_module_has_one_level():
    assert sum(len(modules) for modules in LEVELS) == len(LEVEL), "a module has two levels"
    assert LEVEL.keys() == FILES.keys() - {"__init__"}
    assert FILES["__init__"].read_text() == ""


@pytest.mark.parametrize("module", sorted(LEVEL))
def test_imports_point_to_lower_levels(module):
    wrong = [name for name in own_imports(TREES[module]) if not LEVEL[name] < LEVEL[module]]
    assert not wrong, f"{module} (level {LEVEL[module]}) may not import {wrong}"


@pytest.mark.parametrize("module", sorted(WITHOUT_TORCH))
def test_module_runs_without_torch(module):
    """Neither itself nor through what it imports."""
    outside = {name.split(".")[0] for name in imported(TREES[module])}
    assert not outside & {"torch", "torchvision", "safetensors"}
    assert own_imports(TREES[module]) <= WITHOUT_TORCH


@every_file
def test_functions_and_files_are_small(module):
    assert not long_functions(TREES[module], MAX_FUNCTION_LINES), "split them"
    assert len(FILES[module].read_text().splitlines()) <= MAX_FILE_LINES


@every_file
def test_only_parallel_and_device_name_a_backend(module):
    assert bool(backend_words(TREES[module])) == (module in ("parallel", "device")), backend_words(TREES[module])


@every_file
def test_no_bare_except_no_lenient_load_no_pickle(module):
    assert not unsafe(TREES[module])


@pytest.mark.parametrize(
    "check,source",
    [
        (unsafe, "try:\n    f()\nexcept:\n    pass"),
        (unsafe, "net.load_state_dict(state, strict=False)"),
        (unsafe, "import pickle"),
        (unsafe, "from pickle import loads"),
        (unsafe, "torch.load(path)"),
        (unsafe, "np.load(path, allow_pickle=True)"),
        (backend_words, "tensor.to('cuda:0')"),
        (backend_words, "torch.cuda.synchronize()"),
        (lambda tree: long_functions(tree, 2), "def f():\n    x = 1\n    return x"),
        (own_imports, "def f():\n    from flux_ref import step"),
        (own_imports, "from flux_ref.step import State"),
    ],
)
def test_the_checks_find_what_they_look_for(check, source):
    assert check(ast.parse(source))


def test_the_checks_let_good_code_pass():
    good = ast.parse("import numpy as np\ntry:\n    np.load(path, allow_pickle=False)\nexcept OSError:\n    raise")
    assert not unsafe(good) and not backend_words(good) and not own_imports(good) and not long_functions(good, 60)
