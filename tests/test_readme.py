"""What the README says is so."""

import re
import tomllib

from conftest import ROOT

from flux_ref import run_folder

README = (ROOT / "README.md").read_text()


def test_file_map_is_complete():
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "flux_ref").glob("*.py")} - {"flux_ref/__init__.py"}
    assert sources | {"train.py", "eval.py"} == set(re.findall(r"^\| `([a-z_/]+\.py)` \|", README, re.M))


def test_every_config_is_listed():
    assert {path.name for path in (ROOT / "configs").glob("*.toml")} == set(re.findall(r"`(\w+\.toml)`", README)) - {
        "config.toml"
    }


def test_linked_files_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_run_files_are_described():
    for name in run_folder.RUN_FILES:
        assert f"`{name}`" in README


def test_requirements_are_the_ones_that_the_code_imports():
    wanted = {re.split(r"[<>=!~ #]", line)[0] for line in (ROOT / "requirements.txt").read_text().split("\n") if line}
    assert wanted == {"torch", "torchvision", "safetensors", "webdataset", "numpy", "tqdm", "mlperf-logging"}


def test_pyproject_is_valid():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == "flux_ref"
