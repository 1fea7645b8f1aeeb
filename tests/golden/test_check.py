"""What `check --from` says about a dump, without any run: dumps are the golden values with changes."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from checking import checked
from conftest import ROOT

from tools.golden import commands as golden
from tools.golden import places
from tools.golden.files import FOLDER, VALUES, Golden
from tools.golden.tensor_file import TensorFile

KEPT = Golden(FOLDER)
read = KEPT.file.read


@pytest.fixture
def check(tmp_path, capsys):
    """check(dump, *options)"""
    return lambda dump, *options: checked(dump, tmp_path, capsys, *options)


def values(*names: str) -> dict[str, np.ndarray]:
    return {name: read(name) for name in names}


def noisy(x: np.ndarray, size: float) -> np.ndarray:
    noise = np.random.default_rng(0).normal(size=x.shape) * np.sqrt((x**2).mean())
    return x + size * noise


def other_patches(x: np.ndarray) -> np.ndarray:
    return x.reshape(2, 15, 7, 2, 2).swapaxes(2, 4).reshape(2, 15, 28)


def twice_the_text(x: np.ndarray) -> np.ndarray:
    return np.where(np.arange(26)[:, None] < 11, 2 * x, x)


def two_norms_off(x: np.ndarray) -> np.ndarray:
    return x * 1.01 ** np.isin(np.arange(88), (3, 80))


def without_bias(x: np.ndarray) -> np.ndarray:
    return x - read("weights.img_in.bias")


WORDS = [  # value, how a port's differs, what the check must say
    ("prediction", np.negative, "yours is golden negated\n"),
    ("single_blocks.2", lambda x: (x.view(np.uint32) & 0xFFFF0000).view(np.float32), "the precision of bf16"),
    ("bf16.prediction", lambda x: noisy(x, 1e-3), "yours is not bf16: 8"),
    ("losses", lambda x: 28 * x, "yours is 28 x golden\n"),
    ("loss", lambda x: x * np.inf, "1 of 1 elements are not finite, the first at []"),
    ("grad.txt_in.bias", np.zeros_like, "yours is zero everywhere\n"),
    ("fp8.x.scale", np.reciprocal, "yours is 1 / golden"),
    ("draws.t", lambda x: 1 - x, "yours is 1 - golden\n"),
    ("val.t", lambda x: x + np.float32(0.0625), "yours is golden +0.0625 everywhere\n"),
    ("draws.order.1", lambda x: x + 1, "yours is golden +1 everywhere\n"),
    ("draws.words.1", lambda x: x - np.uint64(1), "8 of 8 elements differ by more than 0.0 (no rounding is involved"),
    ("draws.order.0", np.argsort, "yours has the same numbers in another order along axis 0\n"),
    ("draws.order.0", lambda x: read("draws.order.1"), "yours is the golden value of draws.order.1\n"),
    ("double_blocks.1.img", lambda x: np.roll(x, 1, 1), "yours is golden rolled by 1 along axis 1\n"),
    ("double_blocks.1.img", lambda x: x[:, ::-1], "yours is golden reversed along axis 1\n"),
    ("img_in", without_bias, "yours is golden - 1 x weights.img_in.bias\n"),
    ("img_in", without_bias, "likeliest first:\n    - the bias is missing\n"),
    ("grad.double_blocks.1.txt_attn.proj.weight", np.transpose, "golden with axes 0 and 1 exchanged\n"),
    ("single_blocks.1", lambda x: x.T.reshape(x.shape), "golden, transposed but stored with golden's shape\n"),
    ("step1.weights.img_in.weight", np.transpose, "shape is [28, 24], want [24, 28] (transposed?)\n"),
    ("rope", lambda x: x[:1], "its shape is [1, 4, 2], want [26, 4, 2]\n"),
    ("img", other_patches, "another order along axis 2\n"),
    ("double_blocks.0.attention", lambda x: x.reshape(2, 24, 26).swapaxes(1, 2), "in another order among all\n"),
    ("single_blocks.1", twice_the_text, "only 11 of 26 differ along axis 1: 0, 1, 2, "),
    ("single_blocks.1", twice_the_text, "there yours is 2 x golden\n"),
    ("grad.norms", two_norms_off, "2 of 88 elements differ by more than 8e-05 of each"),
    ("grad.norms", two_norms_off, f"in the order of backward: {KEPT.parameters[80]}, {KEPT.parameters[3]}\n"),
]


def test_it_tells_what_the_values_are_instead(check):
    wrong = []
    for name, change, text in WORDS:
        golden_value = read(name)
        result = check({name: change(golden_value).astype(golden_value.dtype)})
        if result.code != 1 or result.first != name or text not in result.text:
            wrong.append((name, text, result))
    assert not wrong


def test_it_makes_no_false_claims(check):
    """Sorted, values that are close to each other agree within a tolerance, whatever they are."""
    claims = []
    for name, change in (
        ("grad.txt_in.bias", lambda x: x * np.float32(1.0005)),
        ("grad.double_blocks.0.img_attn.qkv.weight", lambda x: noisy(x, 3e-4).astype(np.float32)),
        ("bf16.single_blocks.0", lambda x: np.roll(x.reshape(2, 26, 3, 8), 4, 3).reshape(x.shape)),
        ("grad.vector_in.out_layer.bias", np.zeros_like),
        ("step2.loss", lambda x: x * np.float32(1.3)),
        ("draws.words.1", lambda x: x - np.uint64(1)),
    ):
        result = check({name: change(read(name))})
        claims += re.findall("another order|golden value of|rolled|reversed", result.text.partition("\n    - ")[0])
        assert result.first == name
    assert not claims


def test_mistakes_with_a_sign_that_was_seen_come_first():
    known = places.mistakes("target", "")
    seen = places.mistakes("target", "yours is golden negated")
    assert seen[0] == "velocity sign: noise - data" != known[0] and sorted(seen) == sorted(known)
    assert places.mistakes("a value of another version", "") == []


def test_the_first_difference_is_explained_and_all_are_listed(check):
    dump = {name: array * np.float32(1.5) for name, array in values("img_in", "vec", "prediction").items()}
    result = check(dump | values("rope", "time_waves", "loss"))
    assert (result.code, result.first) == (1, "img_in") and "6 places compared, 3 differ" in result.text
    assert result.text.count("yours is 1.5 x golden") == 1
    assert "all values before it agree, the last of them is rope\n" in result.text
    listed = result.text.partition("all that differ")[2].partition("missing:")[0]
    assert re.findall(r"^  (\w+): [\d.e+]+ times its tolerance$", listed, re.M) == ["img_in", "vec", "prediction"]


def test_lists_are_cut_unless_all_is_asked(check):
    names = [value.name for value in KEPT.values if re.match(r"step\d\.weights", value.name)]
    dump = {name: array + 1 for name, array in values(*names).items()}
    for options, count in (((), 20), (("--all",), len(names))):
        text = check(dump, *options).text
        assert len(re.findall(r"^  step\d\.weights\S+: .* times its tolerance$", text, re.M)) == count
        assert bool(re.search(r"missing:\n  draws.words.0, [^;]* and\s+\d+ more\n", text)) == (not options)


def test_names_and_exit_codes(check):
    """Missing and unknown names change the exit code on request."""
    whole = values(*(value.name for value in KEPT.values if not value.given))
    part = values("rope", "time_in.in_layer")
    foreign = part | {"\x1b[31m\n" + "x" * 500: part["rope"]}
    for code, dump, *options in (
        (0, whole, "--complete"),
        (0, part),
        (3, part, "--complete"),
        (0, foreign),
        (0, part, "--complete", "--only", "rope"),
        (3, foreign, "--complete", "--only", "rope"),
        (2, part, "--only", "grad.*"),
        (2, part, "--only", "nothing"),
    ):
        result = check(dump, *options)
        assert result.code == code, (result.text, result.err, options)
    assert "matches no name" in result.err
    assert "weights.img_in.bias" not in check(part).text.replace("step1.weights.img_in.bias", ""), "it is given"
    text = check(foreign).text
    assert "\x1b" not in text and "unknown:\n  \\x1b[31m\\nxxx" in text and "x" * 101 not in text
    assert check(part, "--only", "rope").text == "1 places compared, 0 differ, 0 missing, 0 unknown\n"


def test_a_dump_is_compared_without_torch():
    """A port's machine needs Python and numpy only."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'safetensors', 'yaml'))); from tools.golden import"
        f" commands; sys.exit(commands.main(['check', '--from', {str(FOLDER / VALUES)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and " 0 differ, 0 missing" in done.stdout, done.stderr


def test_dtypes_of_dumps_are_read_as_they_are(tmp_path, check):
    """Unsigned words may come as signed ones. Values in bf16 may be stored so, values in fp32 may not."""
    numbers = torch.arange(-3, 4)
    for dtype, read_as in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float64, torch.float64),
        (torch.int8, torch.int8),
        (torch.bool, torch.bool),
        (torch.float8_e4m3fn, None),
        (torch.float8_e5m2, None),
    ):
        tensor = numbers.to(dtype)
        safetensors.torch.save_file({"x": tensor}, tmp_path / "file")
        want = tensor.to(read_as) if read_as else tensor.view(torch.uint8)
        assert np.array_equal(TensorFile(tmp_path / "file").read("x"), want.numpy()), dtype
    narrow = {"bf16.prediction": torch.from_numpy(read("bf16.prediction")).bfloat16()}
    safetensors.torch.save_file(narrow, tmp_path / "narrow")
    assert golden.main(["check", "--from", str(tmp_path / "narrow")]) == 0
    words = [value.name for value in KEPT.values if value.dtype == "uint64"]
    assert len(words) == 6 and check({name: read(name).view(np.int64) for name in words}).code == 0
    assert check({"loss": read("loss").reshape(1)}).code == 0, "some frameworks have no scalars"
    assert "its dtype is F16, want F32 or F64\n" in check({"loss": read("loss").astype(np.float16)}).text


def hostile_files() -> list[bytes]:
    """Files that are no whole safetensors files. hostile.txt holds headers of files with 8 bytes of data."""
    headers = Path(__file__).with_name("hostile.txt").read_bytes().splitlines()
    headers += [b'{"rope": ' * 9999, b"[" * 20_000, b"\xff\xfe{}"]
    files = [len(header).to_bytes(8, "little") + header + bytes(8) for header in headers]
    whole = safetensors.numpy.save(values("rope", "vec"))
    lengths = [length.to_bytes(8, "little") + whole[8:] for length in (2**63, 2**24 - 1)]
    foreign = [b"PK\x03\x04" + bytes(200), b"name,value\nloss,3\n" * 9]
    return [*files, *lengths, *foreign, b"", whole[:5], whole[:20], whole[:-1]]


def test_a_damaged_or_foreign_dump_is_one_line(tmp_path, capsys):
    cases = [(tmp_path / "missing", "No such file"), (tmp_path, "Is a directory")]
    cases.append((Path("/dev/zero"), "is not a regular file"))
    contents = [(content, "is not a whole safetensors file: ") for content in hostile_files()]
    contents.append((safetensors.numpy.save({"pred": read("vec")}), "none of its 1 names is in"))
    for number, (content, text) in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
        cases.append((tmp_path / str(number), text))
    wrong = []
    for path, text in cases:
        code = golden.main(["check", "--from", str(path)])
        out, err = capsys.readouterr()
        is_one_line = err.startswith("golden: ") and err.count("\n") == 1 and "\x1b" not in err and len(err) < 700
        if code != 2 or out or not is_one_line or text not in err:
            wrong.append((path, text, code, out, err))
    assert not wrong
