"""Data sets in the forms in which people hold them: Energon's folders and shards that other tools wrote."""

import io
import json
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import webdataset
from conftest import MICRO, called
from run_files import what_counts

from flux_ref import config_file
from flux_ref.errors import Refusal
from flux_ref.formats import shard_writer, shards, tar_index
from flux_ref.formats.shard_writer import Sample
from flux_ref.formats.shards import MEMBERS, ShardSet

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


def describe(root: Path, split_parts: dict, exclude: list = (), counts: dict | None = None, info: str = "json") -> None:
    """Write .nv-meta as Energon does: 7.x keeps its counts as JSON, 6.x as YAML."""
    meta = root / ".nv-meta"
    meta.mkdir(exist_ok=True)
    (meta / "split.yaml").write_text(json.dumps({"split_parts": split_parts, "exclude": list(exclude)}))
    if counts is not None:
        (meta / f".info.{info}").write_text(json.dumps({"shard_counts": counts}))


PARTS = {"train": ["train/shard_{000000..000002}.tar"], "val": ["val/shard_000000.tar"]}
COUNTS = {f"train/shard_00000{i}.tar": n for i, n in enumerate((3, 3, 1))} | {"val/shard_000000.tar": 3}


def numbers(folder: Path, layout, split: str = "train") -> list[int]:
    """Which samples a set holds, in its order; every member must agree."""
    found = ShardSet(folder, layout, split)
    found.open()
    rows = {name: np.empty(layout.shapes[name], np.uint16) for name in MEMBERS}
    order = []
    for index in range(len(found)):
        meta = found.read(index, rows)
        number = int(rows["t5"].flat[0])
        assert all((rows[name] == number + 16 * i).all() for i, name in enumerate(MEMBERS))
        assert (meta.timestep, meta.caption) == (number % 8, f"caption {number}")
        order.append(number)
    return order


def refusal(folder: Path, layout, split: str = "train") -> str:
    with pytest.raises(Refusal) as refused:
        numbers(folder, layout, split)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# Energon


@pytest.mark.parametrize("info", ["json", "yaml"])
def test_energons_splits_are_honoured_and_braces_expanded(root, layout, info):
    describe(root, PARTS, counts=COUNTS, info=info)
    assert numbers(root, layout, "train") == list(range(COUNT))
    assert numbers(root, layout, "val") == [100, 101, 102]


def test_shards_come_in_the_order_of_the_split(root, layout):
    describe(root, {"train": ["train/shard_000002.tar", "train/shard_000000.tar"]})
    assert numbers(root, layout) == [6, 0, 1, 2]


def test_excluded_shards_and_samples_are_left_out(root, layout):
    describe(root, PARTS, exclude=["train/shard_000001.tar", "train/shard_000000.tar/train_00000001"], counts=COUNTS)
    assert numbers(root, layout) == [0, 2, 6]
    assert len(ShardSet(root, layout)) == 3  # known before a byte is read


def test_the_folders_inside_are_read_as_they_are(root, layout):
    describe(root, PARTS)
    assert numbers(root / "train", layout) == list(range(COUNT))


@pytest.mark.parametrize(
    "split_parts, words",
    [
        ({"val": ["val/shard_000000.tar"]}, "no split_parts for 'train', it has val"),
        ({"train": []}, "no split_parts for 'train'"),
        ({"train": "train"}, "no split_parts for 'train'"),
        ({"train": ["train/shard_{000000..000003}.tar"]}, "lists train/shard_000003.tar, which is missing"),
        ({"train": ["../train/shard_000000.tar"]}, "not inside"),
        ({"train": ["/etc/passwd"]}, "not inside"),
        (None, "no split_parts"),
    ],
)
def test_a_broken_split_is_explained(split_parts, words, root, layout):
    describe(root, split_parts)
    assert words in refusal(root, layout) and "split.yaml" in refusal(root, layout)


@pytest.mark.parametrize("text, words", [("a: [", "not YAML"), ("- a", "not a mapping"), (None, "No such file")])
def test_a_broken_meta_folder_is_explained(text, words, root, layout):
    (root / ".nv-meta").mkdir()
    if text is not None:
        (root / ".nv-meta" / "split.yaml").write_text(text)
    assert words in refusal(root, layout)


def test_yaml_that_builds_objects_is_not_obeyed(root, layout):
    (root / ".nv-meta").mkdir()
    (root / ".nv-meta" / "split.yaml").write_text(f"x: !!python/object/apply:os.mkdir ['{root}/made']")
    assert "not YAML" in refusal(root, layout) and not (root / "made").exists()


@pytest.mark.parametrize("counts, words", [({"train/shard_000001.tar": 4}, "holds 3 samples"), ({"a": "b"}, "counts")])
def test_counts_that_differ_are_explained(counts, words, root, layout):
    describe(root, PARTS, counts=counts)
    assert words in refusal(root, layout)


def test_an_excluded_key_that_is_not_there_is_refused(root, layout):
    describe(root, PARTS, exclude=["train/shard_000000.tar/nobody"])
    assert "excludes shard_000000.tar/nobody" in refusal(root, layout)


def test_a_root_without_meta_names_the_folder_that_was_meant(root, layout):
    assert f"did you mean {root / 'train'}?" in refusal(root, layout)


# Other tools


def foreign(path: Path, layout, order: tuple[str, ...], extra: bool = False, form: int = tarfile.USTAR_FORMAT) -> None:
    """A shard with members in another order, with more beside them, below a folder, keyed alike in every split."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for number in range(COUNT):
            one = sample(layout, number)
            members = {f"{name}.bytes": shard_writer.npy_blob(one.members[name]) for name in MEMBERS}
            members["json"] = json.dumps({"timestep": one.timestep, "caption": one.caption}).encode()
            members |= {"txt": b"beside", "cls": b"", "json": members["json"] + b" " * 900} if extra else {}
            for kind in (*order, *(members.keys() - set(order))):
                entry = tarfile.TarInfo(f"some/folder/{number:08d}.{kind}")
                entry.size = len(members[kind])
                archive.addfile(entry, io.BytesIO(members[kind]))


KINDS = ("json", "t5.bytes", "clip.bytes", "mean.bytes", "logvar.bytes")


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("order, extra", [(KINDS, True), (KINDS[::-1], False), (KINDS[2:] + KINDS[:2], True)])
def test_members_in_any_order_with_others_beside_are_read(tmp_path, layout, order, extra, form):
    foreign(tmp_path / "set" / "a.tar", layout, order, extra, form)
    assert numbers(tmp_path / "set", layout) == list(range(COUNT))


@pytest.mark.parametrize("form", ["fixed", "foreign"])
def test_what_is_expected_is_where_it_will_be_read(tmp_path, layout, monkeypatch, form):
    if form == "fixed":
        shard_writer.write(tmp_path / "set", [sample(layout, i) for i in range(COUNT)], "train", per_shard=3)
    else:
        foreign(tmp_path / "set" / "a.tar", layout, KINDS[::-1])
    found, ranges, reads = ShardSet(tmp_path / "set", layout), {}, {}
    found.open()
    monkeypatch.setattr(
        shards.os, "posix_fadvise", lambda fd, at, size, advice: ranges.update({now: (fd, at, at + size)})
    )
    preadv = os.preadv

    def read(descriptor, parts, offset):
        sizes = [len(part) for part in parts]
        if layout.payload_bytes["t5"] in sizes:
            reads[now] = (descriptor, offset + sum(sizes[: sizes.index(layout.payload_bytes["t5"])]))
        return preadv(descriptor, parts, offset)

    monkeypatch.setattr(shards.os, "preadv", read)
    rows = {name: np.empty(layout.shapes[name], np.uint16) for name in MEMBERS}
    for now in range(COUNT):
        found.expect([now])
        found.read(now, rows)
    assert len(reads) == len(ranges) == COUNT
    for number, (descriptor, start) in reads.items():
        held, begin, end = ranges[number]
        assert held == descriptor and begin <= start and start + layout.payload_bytes["t5"] <= end


def test_an_index_spares_the_walk_and_is_not_believed_once_the_shard_changed(tmp_path, layout, monkeypatch):
    path = tmp_path / "set" / "a.tar"
    foreign(path, layout, KINDS[::-1])
    tar_index.save(path, tar_index.walk(path, layout.payload_bytes))
    with monkeypatch.context() as patched:
        patched.setattr(tar_index, "walk", lambda *_: 1 / 0)
        assert numbers(tmp_path / "set", layout) == list(range(COUNT))
    foreign(path, layout, KINDS, extra=True)
    assert numbers(tmp_path / "set", layout) == list(range(COUNT))


def test_a_damaged_index_is_refused_and_never_unpickled(tmp_path, layout):
    path = tmp_path / "set" / "a.tar"
    foreign(path, layout, KINDS[::-1])
    index = tmp_path / "set" / tar_index.FOLDER / "a.tar.npz"
    index.parent.mkdir()
    for content in (b"", b"PK\x03\x04 no", b"\x80\x04cos\nsystem\n(S'true'\ntR."):
        index.write_bytes(content)
        assert "index" in refusal(tmp_path / "set", layout) and str(index) in refusal(tmp_path / "set", layout)


@pytest.mark.parametrize("cut", [1, 512, 1024, 2000, 10_000, 20_000])
def test_a_foreign_shard_that_was_cut_is_refused(tmp_path, layout, cut):
    path = tmp_path / "set" / "a.tar"
    foreign(path, layout, KINDS[::-1])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - cut)
    assert "truncated or foreign" in refusal(tmp_path / "set", layout)


def test_a_cut_between_two_samples_is_noticed_though_the_rest_is_whole(tmp_path, layout):
    path = tmp_path / "set" / "a.tar"
    foreign(path, layout, KINDS[::-1])
    places = tar_index.walk(path, layout.payload_bytes)
    with path.open("r+b") as file:
        file.truncate(int(places[3, :, 0].min()) - 512)
    assert "no proper end" in refusal(tmp_path / "set", layout)


def test_two_members_of_a_kind_and_missing_ones_are_refused(tmp_path, layout):
    path = tmp_path / "set" / "a.tar"
    path.parent.mkdir()
    for kinds, words in ((KINDS[:4], "lacks logvar.bytes"), ((*KINDS, "clip.bytes"), "two members clip.bytes")):
        blobs = {f"{name}.bytes": shard_writer.npy_blob(sample(layout, 1).members[name]) for name in MEMBERS}
        with tarfile.open(path, "w") as archive:
            for kind in kinds:
                content = blobs.get(kind, b"{}")
                entry = tarfile.TarInfo(f"1.{kind}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        with pytest.raises(tar_index.NotOurs, match=words):
            tar_index.walk(path, layout.payload_bytes)


# Training


def as_energon(source: Path, root: Path) -> tuple[Path, Path]:
    """A root with both splits and .nv-meta."""
    for split in ("train", "val"):
        shutil.copytree(source / split, root / "data" / split)
    describe(root / "data", {split: [f"{split}/shard_{{000000..000000}}.tar"] for split in ("train", "val")})
    return root / "data", root / "data"


def as_webdataset(source: Path, root: Path) -> tuple[Path, Path]:
    """Plain shards that webdataset wrote: sorted members, keys that come again in the other split."""
    for split in ("train", "val"):
        found = webdataset.WebDataset(str(source / split / "shard_000000.tar"), shardshuffle=False)
        (root / split).mkdir()
        with webdataset.TarWriter(str(root / split / "a.tar")) as writer:
            for number, one in enumerate(found):
                members = {name: content for name, content in one.items() if not name.startswith("__")}
                writer.write({"__key__": f"{number:08d}", **members})
    return root / "train", root / "val"


def as_it_is(source: Path, root: Path) -> tuple[Path, Path]:
    return source / "train", source / "val"


def test_training_does_not_depend_on_the_format(shapes_dir, tmp_path):
    found = []
    for convert in (as_it_is, as_energon, as_webdataset):
        root = tmp_path / convert.__name__
        root.mkdir()
        train, val = convert(shapes_dir, root)
        data = (f"--data.train={train}", f"--data.val={val}", f"--data.empty={shapes_dir}/empty_encodings")
        run = root / "run"
        assert called("train.py", MICRO, "--data.kind=embeddings", *data, f"--run.dir={run}") == 0
        found.append(what_counts(run))
    assert found[0]["eval.jsonl"][-1]["count"] == 45
    assert found[1] == found[0] and found[2] == found[0]
