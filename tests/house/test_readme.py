"""What the README says is so."""

import re
import tomllib

import pytest
from conftest import ROOT

from flux_ref.run import folder

README = (ROOT / "README.md").read_text()


def test_file_map_is_complete():
    sources = {str(path.relative_to(ROOT)) for name in ("flux_ref", "examples") for path in (ROOT / name).glob("*.py")}
    sources -= {"flux_ref/__init__.py"}
    assert sources | {"train.py", "eval.py"} == set(re.findall(r"^\| `([a-z_/]+\.py)` \|", README, re.M))


def test_every_config_is_listed():
    assert {path.name for path in (ROOT / "configs").glob("*.toml")} == set(re.findall(r"`(\w+\.toml)`", README)) - {
        "config.toml"
    }


@pytest.mark.parametrize(
    "page",
    ["README.md", "PORTING.md", "docs/guide.md", "docs/architecture.md", "docs/arithmetic.md", "launch/README.md"],
)
def test_linked_files_and_sections_exist(page):
    folder = (ROOT / page).parent
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", (ROOT / page).read_text()):
        if target.startswith("https://"):
            continue
        assert (folder / target).exists(), target
        if anchor:
            heads = re.findall(r"(?m)^#+ (.*)", (folder / target).read_text())
            assert anchor in {head.lower().replace(" ", "-") for head in heads}, anchor


def test_run_files_are_described():
    for name in folder.RUN_FILES:
        assert f"`{name}`" in README


def test_requirements_are_the_ones_that_the_code_imports():
    wanted = {re.split(r"[<>=!~ #]", line)[0] for line in (ROOT / "requirements.txt").read_text().split("\n") if line}
    assert wanted == {"torch", "torchvision", "safetensors", "webdataset", "numpy", "tqdm", "mlperf-logging"}


def test_pyproject_is_valid():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == "flux_ref"
