"""What `check --from` says about a dump, without any run: dumps are the golden values with changes."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy
from conftest import ROOT

from tools.golden import commands as golden
from tools.golden import formulas
from tools.golden.commands import FOLDER
from tools.golden.compare import compare
from tools.golden.files import VALUES, Golden
from tools.golden.tensor_file import TensorFile


@pytest.fixture(scope="module")
def kept() -> Golden:
    return Golden(FOLDER)


def said(kept: Golden, name: str, yours: np.ndarray, tmp_path) -> tuple[list[str], list[str]]:
    """The lines and the causes about one value."""
    safetensors.numpy.save_file({name: np.array(yours, order="C")}, tmp_path / "dump")
    value = next(value for value in kept.values if value.name == name)
    found = compare(kept, value, TensorFile(tmp_path / "dump"))
    return (found.lines, found.causes) if found else ([], [])


def test_the_right_formula_gives_golden_and_no_row_of_the_table_is_dead(kept):
    wrong, alive = [], {}
    for value in kept.values:
        want = kept.file.read(value.name).astype(np.float64)
        pattern = next((p for p in formulas.TABLE["formulas"] if re.fullmatch(p, value.name)), None)
        for cause, array in formulas.formulas(kept, value.name):
            if array.shape != want.shape:
                continue
            alive.setdefault(pattern, set()).add(cause)
            off = np.abs(array.astype(np.float64) - want) > value.atol + value.rtol * np.abs(want)
            wrong += [(value.name, off.sum())] if cause == formulas.RIGHT and off.any() else []
    everywhere = set().union(*alive.values())
    shared = {row for text in formulas.TABLE["shared"].values() for row in formulas.rows(text)}
    dead = [
        row
        for pattern, causes in alive.items()
        for row in formulas.rows(formulas.TABLE["formulas"][pattern])
        # A shared row may have no sense at one of its places.
        if " | " in row and not _is_among(row, everywhere if row in shared else causes)
    ]
    has_right = [pattern for pattern, causes in alive.items() if formulas.RIGHT in causes]
    assert not wrong and not dead and has_right == list(alive), (wrong, dead)


def _is_among(row: str, causes: set[str]) -> bool:
    pattern = re.escape(row.partition(" | ")[0]).replace(re.escape("{i}"), ".*")
    return any(re.fullmatch(pattern, cause) for cause in causes)


def noisy(x: np.ndarray, size: float) -> np.ndarray:
    noise = np.random.default_rng(0).normal(size=x.shape) * np.sqrt((x**2).mean())
    return (x + size * noise).astype(np.float32)


SAID = [  # value, how a port's differs, words of a line or of one of the first two causes
    ("prediction", lambda x: noisy(x, 3e-4), "products in TF32"),
    ("single_blocks.1", lambda x: noisy(x, 1.7e-3), "products in bf16"),
    ("single_blocks.2", lambda x: (x.view(np.uint32) & 0xFFFF0000).view(np.float32), "the precision of bf16"),
    ("bf16.prediction", lambda x: noisy(x, 1e-3), "yours is not bf16: 8"),
    ("bf16.prediction", lambda x: noisy(x, 1e-3), "computed in fp32; bf16.prediction is bf16"),
    ("double_blocks.1.img", lambda x: np.roll(x, 1, 1), "golden rolled by 1 along axis 1"),
    ("double_blocks.1.img", lambda x: np.roll(x, 12, 2), "with its halves exchanged along axis 2"),
    ("double_blocks.1.img", lambda x: x[:, ::-1], "golden reversed along axis 1"),
    ("grad.double_blocks.1.txt_attn.proj.weight", lambda x: x.T, "axes 0 and 1 exchanged"),
    ("single_blocks.1", lambda x: np.where(np.arange(26)[:, None] < 11, 2 * x, x), "axis 1: 0 .. 10"),
    ("single_blocks.1", lambda x: np.where(np.arange(26)[:, None] < 11, 2 * x, x), "there yours is 2 x golden"),
    ("loss", lambda x: 2 * x, "yours is 2 x golden (2 samples of a batch)"),
    ("grad.txt_in.bias", lambda x: 0 * x, "yours is zero everywhere"),
    ("fp8.x.scale", lambda x: 1 / x, "the inverse of the scale"),
    ("draws.order.1", lambda x: x + 1, "yours is golden +1 everywhere"),
    (
        "grad.img_in.weight",
        lambda x: np.where(x > x.max() / 2, np.inf, x),
        "36 of its 672 elements are not finite, the first at [0, 5]",
    ),
]


@pytest.mark.filterwarnings("ignore:divide by zero")
def test_it_says_what_the_numbers_tell(kept, tmp_path):
    wrong = []
    for name, change, words in SAID:
        yours = change(kept.file.read(name))
        lines, causes = said(kept, name, yours.astype(np.float32) if yours.dtype.kind == "f" else yours, tmp_path)
        if not any(words in line for line in lines + causes[:2]):
            wrong.append((name, words, lines, causes))
    assert not wrong


def test_it_makes_no_false_claims(kept, tmp_path):
    """Sorted, values that are close to each other agree within a tolerance, whatever they are."""
    claims = []
    zeros = np.zeros(24, np.float32)
    for name, change in (
        ("grad.txt_in.bias", lambda x: x * np.float32(1.0005)),
        ("grad.double_blocks.0.img_attn.qkv.weight", lambda x: noisy(x, 3e-4)),
        ("bf16.single_blocks.0", lambda x: np.roll(x.reshape(2, 26, 3, 8), 4, 3).reshape(x.shape)),
        ("grad.vector_in.out_layer.bias", lambda x: zeros),
        ("step2.loss", lambda x: x * np.float32(1.3)),
    ):
        lines, _ = said(kept, name, change(kept.file.read(name)), tmp_path)
        claims += [(name, line) for line in lines if re.search("another order|golden value of|rolled|reversed", line)]
        assert lines, name
    assert not claims


def test_names_and_exit_codes(kept, tmp_path, capsys):
    """A typo gets the nearest name. Missing and unknown names change the exit code on request."""
    whole = {value.name: kept.file.read(value.name) for value in kept.values if not value.given}
    part = {"rope": whole["rope"], "time_in.in_layer": whole["time_in.in_layer"]}
    dumps = {"whole": whole, "part": part, "typo": part | {"singleblocks.1": whole["single_blocks.1"]}}
    for name, tensors in dumps.items():
        safetensors.numpy.save_file(tensors, tmp_path / name)

    def run(dump: str, *options: str) -> int:
        return golden.main(["check", "--from", str(tmp_path / dump), *options])

    codes = [run("whole", "--complete"), run("part"), run("part", "--complete"), run("typo")]
    assert codes == [0, 0, 3, 0]
    assert "singleblocks.1 (do you mean single_blocks.1?)" in capsys.readouterr().out
    only = [run("part", "--complete", "--only", "rope"), run("typo", "--complete", "--only", "rope")]
    assert only == [0, 3] and capsys.readouterr().out.startswith("1 places compared, 0 differ, 0 missing, 0 unknown\n")
    assert [run("part", "--only", "grad.*"), run("part", "--only", "nothing")] == [2, 2]
    assert "matches no name" in capsys.readouterr().err
    run("part", "--all")
    assert " more\n" not in capsys.readouterr().out


def test_all_lists_all(kept, tmp_path, capsys):
    norms = [value.name for value in kept.values if re.match(r"step\d\.weights", value.name)]
    safetensors.numpy.save_file({name: kept.file.read(name) + 1 for name in norms}, tmp_path / "dump")
    listed = {}
    for options in ([], ["--all"]):
        assert golden.main(["check", "--from", str(tmp_path / "dump"), *options]) == 1
        text = capsys.readouterr().out
        listed[len(options)] = len(re.findall(r"^  step\d\.weights\S+: .* x its tolerance$", text, re.M))
    assert listed == {0: 20, 1: len(norms)}


def test_a_dump_is_compared_without_torch():
    """A port's machine needs Python and numpy only."""
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'safetensors', 'yaml'))); from tools.golden import"
        f" commands; sys.exit(commands.main(['check', '--from', {str(FOLDER / VALUES)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and " 0 differ, 0 missing" in done.stdout, done.stderr


def test_dtypes_of_dumps_are_read_as_they_are(tmp_path):
    torch = pytest.importorskip("torch")
    import safetensors.torch

    kinds = (
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int8,
        torch.bool,
    )
    tensors = {str(kind): torch.arange(-3, 4).to(kind) for kind in kinds}
    safetensors.torch.save_file(tensors, tmp_path / "dump")
    file = TensorFile(tmp_path / "dump")
    for name, tensor in tensors.items():
        is_fp8 = "float8" in name
        want = tensor.view(torch.uint8) if is_fp8 else tensor.float() if "bfloat" in name else tensor
        assert np.array_equal(file.read(name), want.numpy()), name


def test_hostile_headers_are_one_line(tmp_path, capsys):
    def file(header: dict | str, data: int = 8) -> bytes:
        text = (header if isinstance(header, str) else json.dumps(header)).encode()
        return len(text).to_bytes(8, "little") + text + bytes(data)

    def entry(begin: object, end: object, dtype: object = "F32", shape: object = (1,)) -> dict:
        return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}

    contents = [
        *(file({"rope": entry(0, 4), "vec": entry(*span)}) for span in ((0, 4), (5, 9), (3, 7), (8, 12), (-4, 0))),
        *(file({"rope": entry(*span), "vec": entry(0, 8, shape=[2])}) for span in ((0, 4), (4, 8))),
        file({"rope": entry(4, 8)}),
        *(
            file({"rope": entry(0, 8, shape=shape)})
            for shape in ([2**62, 2**62], [1] * 99, [-2], "2", None, [2.0], [1])
        ),
        *(file({"rope": entry(0, 8, dtype, [2])}) for dtype in (None, ["F32"], "F4", "\x1b[2J" * 99)),
        *(file(text) for text in ('{"rope": NaN}', '{"rope": ' * 9999, '{"__metadata__": 3}')),
        (4).to_bytes(8, "little") + b"\xff\xfe{}" + bytes(8),
        (2**63).to_bytes(8, "little") + bytes(64),
        (2**24 - 1).to_bytes(8, "little") + bytes(64),
    ]
    wrong = []
    for content in contents:
        (tmp_path / "dump").write_bytes(content)
        code = golden.main(["check", "--from", str(tmp_path / "dump")])
        out, err = capsys.readouterr()
        is_clear = code == 2 and not out and err.count("\n") == 1 and "\x1b" not in err and len(err) < 600
        wrong += [] if is_clear else [(content[:99], code, out, err)]
    assert not wrong
