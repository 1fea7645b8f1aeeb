"""Data sets in the forms in which people hold them: Energon's folders and shards that other tools wrote."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO, called, refusal
from run_files import what_counts
from shard_damage import opened

from flux_ref import config_file
from flux_ref.config import ModelConfig
from flux_ref.formats import shard_writer, shards
from flux_ref.formats.shard_writer import Sample
from flux_ref.formats.shards import MEMBERS

COUNT = 7


@pytest.fixture(scope="module")
def layout(micro):
    return shards.layout(micro.model)


@pytest.fixture(scope="module")
def micro():
    return config_file.load(MICRO)


def sample(layout, number: int) -> Sample:
    """Payloads that tell the sample's number in every element."""
    members = {
        name: np.full(shape, number + 16 * i, np.uint16) for i, (name, shape) in enumerate(layout.shapes.items())
    }
    return Sample(members, number % 8, f"caption {number}")


@pytest.fixture
def root(layout, tmp_path) -> Path:
    """A root of train/ and val/ of three shards and one, as Energon prepares it but for .nv-meta."""
    shard_writer.write(tmp_path / "train", [sample(layout, i) for i in range(COUNT)], "train", per_shard=3)
    shard_writer.write(tmp_path / "val", [sample(layout, 100 + i) for i in range(3)], "val")
    return tmp_path


def describe(root: Path, split_parts: object, exclude: list = ()) -> None:
    """Write .nv-meta/split.yaml as Energon does."""
    (root / ".nv-meta").mkdir(exist_ok=True)
    (root / ".nv-meta" / "split.yaml").write_text(json.dumps({"split_parts": split_parts, "exclude": list(exclude)}))


PARTS = {"train": ["train/shard_{000000..000002}.tar"], "val": ["val/shard_000000.tar"]}


def numbers(folder: Path, layout, split: str = "train") -> list[int]:
    """Which samples a set holds, in its order; every member must agree."""
    stored, rows = opened(folder, layout, split), layout.rows()
    order = []
    for index in range(len(stored)):
        meta = stored.read(index, rows)
        number = int(rows["t5"].flat[0])
        assert all((rows[name] == number + 16 * i).all() for i, name in enumerate(MEMBERS))
        assert (meta.timestep, meta.caption) == (number % 8, f"caption {number}")
        order.append(number)
    return order


def test_energons_splits_are_honoured_in_their_order_and_braces_expanded(root, layout, tmp_path_factory):
    assert "the folder above the one you mean" in refusal(numbers, root, layout)
    describe(root, PARTS)
    assert numbers(root, layout, "train") == list(range(COUNT))
    assert numbers(root, layout, "val") == [100, 101, 102]
    assert numbers(root / "train", layout) == list(range(COUNT)), "a folder inside is read as it is"
    describe(root, PARTS, exclude=["train/shard_{000001..000001}.tar"])
    assert numbers(root, layout) == [0, 1, 2, 6]
    path = root / "train" / "shard_000000.tar"
    path.symlink_to(path.rename(tmp_path_factory.mktemp("blobs") / "blob"))  # as in Hugging Face's cache
    describe(root, {"train": ["train/shard_000002.tar", "train/shard_000000.tar"]})
    assert numbers(root, layout) == [6, 0, 1, 2]


def test_the_stride_of_the_benchmarks_samples_is_the_public_one():
    assert shards.layout(ModelConfig()).stride == 2_169_344


def test_a_broken_split_is_explained_and_its_yaml_builds_no_objects(root, layout):
    splits = [
        ({"val": ["val/shard_000000.tar"]}, "lists no shards for 'train'"),
        ({"train": []}, "lists no shards for 'train'"),
        ({"train": "train"}, "lists no shards for 'train' (no list of names)"),
        ({"train": ["train/shard_{000000..000003}.tar"]}, "train/shard_000003.tar, which is not a file in"),
        ({"train": ["../train/shard_000000.tar"]}, "which is not a file in"),
        ({"train": ["/etc/passwd"]}, "lists /etc/passwd, which is not a file in"),
        (None, "lists no shards for 'train'"),
        ({"train": ["train/shard_{0..9999999}.tar"]}, "is no list and no range of 1 to 1,000,000 numbers"),
        ({"train": ["{,}" * 19, "{,}" * 19]}, "stand for more than 1,000,000 names"),
        ({"train": ["{,}" * 40]}, "stand for more than 1,000,000 names"),
        ({"train": ["{" * 99 + "}" * 99]}, "nested"),
        ({"train": ["train/shard_{0.tar"]}, "one is missing"),
        *(
            ({"train": [f"{{{text}}}"]}, "is no list and no range")
            for text in ("a..z", "2..1", "1..9..2", "\u0660..\u0661")
        ),
        ({"train": [["train/shard_000000.tar"]]}, "no list of names"),
        (
            {"train": ["train/shard_000000.tar", "train/shard_{000000..000001}.tar"]},
            "shard_000000.tar twice",
        ),
        (
            {"train": ["train/shard_000000.tar"], "val": ["train/shard_000000.tar"]},
            "shard_000000.tar twice",
        ),
    ]
    wrong = []
    for split_parts, words in splits:
        describe(root, split_parts)
        wrong += [] if words in (line := refusal(numbers, root, layout)) and "split.yaml" in line else [line]
    describe(root, PARTS, exclude=["train/shard_000000.tar/train_00000001"])
    assert "excludes the sample train/shard_000000.tar/train_00000001" in refusal(numbers, root, layout)
    listing = root / ".nv-meta" / "split.yaml"
    bomb = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))
    bomb = f"a0: &a0 [x]\n{bomb}\nsplit_parts: {{train: *a29}}"
    made = f"x: !!python/object/apply:os.mkdir ['{root}/made']"
    for text in ("a: [", "- a", "", "[" * 9999, "- " * 9999, bomb, made):
        listing.write_text(text)
        wrong += [] if "lists no shards" in (line := refusal(numbers, root, layout)) else [line]
    listing.unlink()
    assert "No such file" in refusal(numbers, root, layout)
    assert wrong == [] and not (root / "made").exists()


def test_training_does_not_depend_on_the_format(shapes_dir, tmp_path):
    splits = ("train", "val")
    for split in splits:
        shutil.copytree(shapes_dir / split, tmp_path / "data" / split)
    describe(tmp_path / "data", {split: [f"{split}/shard_{{000000..000000}}.tar"] for split in splits})
    found = []
    for folders in ([shapes_dir / split for split in splits], [tmp_path / "data"] * 2):
        data = [f"--data.{split}={folder}" for split, folder in zip(splits, folders)]
        data.append(f"--data.empty={shapes_dir}/empty_encodings")
        run = tmp_path / f"run {len(found)}"
        assert called("train.py", MICRO, "--data.kind=embeddings", *data, f"--run.dir={run}") == 0
        found.append(what_counts(run))
    assert found[0]["eval.jsonl"][-1]["count"] == 45
    assert found[1] == found[0]
