"""The C++ port in examples/ against the golden values, and against damaged files. Needs g++."""

import re
import shutil
import subprocess

import pytest
from conftest import ROOT

from tools.golden import commands as golden
from tools.golden.files import FOLDER, Golden
from tools.golden.tensor_file import TensorFile

pytestmark = [
    pytest.mark.slow,  # g++ needs 15 seconds or more for the port
    pytest.mark.skipif(not shutil.which("g++"), reason="the C++ port needs g++, which is not installed"),
]


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """The compiled port. A warning is an error."""
    program = tmp_path_factory.mktemp("cpp") / "port"
    command = ["g++", "-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", str(ROOT / "examples" / "cpp_port.cpp")]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return program


def test_the_port_makes_the_golden_values(port, tmp_path, capsys):
    dump = tmp_path / "dump.safetensors"
    subprocess.run([port, FOLDER, dump], check=True, timeout=120)
    code = golden.main(["check", "--from", str(dump)])
    text = capsys.readouterr().out
    assert code == 0 and " 0 unknown" in text, text
    made = TensorFile(dump).entries
    left_out = ("fp8.", "formats.", "full.", "bf16.step1.", "bf16.only.qk", "bf16.only.gelu_single", "clip.clipped")
    names = [value.name for value in Golden(FOLDER).values if not value.given]
    assert [name for name in names if name not in made and not name.startswith(left_out)] == []


DAMAGES = [  # file, what of its content is replaced and by what (None: its second half is cut off), the message
    ("index.json", rb"(?s)\A.*", b"[" * 100_000, "nested too deeply"),
    ("index.json", rb'"shape": \[2\]', b'"shape": [99999999999999999999]', "whole number"),
    ("config.toml", rb"latent_height = 6", b"latent_height = 6e18", "out of range"),
    ("config.toml", rb"(?s)\A.*", b"", "lacks numbers"),
    ("golden.safetensors", rb"(?s)\A.{8}", b"\xff" * 8, "cut off"),
    ("golden.safetensors", None, b"", "whole number from 0 to"),
    ("data/empty_encodings/t5_empty.npy", None, b"", "size of its values"),
    ("data/empty_encodings/t5_empty.npy", rb"<f4", b"<f2", "neither in fp32"),
    ("data/train/shard_000000.tar", None, b"", "damaged or incomplete"),
    ("data/train/shard_000000.tar", rb"(?s)\A(.{124}).{11}", rb"\g<1>77777777777", "cut off in"),  # 8 GiB less a byte
]


def test_bad_usage_and_damaged_files_give_one_line(port, tmp_path):
    folder = tmp_path / "golden"
    dump = tmp_path / "dump.safetensors"
    wrong = []
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py"))

    def refuses(what: str, arguments: list, message: str) -> None:
        done = subprocess.run([port, *arguments], capture_output=True, text=True, timeout=60)
        if done.returncode != 2 or done.stderr.count("\n") != 1 or message not in done.stderr or dump.exists():
            wrong.append(f"{what}: exit code {done.returncode}, {done.stderr!r}")
            dump.unlink(missing_ok=True)

    refuses("no arguments", [], "usage")
    refuses("no folder", [tmp_path / "none", dump], "is missing")
    refuses("no place", [FOLDER, tmp_path / "none" / "dump"], "cannot write")
    for name, old, new, message in DAMAGES:
        whole = (folder / name).read_bytes()
        damaged = re.sub(old, new, whole, count=1) if old else whole[: len(whole) // 2]
        assert damaged != whole, f"{name} is not damaged"
        (folder / name).write_bytes(damaged)
        refuses(name, [folder, dump], message)
        (folder / name).write_bytes(whole)
    assert not wrong, "\n".join(wrong)
