"""What the comparison says about a dump, without any run: dumps are the golden values with changes."""

import re
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from checking import checked
from conftest import ROOT, refusal

from flux_ref import cli
from tools.golden import check as check_module
from tools.golden.files import FOLDER, INDEX, MISTAKES, VALUES, Golden

KEPT = Golden(FOLDER)
read = KEPT.arrays.__getitem__


@pytest.fixture
def check(tmp_path, capsys):
    """check(dump, *options)"""
    return lambda dump, *options: checked(dump, tmp_path, capsys, *options)


def in_bf16(x: np.ndarray) -> np.ndarray:
    """Rounded to bf16, which is within a tolerance of bf16."""
    return torch.from_numpy(x.copy()).bfloat16().float().numpy()


def values(*names: str) -> dict[str, np.ndarray]:
    return {name: read(name) for name in names}


def test_how_a_value_differs_and_what_is_known_there(check):
    wrong = []
    for name, change, text in (  # a golden value, how a port's differs, what must be said
        ("prediction", np.negative, r"  prediction  840 of 840 elements, up to [\d.e+]+ x tolerance, rms 2\n"),
        ("loss", lambda x: x * np.inf, r"1 of 1 elements, up to inf x tolerance"),
        ("img_in", lambda x: np.where(x == x.flat[7], np.nan, x), r"worst at \[0, 0, 7\]: yours nan, golden "),
        ("bf16.prediction", lambda x: x * np.float32(1.0001), r"that are not bf16; computed in fp32\?"),
        ("draws.words.1", lambda x: x - np.uint64(1), r"8 of 8 elements\n"),
        ("target", np.negative, r"known mistakes:\n    - velocity sign: noise - data\n"),
        ("img_in", lambda x: x + 1, r"tolerance: [\d.e-]+ \+ 0 \* \|golden\| \(fp32 sums in any order"),
        ("step1.weights.img_in.weight", np.transpose, r"shape is \[28, 24\], want \[24, 28\]\n"),
        ("draws.t", lambda x: x.astype(np.int64), r"dtype is int64, want fp32\n"),
        (
            "bf16.prediction",
            lambda x: x.astype(np.float16),
            r"dtype is float16, want bf16\n(.|\n)*known mistakes:\n    - the numbers may be right; store them in bf16",
        ),
        ("img_in", lambda x: x.astype(np.float64), r"dtype is float64, want fp32\n"),
        ("draws.words.0", lambda x: x.astype(np.float64), r"dtype is float64, want uint64\n"),
        ("fp8.x.bits", lambda x: x.astype(np.int64) + 256, r"(\d+) of \1 elements\n"),
        ("img_in", lambda x: x + 0 * np.inf, r"720 of them NaN(.|\n)*    - a division by 0, a root of a negative"),
        ("bf16.target", in_bf16, r"mistakes with a difference of this size:\n    - it is rounded to bf16"),
    ):
        result = check({name: np.asarray(change(read(name)))})
        if result.code != 1 or result.first != name or not re.search(text, result.text):
            wrong.append((name, text, result))
    assert not wrong


def test_all_that_differs_is_in_the_table_and_the_first_is_explained(check):
    dump = {name: 1.5 * read(name) for name in ("prediction", "vec", "img_in")}
    result = check(dump | values("rope", "timestep_embedding", "loss"))
    assert (result.code, result.first) == (1, "img_in") and "6 values compared, 3 differ" in result.text
    assert re.findall(r"^  (\w+) +\d+ of \d+ elements", result.text, re.M) == ["img_in", "vec", "prediction"]
    assert result.text.count("worst at") == 1


def test_tolerated_differences_agree(check):
    """Rounding, signed words, a bf16 file, one element instead of a scalar."""
    narrow = {"bf16.prediction": torch.from_numpy(read("bf16.prediction")).bfloat16()}
    assert check(narrow).code == 0
    words = [value.name for value in KEPT.values if value.dtype == "uint64"]
    assert len(words) == 6 and check({name: read(name).view(np.int64) for name in words}).code == 0
    codes = {"fp8.x.bits": torch.from_numpy(read("fp8.x.bits")).view(torch.float8_e4m3fn)}
    assert check(codes | {"loss": read("loss").reshape(1)}).code == 0
    assert check({"img_in": read("img_in") * np.float32(1 + 1e-6)}).code == 0
    assert check({"draws.order.0": read("draws.order.0").astype(np.int16)}).code == 0


def test_the_loss_in_bf16_is_that_of_the_same_prediction(check):
    """A target that is rounded to bf16 changes a loss by less than bf16's tolerance."""
    prediction, target = read("bf16.prediction"), read("target")
    for rounded, code in ((target, 0), (in_bf16(target), 1)):
        losses = np.square(prediction - rounded).mean((1, 2))
        result = check({"bf16.prediction": prediction, "bf16.losses": losses})
        assert result.code == code and ("of your own bf16.prediction" in result.text) == bool(code), result.text
    assert check({"bf16.losses": losses}).code == 0


def test_a_step_in_bf16_shows_what_is_kept_in_bf16(check):
    for name in ("grad", "weights"):
        name = f"bf16.step.{name}.final_layer.linear.weight"
        result = check({name: in_bf16(read(name))})
        assert result.code == 1 and "all its numbers are bf16" in result.text, result.text


def test_the_mistake_whose_difference_is_as_large_comes_first(check, monkeypatch):
    known = {"prediction": {"half of it": 0.5, "a tenth of it": 0.1, "it is 4 % off": 0.04}}
    monkeypatch.setattr(check_module, "read_json", lambda *_: known)
    text = check({"prediction": read("prediction") * np.float32(1.041)}).text
    assert "mistakes with a difference of this size:\n    - it is 4 % off\n  known mistakes:\n    - weight" in text
    assert "half" not in text and "a tenth" not in text


def test_with_all_nothing_may_be_missing(check):
    assert check(values("rope")).code == 0 and check(values("rope"), "--all").code == 1
    assert check(values(*KEPT.arrays), "--all").code == 0
    assert check(values(*KEPT.arrays) | {"los": read("loss")}, "--all").code == 1


def test_names_that_are_missing_or_unknown_are_told(check):
    """A name of a terminal's commands does not reach it."""
    part = values("rope", "time_in.in_layer")
    result = check(part | {"\x1b[31m\n" + "x" * 500: part["rope"]})
    assert result.code == 0 and "\nmissing: draws.words.0, " in result.text and " ...\n" in result.text
    assert "\x1b" not in result.text and "unknown: \\x1b[31m xxx" in result.text and "x" * 500 not in result.text
    result = check({"pred": part["rope"]})
    assert result.code == 2 and "none of its 1 names is known" in result.err


# Packages that are not named do not exist.
BARE = """
import sys

class Bare:
    def find_spec(self, name, path, target=None):
        known = {*sys.stdlib_module_names, "numpy", "safetensors", "tqdm", "flux_ref", "tools"}
        if name.partition(".")[0] not in known:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Bare())
from flux_ref import cli
from tools.golden.check import main
sys.exit(cli.run("golden", main, sys.argv[1:]))
"""


def test_a_dump_is_compared_with_the_packages_that_the_page_names():
    page = (ROOT / "PORTING.md").read_text()
    assert "Python and `pip install numpy safetensors tqdm`" in page
    done = subprocess.run(
        [sys.executable, "-c", BARE, FOLDER / VALUES], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and " 0 differ, 0 missing" in done.stdout, done.stderr


def test_damage_is_one_line(tmp_path, capsys, monkeypatch):
    """Of a dump, and of the golden files."""
    whole = (FOLDER / VALUES).read_bytes()
    strange = safetensors.torch.save({"rope": torch.zeros(1, dtype=torch.complex64)})
    monkeypatch.setattr(check_module, "FOLDER", tmp_path)
    (tmp_path / MISTAKES).write_text("{}")
    for path in (VALUES, INDEX):
        (tmp_path / path).write_bytes((FOLDER / path).read_bytes())
    assert "is no file" in refusal(check_module.main, [str(tmp_path)])
    for name, content, text in (
        ("dump", b"", "is not a whole safetensors file"),
        ("dump", whole[:-1], "is not a whole safetensors file"),
        ("dump", b"PK\x03\x04" + bytes(200), "is not a whole safetensors file"),
        ("dump", strange, "has dtype C64"),
        (VALUES, whole[:-1] + b"x", "is not the file that"),
    ):
        files = {"dump": whole, VALUES: whole, INDEX: (FOLDER / INDEX).read_bytes(), name: content}
        for path, written in files.items():
            (tmp_path / path).write_bytes(written)
        code = cli.run("golden", check_module.main, [str(tmp_path / "dump")])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1) and text in err and err.startswith("golden: "), text
