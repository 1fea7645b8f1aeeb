"""What `check --from` says about a dump, without any run: dumps are the golden values with changes."""

import json
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
from tools.golden.commands import FOLDER
from tools.golden.files import VALUES, Golden
from tools.golden.tensor_file import TensorFile

KEPT = Golden(FOLDER)


@pytest.fixture
def check(tmp_path, capsys):
    """check(dump, *options)"""
    return lambda dump, *options: checked(dump, tmp_path, capsys, *options)


def read(*names: str) -> dict[str, np.ndarray]:
    return {name: KEPT.file.read(name) for name in names}


def noisy(x: np.ndarray, size: float) -> np.ndarray:
    noise = np.random.default_rng(0).normal(size=x.shape) * np.sqrt((x**2).mean())
    return (x + size * noise).astype(np.float32)


def twice_the_text(x: np.ndarray) -> np.ndarray:
    return np.where(np.arange(26)[:, None] < 11, 2 * x, x)


def two_norms_off(x: np.ndarray) -> np.ndarray:
    return x * 1.01 ** np.isin(np.arange(88), (3, 80))


def without_bias(x: np.ndarray) -> np.ndarray:
    return x - KEPT.file.read("weights.img_in.bias")


WORDS = [  # value, how a port's differs, what the check must say
    ("prediction", lambda x: -x, "yours is golden negated\n"),
    ("prediction", lambda x: x.astype(np.float16), "its dtype is F16, want F32 or F64\n"),
    ("prediction", lambda x: noisy(x, 3e-4), "products in TF32"),
    ("single_blocks.1", lambda x: noisy(x, 1.7e-3), "products in bf16"),
    ("single_blocks.2", lambda x: (x.view(np.uint32) & 0xFFFF0000).view(np.float32), "the precision of bf16"),
    ("bf16.prediction", lambda x: noisy(x, 1e-3), "yours is not bf16: 8", "Computed in fp32?"),
    ("losses", lambda x: 28 * x, "yours is 28 x golden\n"),
    ("loss", lambda x: x * np.inf, "1 of its 1 elements are not finite, the first at []"),
    ("grad.txt_in.bias", lambda x: 0 * x, "yours is zero everywhere\n"),
    ("fp8.x.scale", lambda x: 1 / x, "yours is 1 / golden", "the inverse of the scale"),
    ("draws.t", lambda x: 1 - x, "yours is 1 - golden\n"),
    ("val.t", lambda x: x + np.float32(0.0625), "yours is golden +0.0625 everywhere\n"),
    ("draws.order.1", lambda x: x + 1, "yours is golden + 1 everywhere\n"),
    (
        "draws.words.1",
        lambda x: x - np.uint64(1),
        "yours is golden - 1 everywhere\n",
        "8 of 8 differ, first at [0]: yours",
    ),
    ("draws.order.0", np.argsort, "yours has the same numbers in another order along axis 0\n"),
    ("draws.order.0", lambda x: KEPT.file.read("draws.order.1"), "yours is the golden value of draws.order.1\n"),
    ("double_blocks.1.img", lambda x: KEPT.file.read("double_blocks.0.img"), "golden value of double_blocks.0.img\n"),
    ("double_blocks.1.img", lambda x: np.roll(x, 1, 1), "yours is golden rolled by 1 along axis 1\n"),
    ("double_blocks.1.img", lambda x: x[:, ::-1], "yours is golden reversed along axis 1\n"),
    ("img_in", without_bias, "yours is golden - 1 x weights.img_in.bias\n", "first:\n    - the bias is missing\n"),
    ("grad.double_blocks.1.txt_attn.proj.weight", lambda x: x.T, "golden with axes 0 and 1 exchanged\n"),
    ("single_blocks.1", lambda x: x.T.reshape(x.shape), "golden, transposed but stored with golden's shape\n"),
    ("step1.weights.img_in.weight", lambda x: x.T, "shape is [28, 24], want [24, 28] (it is the transposed)\n"),
    ("step1.weights.img_in.weight", lambda x: 2 * x.T, "its shape is [28, 24], want [24, 28]\n"),
    ("rope", lambda x: x[:1], "its shape is [1, 4, 2], want [26, 4, 2]\n"),
    ("img", lambda x: x.reshape(2, 15, 7, 2, 2).swapaxes(2, 4).reshape(2, 15, 28), "another order along axis 2\n"),
    ("double_blocks.0.attention", lambda x: x.reshape(2, 24, 26).swapaxes(1, 2), "in another order among all\n"),
    ("single_blocks.1", twice_the_text, "only 11 of 26 differ along axis 1: 0 .. 10\n", "there yours is 2 x golden\n"),
    ("batch.t", lambda x: x + np.float32(1e-6), "tolerance 0 (no rounding"),
    ("grad.norms", two_norms_off, "2 of 88 differ by more than 8.0e-05 of each"),
    ("grad.norms", two_norms_off, f"in the order of backward: {KEPT.parameters[80]}, {KEPT.parameters[3]}\n"),
]


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_it_tells_what_the_values_are_instead(check):
    wrong = []
    for name, change, *words in WORDS:
        golden_value = KEPT.file.read(name)
        yours = change(golden_value)
        if golden_value.dtype == np.float32 and yours.dtype == np.float64:
            yours = yours.astype(np.float32)
        result = check({name: yours})
        if result.code != 1 or result.first != name or not all(text in result.text for text in words):
            wrong.append((name, words, result))
    assert not wrong


def test_it_makes_no_false_claims(check):
    """Sorted, values that are close to each other agree within a tolerance, whatever they are."""
    claims = []
    for name, change in (
        ("grad.txt_in.bias", lambda x: x * np.float32(1.0005)),
        ("grad.double_blocks.0.img_attn.qkv.weight", lambda x: noisy(x, 3e-4)),
        ("bf16.single_blocks.0", lambda x: np.roll(x.reshape(2, 26, 3, 8), 4, 3).reshape(x.shape)),
        ("grad.vector_in.out_layer.bias", lambda x: 0 * x),
        ("step2.loss", lambda x: x * np.float32(1.3)),
    ):
        result = check({name: change(KEPT.file.read(name))})
        claims += re.findall("another order|golden value of|rolled|reversed", result.text.partition("\n    - ")[0])
        assert result.first == name
    growing = KEPT.file.read("prediction") * np.linspace(1.0002, 1.0006, 28, dtype=np.float32)
    assert not claims and "those of products" not in check({"prediction": growing}).text


def test_mistakes_with_a_sign_that_was_seen_come_first():
    known = places.mistakes("target", "")
    assert places.mistakes("target", "yours is golden negated")[0] == "velocity sign: noise - data" != known[0]
    assert sorted(places.mistakes("target", "yours is golden negated")) == sorted(known)
    assert places.mistakes("a value of another version", "") == []


def test_the_first_difference_is_explained_and_all_are_listed(check):
    dump = {name: array * np.float32(1.5) for name, array in read("img_in", "vec", "prediction").items()}
    result = check(dump | read("rope", "time_waves", "loss"))
    assert (result.code, result.first) == (1, "img_in") and "6 places compared, 3 differ" in result.text
    assert result.text.count("yours is 1.5 x golden") == 1
    assert "all values before it agree, the last of them is rope\n" in result.text
    listed = result.text.partition("all that differ")[2].partition("missing:")[0]
    assert re.findall(r"^  (\w+): [\d.e+]+ x its tolerance$", listed, re.M) == ["img_in", "vec", "prediction"]


def test_lists_are_cut_unless_all_is_asked(check):
    names = [value.name for value in KEPT.values if re.match(r"step\d\.weights", value.name)]
    dump = {name: array + 1 for name, array in read(*names).items()}
    line = r"^  step\d\.weights\S+: .* x its tolerance$"
    cut, whole = check(dump), check(dump, "--all")
    assert [len(re.findall(line, result.text, re.M)) for result in (cut, whole)] == [20, len(names)]
    assert re.search(r"missing:\n  draws.words.0, draws.words.1, [^;]* and \d+ more\n", cut.text)
    assert " more\n" not in whole.text


def test_names_and_exit_codes(check):
    """A typo gets the nearest name. Missing and unknown names change the exit code on request."""
    whole = read(*(value.name for value in KEPT.values if not value.given))
    part = read("rope", "time_in.in_layer")
    typo = part | {"singleblocks.1": whole["single_blocks.1"], "\x1b[31m\n" + "x" * 500: part["rope"]}
    only_rope = ("--complete", "--only", "rope")
    runs = [(whole, "--complete"), (part,), (part, "--complete"), (typo,), (part, *only_rope), (typo, *only_rope)]
    results = [check(dump, *options) for dump, *options in runs]
    assert [result.code for result in results] == [0, 0, 3, 0, 0, 3]
    assert "weights.img_in.bias" not in results[1].text.replace("step1.weights.img_in.bias", ""), "it is given"
    unknown = " ".join(results[3].text.split())
    assert "singleblocks.1 (do you mean single_blocks.1?)" in unknown
    assert "\x1b" not in unknown and "unknown: \\x1b[31m\\nxxx" in unknown and "x" * 101 not in unknown
    assert results[4].text.startswith("1 places compared, 0 differ, 0 missing, 0 unknown\n")
    assert [check(part, "--only", "grad.*").code, check(part, "--only", "nothing").code] == [2, 2]
    assert "matches no name" in check(part, "--only", "nothing").err


def test_a_dump_is_compared_without_torch():
    """A port's machine needs Python and numpy only."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'safetensors', 'yaml'))); from tools.golden import"
        f" commands; sys.exit(commands.main(['check', '--from', {str(FOLDER / VALUES)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and " 0 differ, 0 missing" in done.stdout, done.stderr


def test_dtypes_of_dumps_are_read_as_they_are(tmp_path, capsys, check):
    """Unsigned words may come as signed ones. Values in bf16 may be stored so, values in fp32 may not."""
    names = ["bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "bool"]
    tensors = {name: torch.arange(-3, 4).to(getattr(torch, name)) for name in names}
    safetensors.torch.save_file(tensors, tmp_path / "dump")
    file = TensorFile(tmp_path / "dump")
    for name, tensor in tensors.items():
        is_fp8 = "float8" in name
        want = tensor.view(torch.uint8) if is_fp8 else tensor.float() if name == "bfloat16" else tensor
        assert np.array_equal(file.read(name), want.numpy()), name
    words = [value.name for value in KEPT.values if value.dtype == "uint64"]
    assert len(words) == 6 and check({name: array.view(np.int64) for name, array in read(*words).items()}).code == 0
    assert check({"loss": KEPT.file.read("loss").reshape(1)}).code == 0, "some frameworks have no scalars"
    narrow = {name: torch.from_numpy(array).bfloat16() for name, array in read("prediction", "bf16.prediction").items()}
    safetensors.torch.save_file(narrow, tmp_path / "dump")
    assert golden.main(["check", "--from", str(tmp_path / "dump")]) == 1
    text = capsys.readouterr().out
    assert "2 places compared, 1 differ" in text and "its dtype is BF16, want F32 or F64" in text


def hostile_files() -> list[bytes]:
    """Files that are no whole safetensors files, most of them by what their header says."""

    def file(header: str | dict) -> bytes:
        text = (header if isinstance(header, str) else json.dumps(header)).encode()
        return len(text).to_bytes(8, "little") + text + bytes(8)

    def entry(begin: object, end: object, dtype: object = "F32", shape: object = (1,)) -> dict:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    headers: list[str | dict] = ["[]", '{"rope": 3}', '{"rope": {"shape": [1]}}', '{"rope": NaN}', '{"rope": ' * 9999]
    headers += ['{"__metadata__": 3}', "[" * 20_000, {"\x1b[2J": entry(0, 4, "?")}, {"rope": entry(4, 8)}]
    headers += [{"rope": entry(0, 4), "vec": entry(*span)} for span in ((0, 4), (5, 9), (3, 7), (8, 12), (-4, 0))]
    headers += [{"rope": entry(*span), "vec": entry(0, 8, shape=[2])} for span in ((0, 4), (4, 8))]
    headers.append({"rope": entry(0, 4, shape=[True]), "vec": entry(4, 8)})
    shapes = ([2**62, 2**62], [1] * 99, [-2], "2", None, [2.0], [1])
    headers += [{"rope": entry(0, 8, shape=shape)} for shape in shapes]
    headers += [{"rope": entry(0, 8, dtype, [2])} for dtype in (None, ["F32"], "F4", "\x1b[2J" * 99)]
    headers += [{"rope": {"dtype": "F32", "shape": [2], "data_offsets": 64}}]
    whole = safetensors.numpy.save(read("rope", "vec"))
    sizes = [size.to_bytes(8, "little") + bytes(64) for size in (2**63, 2**24 - 1)]
    not_text = (4).to_bytes(8, "little") + b"\xff\xfe{}" + bytes(8)
    foreign = [b"PK\x03\x04" + bytes(200), b"name,value\nloss,3\n" * 9]
    return [*map(file, headers), *sizes, not_text, *foreign, b"", whole[:5], whole[:20], whole[:-1]]


def test_a_damaged_or_foreign_dump_is_one_line(tmp_path, capsys):
    paths = {tmp_path / "missing": "No such file", tmp_path: "Is a directory"}
    paths[Path("/dev/zero")] = "is not a regular file"
    contents = [(content, "is not a whole safetensors file: ") for content in hostile_files()]
    contents.append((safetensors.numpy.save({"pred": KEPT.file.read("vec")}), "none of its 1 names is in"))
    for number, (content, text) in enumerate(contents):
        (tmp_path / str(number)).write_bytes(content)
        paths[tmp_path / str(number)] = text
    wrong = []
    for path, text in paths.items():
        code = golden.main(["check", "--from", str(path)])
        out, err = capsys.readouterr()
        is_one_line = err.startswith("golden: ") and err.count("\n") == 1 and "\x1b" not in err and len(err) < 700
        if code != 2 or out or not is_one_line or text not in err:
            wrong.append((path, text, code, out, err))
    assert not wrong
