"""PORTING.md names files, functions, commands and keys that exist, and states facts that hold."""

import importlib
import importlib.util
import inspect
import re
import shlex

from conftest import ROOT
from test_layering import FILES, TREES, imported, named, own_imports

from flux_ref import config, config_file

PORTING = (ROOT / "PORTING.md").read_text()
PROSE = PORTING.split("## Decisions that often cause errors")[0]
BLOCKS = re.findall(r"^```\n(.*?)^```", PROSE, re.M | re.S)
SPANS = set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", PROSE, flags=re.M | re.S)))
COMMANDS = {line for block in BLOCKS for line in block.splitlines()}
COMMANDS |= {span for span in SPANS if span.split()[0] in ("python", "pytest", "torchrun")}
GOLDEN = (
    r"(draws|batch|init|double_blocks|single_blocks|grad|step[16]|val|bf16|fp8|formats|ranks|full|data)\.\*"
    r"|full\.(sample|drop|t)|schedule\.lr|clip\.coefficient|bf16\.(only|fed)\.\*|bf16\.rms_norm(\.input)?"
    r"|inputs|--golden FOLDER|latent|x_t|img|target|rope|time_waves|vec|prediction|loss|losses"
)
MODULES = {path.stem: named(path) for path in FILES.values()}


def is_there(name: str) -> bool:
    """Whether module.attribute... exists in flux_ref. The last attribute may be one that instances set themselves."""
    module, *path = name.split(".")
    if module not in MODULES:
        return False
    path_of = MODULES[module]
    owner = importlib.import_module(path_of if path_of.startswith("tools.") else f"flux_ref.{path_of}")
    for part in path:
        if not hasattr(owner, part):
            return inspect.isclass(owner) and f"self.{part}" in inspect.getsource(owner)
        owner = getattr(owner, part)
    return True


def complaint(command: str) -> str:
    """Why a command would be refused; "" if it would not."""
    program, *args = shlex.split(command)
    if program == "pytest":
        return "".join(arg for arg in args if not (ROOT / arg).is_file())
    if program == "torchrun":
        assert args[0] == "train.py"
        files = [arg for arg in args[1:] if arg[0] != "-"] or ["configs/tiny.toml"]
        config_file.load(ROOT / files[0], [arg for arg in args[1:] if arg[0] == "-"])
        return ""
    assert program == "python" and args[0] == "-m"
    return "" if importlib.util.find_spec(args[1]) else args[1]


def test_commands_are_accepted():
    assert {command: text for command in COMMANDS if (text := complaint(command))} == {}
    bad = ("pytest tests/test_none.py", "python -m tools.none", "python -m flux_ref.x")
    assert all(map(complaint, bad)), "the check finds a bad command"


def test_named_functions_and_keys_exist_and_values_are_accepted():
    """Nothing stands in code style that no check looks at."""
    name = r"[a-z_0-9]+\.[A-Za-z_.0-9]+(=\w+)?"
    dotted = {span for span in SPANS if re.fullmatch(name, span) and not re.fullmatch(GOLDEN, span)}
    assert len(dotted) > 40
    given = [span for span in dotted if "=" in span]
    assert [span for span in dotted - {*given} if not (is_there(span) or span in config.TYPES)] == []
    config_file.load(ROOT / "configs/schnell_gbs512.toml", [f"--{text}" for text in given])
    known = rf"{name}|[\w/]+\.(py|md)|rng\.order\(.*\]|grad_scale|found_inf|{GOLDEN}"
    assert [span for span in SPANS - COMMANDS if not re.fullmatch(known, span)] == []


def test_what_a_port_takes_needs_no_torch_and_nothing_else_of_ours():
    section = PROSE.split("## Files to take as they are")[1].split("##")[0]
    paths = re.findall(r"`((?:flux_ref|tools)/[\w/]+)\.py`", section)
    listed = {path.replace("/", ".").removeprefix("flux_ref.") for path in paths}
    assert len(listed) > 10
    wrong = {}
    for module in listed:
        outside = {name.split(".")[0] for name in imported(TREES[module])}
        wrong[module] = outside & {"torch", "torchvision", "safetensors"} | own_imports(TREES[module]) - listed
    assert {module: found for module, found in wrong.items() if found} == {}
