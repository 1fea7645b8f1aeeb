"""The C++ port in examples/ against the golden values, and against damaged files. Needs g++."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

from tools.golden.files import Golden
from tools.golden.tensor_file import TensorFile

pytestmark = [
    pytest.mark.slow,  # g++ needs 15 seconds or more for the port
    pytest.mark.skipif(not shutil.which("g++"), reason="the C++ port needs g++, which is not installed"),
]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """The compiled port. A warning is an error."""
    program = tmp_path_factory.mktemp("cpp") / "port"
    command = ["g++", "-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", str(ROOT / "examples" / "cpp_port.cpp")]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return program


def test_the_port_makes_the_golden_values(port, tmp_path):
    dump = tmp_path / "dump.safetensors"
    subprocess.run([port, GOLDEN, dump], check=True, timeout=120)
    check = [sys.executable, "-m", "tools.golden", "check", "--from", str(dump)]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and " 0 differ," in done.stdout and " 0 unknown" in done.stdout, done.stdout
    made = TensorFile(dump).entries
    missing = [value.name for value in Golden(GOLDEN).values if not value.given and value.name not in made]
    left_out = ("fp8.", "formats.", "full.", "bf16.step1.", "bf16.only.qk", "bf16.only.gelu_single", "clip.clipped")
    assert [name for name in missing if not name.startswith(left_out)] == []


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def hostile_size(tar: bytes) -> bytes:
    """The first member's size field says 8 GiB less one byte."""
    return tar[:124] + b"7" * 11 + tar[135:]


# file, how it is damaged, a part of the message
DAMAGES = [
    ("index.json", lambda data: b"[" * 100_000, "nested too deeply"),
    ("index.json", lambda data: data.replace(b'"shape": [2]', b'"shape": [99999999999999999999]'), "whole number"),
    ("config.toml", lambda data: data.replace(b"latent_height = 6", b"latent_height = 6e18"), "out of range"),
    ("config.toml", lambda data: b"", "lacks numbers"),
    ("golden.safetensors", lambda data: b"\xff" * 8 + data[8:], "cut off"),
    ("golden.safetensors", cut, "whole number from 0 to"),
    ("data/empty_encodings/t5_empty.npy", cut, "size of its values"),
    ("data/empty_encodings/t5_empty.npy", lambda data: data.replace(b"<f4", b"<f2"), "neither in fp32"),
]


def test_bad_usage_and_damaged_files_give_one_line(port, tmp_path):
    folder, dump, wrong = tmp_path / "golden", tmp_path / "dump.safetensors", []
    shutil.copytree(GOLDEN, folder, ignore=shutil.ignore_patterns("*.py"))
    shard = next(path.relative_to(folder) for path in sorted(folder.rglob("*.tar")))
    damages = [
        *DAMAGES,
        (str(shard), cut, "damaged or incomplete"),
        (str(shard), hostile_size, "cut off in"),
    ]

    def refuses(what: str, arguments: list, message: str) -> None:
        done = subprocess.run([port, *arguments], capture_output=True, text=True, timeout=60)
        if done.returncode != 2 or done.stderr.count("\n") != 1 or message not in done.stderr or dump.exists():
            wrong.append(f"{what}: exit code {done.returncode}, {done.stderr!r}")
            dump.unlink(missing_ok=True)

    refuses("no arguments", [], "usage")
    refuses("no folder", [tmp_path / "none", dump], "is missing")
    refuses("no place", [GOLDEN, tmp_path / "none" / "dump"], "cannot write")
    for name, damage, message in damages:
        whole = (folder / name).read_bytes()
        damaged = damage(whole)
        assert damaged != whole, f"{name} is not damaged"
        (folder / name).write_bytes(damaged)
        refuses(name, [folder, dump], message)
        (folder / name).write_bytes(whole)
    assert not wrong, "\n".join(wrong)
