"""What the comparison says about a dump, without any run: dumps are the golden values with changes."""

import re
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from checking import checked
from conftest import ROOT

from tools.golden import check as check_module
from tools.golden.files import FOLDER, INDEX, VALUES, Golden

KEPT = Golden(FOLDER)
read = KEPT.arrays.__getitem__


@pytest.fixture
def check(tmp_path, capsys):
    """check(dump, *options)"""
    return lambda dump, *options: checked(dump, tmp_path, capsys, *options)


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
    ):
        result = check({name: np.asarray(change(read(name)))})
        if result.code != 1 or result.first != name or not re.search(text, result.text):
            wrong.append((name, text, result))
    assert not wrong


def test_all_that_differs_is_in_the_table_and_the_first_is_explained(check):
    dump = {name: 1.5 * read(name) for name in ("prediction", "vec", "img_in")}
    result = check(dump | values("rope", "time_waves", "loss"))
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
    assert check({"img_in": read("img_in").astype(np.float64) * (1 + 1e-6)}).code == 0


def test_names_that_are_missing_or_unknown_are_told(check):
    """A name of a terminal's commands does not reach it."""
    part = values("rope", "time_in.in_layer")
    result = check(part | {"\x1b[31m\n" + "x" * 500: part["rope"]})
    assert result.code == 0 and "\nmissing: draws.words.0, " in result.text and ", ...\n" in result.text
    assert "\x1b" not in result.text and "unknown: \\x1b[31m\\nxxx" in result.text and "x" * 101 not in result.text
    result = check({"pred": part["rope"]})
    assert result.code == 2 and "none of its 1 names is known" in result.err


def test_a_dump_is_compared_without_torch():
    program = (
        "import sys; sys.modules['torch'] = None; from tools.golden.check import main;"
        f" sys.exit(main([{str(FOLDER / VALUES)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and " 0 differ, 0 missing" in done.stdout, done.stderr


def test_damage_is_one_line(tmp_path, capsys, monkeypatch):
    """Of a dump, and of the golden files."""
    whole = (FOLDER / VALUES).read_bytes()
    strange = safetensors.torch.save({"rope": torch.zeros(1, dtype=torch.complex64)})
    monkeypatch.setattr(check_module, "FOLDER", tmp_path)
    for name, content, text in (
        ("dump", whole[:-1], "is not a whole safetensors file"),
        ("dump", b"PK\x03\x04" + bytes(200), "is not a whole safetensors file"),
        ("dump", strange, "has dtype C64"),
        (VALUES, whole[:-1] + b"x", "is not the file that"),
    ):
        files = {"dump": whole, VALUES: whole, INDEX: (FOLDER / INDEX).read_bytes(), name: content}
        for path, written in files.items():
            (tmp_path / path).write_bytes(written)
        code = check_module.main([str(tmp_path / "dump")])
        out, err = capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1) and text in err and err.startswith("golden: "), text
