"""The pages: their links, files, commands and sections exist, and README's two commands stand where CI reads them."""

import ast
import importlib.util
import json
import re
from fnmatch import filter as matching

from conftest import ROOT
from test_layering import TREES, imported, own_imports
from test_weight import LIMITS

from flux_ref.config import KEYS, ModelConfig
from flux_ref.model import parameter_table

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
README, PORTING = ((ROOT / name).read_text() for name in ("README.md", "PORTING.md"))
DATED = ("measured.md", "log.md")  # they may name a program that went; its commit stands beside it
# Names of other projects, and of files, in backticks
FOREIGN = re.compile(
    r"(dist|jax|keras|mx|NAME|nn|optax|tf|torch)\..*|.*\.(csv|html|jsonl?|log|md|png|safetensors|sbatch|sh|sha256|toml|tsv|txt)"
)
PATH = re.compile(r"(?<![\w/.-])(?:launch|bench|configs|docs|examples|tests|tools|flux_ref)/[\w/.*]+\w")


def lost_links(page):
    """Links of a page to files or sections that do not exist; anchors are made as GitHub makes them."""
    lost = []
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
        path = page.parent / target if target else page
        if target.startswith("https://"):
            continue
        heads = re.findall(r"(?m)^#+ (.*)", path.read_text()) if anchor and path.is_file() else []
        anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}
        if not path.exists() or (anchor and anchor not in anchors):
            lost.append(f"{target}#{anchor}")
    return lost


def lost_names(page):
    """Files and modules that a page names and that do not exist. A word in capitals stands for any."""
    text = page.read_text()
    modules = re.findall(r"python3? -m ((?:flux_ref|tools|bench|examples)[\w.]*)", text)
    lost = [name for name in modules if name.islower() and not importlib.util.find_spec(name)]
    paths = (path for path in PATH.findall(text) if not re.search(r"[A-Z]{4}", path))
    return lost + [path for path in paths if not [*ROOT.glob(path), *(ROOT / "tests").glob(path)]]


def test_pages_name_files_modules_and_sections_that_exist():
    missing = {page.name: lost_links(page) for page in PAGES}
    for page in PAGES:
        missing[page.name] += [] if page.name in DATED else lost_names(page)
    assert {name: lost for name, lost in missing.items() if lost} == {}


def defined(tree):
    """What a module or a class defines; of a class in it also Class.member."""
    for node in tree.body:
        targets = getattr(node, "targets", [getattr(node, "target", node)])
        yield from (name for target in targets if (name := getattr(target, "id", getattr(target, "name", ""))))
        if isinstance(node, ast.ClassDef):
            yield from (f"{node.name}.{name}" for name in defined(node))


def known_names():
    """Every section.key and module.name, also without the module's folder; files; golden values and weights."""
    modules = {f"{module.rpartition('.')[2]}.{name}" for module, tree in TREES.items() for name in defined(tree)}
    golden = json.loads((ROOT / "tests/golden/index.json").read_text())["values"]
    files = {path.name for folder in (*LIMITS, "examples") for path in (ROOT / folder).rglob("*.py")}
    return {
        *KEYS,
        *modules,
        *files,
        "train.py",
        "eval.py",
        *parameter_table(ModelConfig()),
        *(value["name"] for value in golden),
    }


def lost_words(text, known):
    """Dotted names in backticks, keys after two dashes and files of Python that do not exist."""
    names = re.findall(r"`(?:--)?([A-Za-z]\w*(?:\.[\w*]+)+)(?: ?=[^`]*|\(\))?`", text)
    names += [name for name in re.findall(r" --(\w+\.\w+)", text) if name != "section.key"]
    names += re.findall(r"(?<![\w/.\[])\w+\.py\b", text)  # a link is followed elsewhere
    ours = (name for name in names if not FOREIGN.fullmatch(name) and not importable(name))
    return [name for name in ours if not matching(known, name) and not matching(known, f"{name}.*")]


def importable(name):
    return name.startswith(("bench.", "tools.")) and bool(importlib.util.find_spec(name))


def test_names_of_code_and_of_keys_in_the_pages_exist():
    known = known_names()
    checked = [page for page in PAGES if page.name not in DATED]
    lost = [f"{page.relative_to(ROOT)}: {word}" for page in checked for word in lost_words(page.read_text(), known)]
    assert not lost, "\n".join(lost)


def test_porting_tells_about_how_long_a_file_is():
    told = re.findall(r"\]\((flux_ref/[\w/]+\.py)\) \((\d+) lines\)", PORTING)
    lines = {path: len((ROOT / path).read_text().splitlines()) for path, _ in told}
    wrong = {path: lines[path] for path, count in told if abs(int(count) - lines[path]) > 5 + lines[path] / 10}
    assert told and not wrong, wrong


def test_the_two_commands_stand_in_readme():
    assert re.search(r"^pip install -r requirements.txt && torchrun( --standalone)? train.py\b", README, re.M)
    assert re.search(r"^pip install -r requirements-dev.txt && pytest\b", README, re.M)  # .ci/run reads this line


def test_what_a_port_takes_needs_no_torch_and_nothing_else_of_ours():
    section = PORTING.split("## Files to copy unchanged")[1].split("##")[0]
    paths = re.findall(r"`((?:flux_ref|tools)/[\w/]+)\.py`", section)
    listed = {path.replace("/", ".").removeprefix("flux_ref.") for path in paths}
    assert listed
    wrong = {}
    for module in listed:
        outside = {name.split(".")[0] for name in imported(TREES[module])}
        wrong[module] = outside & {"torch", "torchvision", "safetensors"} | own_imports(TREES[module]) - listed
    assert {module: found for module, found in wrong.items() if found} == {}
