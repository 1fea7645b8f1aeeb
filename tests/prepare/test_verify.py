"""Checking a data set: what is wrong is found and named, and nothing is written."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import MICRO
from run_files import contents
from shard_damage import (
    NAN,
    blob_bytes,
    overwrite,
    overwrite_json,
    overwrite_value,
    position,
    write_set,
)

from flux_ref.dataset import BLOCK, MEMBERS, NPY_HEADER
from tools.prepare import __main__ as commands

TRAIN_0 = "train/shard_000000.tar"
TRAIN_1 = "train/shard_000001.tar"


@pytest.fixture(scope="module")
def micro(tmp_path_factory):
    """A config with the micro model and no word on data."""
    path = tmp_path_factory.mktemp("config") / "micro.toml"
    path.write_text("\n".join(line for line in MICRO.read_text().splitlines() if not line.startswith("data.")))
    return str(path)


@pytest.fixture
def root(tmp_path):
    write_set(tmp_path / "set", 8, 16)
    return tmp_path / "set"


@pytest.fixture
def run(micro, capsys):
    """Check a folder in this process: the exit code and what was said."""

    def call(folder, *args):
        code = commands.main(["verify", str(folder), "--config", micro, *args])
        said = capsys.readouterr()
        return code, said.out + said.err

    return call


# Planting damage


def say(timestep):
    """In the json of sample 1 of validation."""
    return lambda root: overwrite_json(root / "val/shard_000000.tar", json.dumps({"timestep": timestep}))


def value(member, bits):
    return lambda root: overwrite_value(root / TRAIN_0, member, bits)


def zeros(member, sign):
    content = sign * (blob_bytes(member) // 2 - NPY_HEADER // 2)
    return lambda root: overwrite(root / TRAIN_0, position(member) + BLOCK + NPY_HEADER, content)


FAST = [  # what a look at names, sizes, first and last samples finds
    (lambda r: (r / TRAIN_0).write_bytes(b""), f"{TRAIN_0} (0 bytes) is truncated"),
    (lambda r: overwrite(r / TRAIN_0, position("t5", 0) + BLOCK, b"x"), f"{TRAIN_0}, sample 0: t5 is no .npy file"),
    (lambda r: (r / TRAIN_1).unlink(), "train: shard 1 is missing, shard_000002.tar comes in its place"),
    (lambda r: [path.unlink() for path in r.glob("train/*")], "train holds no *.tar shard"),
    (lambda r: shutil.copy(r / TRAIN_1, r / "train/shard_000003.tar"), "its key train_00000003 is that of"),
    (lambda r: (r / "empty_encodings/clip_empty.npy").unlink(), "clip_empty.npy: [Errno 2] No such file"),
    (lambda r: (r / "empty_encodings/t5_empty.npy").write_bytes(b""), "t5_empty.npy: "),
]
SLOW = [
    (value("t5", NAN), f"{TRAIN_0}, sample 1: t5 holds NaN or infinite values"),
    *((zeros(name, b"\0\0"), f"{TRAIN_0}, sample 1: {name} is all zeros") for name in MEMBERS),
    (zeros("mean", b"\0\x80"), "mean is all zeros"),
    (value("t5", 0x7E80), "t5 holds 8.51e+37, want values from -1000 to 1000"),
    (value("mean", 0xC680), "mean holds -1.64e+04, want"),
    (value("logvar", 0x41F0), "logvar holds 30, want values from -100 to 20"),
    (say(8), "equally often, found {0: 2, 8: 1, 2: 2, "),
    (say(None), "val: want timesteps 0 to 7 equally often"),
    (lambda r: [path.unlink() for path in (r / "val").iterdir() if path.name[11] != "0"], "val: want timesteps 0 to 7"),
    (say(7), "equally often, found {0: 2, 7: 3, 2: 2, "),
]


def test_damage_is_found_and_named_and_nothing_is_written(root, run):
    whole = Path(shutil.copytree(root, root.with_name("whole")))
    wrong = []
    for options, damages in (([], FAST + SLOW), (["--fast"], FAST)):
        for plant, words in damages:
            plant(root)
            planted = contents(root)
            code, said = run(root, *options)
            if code != 1 or words not in said or "FAIL" not in said or contents(root) != planted:
                wrong.append((words, said))
            shutil.rmtree(root)
            shutil.copytree(whole, root)
    assert wrong == []
    value("t5", NAN)(root)
    assert run(root, "--fast")[0] == 0, "it reads nothing between the ends"


def test_a_whole_set_passes_with_its_numbers_alone_and_beside_the_empty_encodings(root, run, tmp_path, micro):
    for folder in (root, root / "val", root / "train"):
        code, said = run(folder)
        assert code == 0 and "\nPASS\n" in said, said
    assert run(root)[1].splitlines()[:2] == ["train: 8 samples in 3 shards", "val: 16 samples in 6 shards"]
    for count, code in (("8", 0), ("9", 1)):
        (tmp_path / "count.toml").write_text(Path(micro).read_text() + f"\ndata.expected_train_samples = {count}")
        assert run(root, f"--config={tmp_path}/count.toml")[0] == code
    code, said = run(root / "none")
    assert code == 1 and "does not exist" in said
