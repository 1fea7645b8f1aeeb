"""What the README says is so."""

import importlib.util
import re

from conftest import ROOT
from test_layering import COMMANDS, COMPUTED, FILES, SHARED, TRAINING, lines, room

from flux_ref.run import folder

README = (ROOT / "README.md").read_text()
GUIDE, ORDER = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("guide", "architecture"))
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]
ROWS = re.findall(r"(?m)^\| ((?:`[a-z_]+(?:\.py|/)`(?:, )?)+) \|", ORDER.split("## The files in reading order")[1])
ROOMS = [name for row in ROWS for name in re.findall(r"`([^`]+)`", row)]


def test_every_room_has_one_place_in_the_reading_order():
    core = {f"{module}.py" for module in FILES if not room(module)} | {"train.py", "eval.py"}
    folders = TRAINING | {name.removeprefix("tools.") for name in COMMANDS | {SHARED}}
    assert sorted(ROOMS) == sorted(core | {f"{name}/" for name in folders})
    assert {name.removesuffix(".py") for name in ROOMS[: len(COMPUTED)]} == COMPUTED


def test_the_sittings_are_as_long_as_said():
    sittings = [int(number.replace(",", "")) for number in re.findall(r"sitting: about ([\d,]+) lines", ORDER)]
    core = {module for module in FILES if not room(module)}
    scripts = sum(len((ROOT / name).read_text().splitlines()) for name in ("train.py", "eval.py"))
    for said, counted in zip(sittings, (lines(COMPUTED), lines(core - COMPUTED) + scripts), strict=True):
        assert abs(said - counted) <= 0.05 * counted, f"docs/architecture.md says {said} lines; write {counted}"


def test_the_two_commands_stand_in_one_block():
    assert re.search(r"^pip install -r requirements.txt && torchrun( --standalone)? train.py\b", README, re.M)
    assert re.search(r"^pip install -r requirements-dev.txt && pytest\b", README, re.M)  # .ci/run reads this line


def test_pages_name_files_modules_and_sections_that_exist():
    """A word in capitals stands for any. A measurement may name a program that went; its commit stands beside it."""
    missing = []
    for page in PAGES:
        text = page.read_text()
        modules = re.findall(r"python3? -m ((?:flux_ref|tools|bench|examples)[\w.]*)", text)
        is_dated = page.name in ("measured.md", "log.md")
        lost = [name for name in modules if name.islower() and not is_dated and not importlib.util.find_spec(name)]
        paths = re.findall(r"(?<![\w/.-])(?:launch|bench|configs|docs|examples|tests|tools|flux_ref)/[\w/.*]+\w", text)
        for path in paths:
            found = [*ROOT.glob(path), *(ROOT / "tests").glob(path)]
            lost += [] if found or re.search(r"[A-Z]{4}", path) else [path]
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
            path = page.parent / target if target else page
            if target.startswith("https://"):
                continue
            heads = re.findall(r"(?m)^#+ (.*)", path.read_text()) if anchor and path.is_file() else []
            anchors = {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}  # as GitHub makes them
            if not path.exists() or (anchor and anchor not in anchors):
                lost.append(f"{target}#{anchor}")
        missing += [f"{page.relative_to(ROOT)}: {name}" for name in lost]
    assert missing == []


def test_configs_and_files_of_a_run_are_described():
    assert {path.name for path in (ROOT / "configs").glob("*.toml")} <= set(re.findall(r"`(\w+\.toml)`", GUIDE))
    assert [name for name in folder.WRITTEN if "/" not in name and f"`{name}`" not in GUIDE] == []
