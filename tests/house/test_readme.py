"""What the README says is so."""

import importlib.util
import re
import tomllib

from conftest import ROOT
from test_layering import COMMANDS, COMPUTED, FILES, SHARED, TRAINING, lines, room

from flux_ref.run import folder

README = (ROOT / "README.md").read_text()
GUIDE, ORDER = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("guide", "architecture"))
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
        assert abs(said - counted) <= 0.05 * counted, (said, counted)


def test_the_two_commands_stand_in_one_block():
    assert re.search(r"^pip install -r requirements.txt && torchrun( --standalone)? train.py\b", README, re.M)
    assert re.search(r"^pip install -r requirements-dev.txt && pytest\b", README, re.M)  # .ci/run reads this line


def test_commands_name_modules_and_files_that_exist():
    missing = []
    for page in (README, GUIDE):
        blocks = re.findall(r"^```\n(.*?)^```", page, re.M | re.S)
        for text in (*(line for block in blocks for line in block.splitlines()), *re.findall(r"`([^`\n]+)`", page)):
            modules = re.findall(r"python3? -m ((?:flux_ref|tools|bench|examples)[\w.]*)", text)
            missing += [name for name in modules if name.islower() and importlib.util.find_spec(name) is None]
            paths = re.findall(r"(?<![\w/.])(?:launch|bench|configs|docs|examples|tests|tools)/[\w/.*]+", text)
            missing += [path for path in paths if not list(ROOT.glob(path))]
    assert missing == []


def test_linked_files_and_sections_exist():
    broken = []
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]:
        for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", page.read_text()):
            path = page.parent / target if target else page
            if target.startswith("https://"):
                continue
            heads = re.findall(r"(?m)^#+ (.*)", path.read_text()) if anchor and path.is_file() else []
            if not path.exists() or (anchor and anchor not in {head.lower().replace(" ", "-") for head in heads}):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert not broken


def test_configs_and_files_of_a_run_are_described():
    assert {path.name for path in (ROOT / "configs").glob("*.toml")} <= set(re.findall(r"`(\w+\.toml)`", GUIDE))
    assert [name for name in folder.RUN_FILES if f"`{name}`" not in GUIDE] == []


def test_requirements_are_the_ones_that_the_code_imports():
    wanted = {re.split(r"[<>=!~ #]", line)[0] for line in (ROOT / "requirements.txt").read_text().split("\n") if line}
    assert wanted == {"torch", "torchvision", "safetensors", "webdataset", "numpy", "tqdm", "mlperf-logging"}


def test_pyproject_names_every_mark_that_a_test_bears():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["name"] == "flux_ref"
    marks = {line.split(":")[0] for line in project["tool"]["pytest"]["ini_options"]["markers"]}
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    used = {mark for text in tests for mark in re.findall(r"pytest\.mark\.(\w+)", text)}
    assert used - {"parametrize", "skip", "skipif", "usefixtures", "timeout", "filterwarnings"} == marks
