"""The pages: their links, files, commands and sections exist, and README's two commands stand where CI reads them."""

import importlib.util
import re

from conftest import ROOT
from test_layering import TREES, imported, own_imports

PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
README, PORTING = ((ROOT / name).read_text() for name in ("README.md", "PORTING.md"))
DATED = ("measured.md", "log.md")  # they may name a program that went; its commit stands beside it
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


def test_the_two_commands_stand_in_readme():
    assert re.search(r"^pip install -r requirements.txt && torchrun( --standalone)? train.py\b", README, re.M)
    assert re.search(r"^pip install -r requirements-dev.txt && pytest\b", README, re.M)  # .ci/run reads this line


def test_what_a_port_takes_needs_no_torch_and_nothing_else_of_ours():
    section = PORTING.split("## Files to take as they are")[1].split("##")[0]
    paths = re.findall(r"`((?:flux_ref|tools)/[\w/]+)\.py`", section)
    listed = {path.replace("/", ".").removeprefix("flux_ref.") for path in paths}
    assert listed
    wrong = {}
    for module in listed:
        outside = {name.split(".")[0] for name in imported(TREES[module])}
        wrong[module] = outside & {"torch", "torchvision", "safetensors"} | own_imports(TREES[module]) - listed
    assert {module: found for module, found in wrong.items() if found} == {}
