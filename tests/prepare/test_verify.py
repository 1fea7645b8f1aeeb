"""Checking a data set: what is wrong is found, named and counted, and nothing is written but the manifest."""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO
from shard_damage import LAYOUT, NAN, STRIDE, overwrite, overwrite_json, overwrite_value, position, samples, write_set

from flux_ref.errors import Refusal
from flux_ref.formats import files, shard_writer, shards
from flux_ref.formats.shards import BLOCK, END_BYTES, MEMBERS, Layout
from tools.prepare import verify

WIDE = {"text_tokens": 20, "t5_dim": 300}  # a sample is longer than a tar record, as real ones are
TRAIN, VAL = 8, 16
TRAIN_0, TRAIN_1, TRAIN_2 = (f"train/shard_00000{i}.tar" for i in range(3))
VAL_0, VAL_1 = "val/shard_000000.tar", "val/shard_000001.tar"
KEY = "train_00000001"
ONE = f"{TRAIN_0}, sample 1, key {KEY}: "


@pytest.fixture(scope="module")
def micro(tmp_path_factory) -> Path:
    """A config with the micro model and shards that exist."""
    path = tmp_path_factory.mktemp("config") / "micro.toml"
    path.write_text("\n".join(line for line in MICRO.read_text().splitlines() if not line.startswith("data.")))
    return path


@pytest.fixture(scope="module")
def clean(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("clean") / "set"
    write_set(folder, TRAIN, VAL)
    return folder


@pytest.fixture
def root(clean, tmp_path) -> Path:
    """A copy, in a folder that holds something else, too."""
    (tmp_path / "beside.txt").write_text("not to be touched")
    return Path(shutil.copytree(clean, tmp_path / "set"))


@dataclass
class Result:
    """What a check printed."""

    code: int
    text: str

    @property
    def lines(self) -> list[str]:
        """Those about problems."""
        return self.text[: re.search(r"^(\w+): [\d,]+ samples in ", self.text, re.M).start()].splitlines()

    @property
    def counts(self) -> dict[str, int]:
        listed = re.search(r"^problems: (.*)$", self.text, re.M)[1]
        pairs = [part.rpartition(" ") for part in listed.split(", ")] if listed != "none" else []
        return {kind: int(count.replace(",", "")) for kind, _, count in pairs}


@pytest.fixture
def run(micro, capsys) -> Callable[..., Result]:
    """Check a folder in this process."""

    def call(folder: Path, *args: str, workers: int = 1) -> Result:
        parser = argparse.ArgumentParser()
        verify.add_arguments(parser)
        known = {"--config": str(micro), "--workers": str(workers)}
        options = [text for name, value in known.items() if name not in args for text in (name, value)]
        capsys.readouterr()
        code = verify.run(parser.parse_args([str(folder), *options, *map(str, args)]))
        return Result(code, capsys.readouterr().out)

    return call


def snapshot(folder: Path) -> dict[str, tuple]:
    """Everything below a folder: kind and time of change, and the content of plain files."""
    entries = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        entries[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return entries


# Planting damage


def say(**content: object) -> Callable[[Path], None]:
    """Change fields of the json of sample 1."""

    def plant(shard: Path) -> None:
        start = position("json", "payload", 1)
        old = json.loads(shard.read_bytes()[start : start + BLOCK].rstrip(b"\0"))
        overwrite_json(shard, json.dumps(old | content))

    return plant


def value(member: str, bits: int, place: int = 0) -> Callable[[Path], None]:
    return lambda shard: overwrite_value(shard, member, bits, place)


def filled(member: str, bits: int) -> Callable[[Path], None]:
    """Set all values of a member of sample 1."""
    content = np.full(LAYOUT.payload_bytes[member] // 2, bits, "<u2").tobytes()
    return lambda shard: overwrite(shard, position(member, "payload", 1), content)


def rebuild(shard: Path, change: Callable[[list], list], form: int = tarfile.USTAR_FORMAT) -> None:
    """Write a shard again with other members, given as (name, content); those of sample 1 are 5 to 9."""
    with tarfile.open(shard) as archive:
        members = [(entry.name, archive.extractfile(entry).read()) for entry in archive]
    with tarfile.open(shard, "w", format=form) as archive:
        for name, content in change(members):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
        end = archive.offset + END_BYTES
    os.truncate(shard, end)  # tar's padding could hide samples that are as small as these


def first_shard(plant: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda root: plant(root / TRAIN_0)


def move(old: str, new: str) -> Callable[[Path], object]:
    return lambda root: (root / old).rename(root / new)


def remove(name: str) -> Callable[[Path], None]:
    return lambda root: files.remove(root / name)


def save_empty(name: str, array: np.ndarray) -> Callable[[Path], None]:
    return lambda root: np.save(root / "empty_encodings" / f"{name}_empty.npy", array)


def replaced_by(make: Callable[[Path], None]) -> Callable[[Path], None]:
    return lambda shard: (shard.unlink(), make(shard))


def last(count: int) -> int:
    """The bytes of a shard of three samples, but for so many at its end."""
    return 3 * STRIDE + END_BYTES - count


# Each: how it is planted in a set, all kinds of problems that are told, and what the line says besides the path.
NOTICED_FAST = [
    *(
        (first_shard(plant), kind, f"{TRAIN_0}{words}")
        for plant, kind, words in (
            (lambda s: s.write_bytes(b""), "layout", " (0 bytes) is truncated or foreign"),
            (lambda s: tarfile.open(s, "w").close(), "bad sample", ", sample 0: no tar header"),
            (lambda s: os.truncate(s, last(1)), "layout", f" ({last(1)} bytes) is truncated"),
            (lambda s: overwrite(s, 3 * STRIDE, b"junk"), "layout", " has no end marker"),
            (replaced_by(os.mkfifo), "unreadable", " is no file"),
            (replaced_by(lambda s: s.symlink_to("none")), "unreadable", " is no file"),
            (lambda s: rebuild(s, lambda m: [*m[:7], ("notes.txt", b""), *m[7:]]), "layout", " ("),
        )
    ),
    (move(TRAIN_1, "train/shard_000009.tar"), "missing", "train: there is no shard 8, although there is shard 9"),
    (move(TRAIN_1, f"train/shard_{10**30}.tar"), "missing", f"there is no shard {10**30 - 1}, although there is"),
    (move(TRAIN_2, "train/shard_\u0662.tar"), "file name", "\u0662.tar: does not end with a number"),
    (move(TRAIN_2, "train/shard_000002 (1).tar"), "file name", "2 (1).tar: does not end with a number"),
    (move(TRAIN_2, "train/shard_\n2.tar"), "file name", r"\n2.tar: does not fit into a line"),
    (lambda r: (r / "train/._shard_000000.tar").write_bytes(b"Mac OS X"), "layout", "._shard_000000.tar (8 bytes) is"),
    (lambda r: [path.unlink() for path in r.glob("train/*")], "missing", "train: holds no *.tar shard"),
    (remove("val"), "missing", "val: there is no such folder"),
    (remove("empty_encodings"), "missing", "empty_encodings: there is no such folder"),
    (remove("empty_encodings/clip_empty.npy"), "empty encoding", "clip_empty.npy: No such file"),
    (save_empty("t5", np.ones((1, 28, 9), np.float16)), "empty encoding", "t5_empty.npy: it is float16 (1, 28, 9)"),
    (save_empty("t5", np.zeros((9, 28), np.float32)), "empty encoding", "t5_empty.npy: t5 is all zeros"),
]
GARBAGE = np.random.default_rng(5).integers(0, 0x7F80, LAYOUT.payload_bytes["t5"] // 2).astype("<u2")  # finite
IN_VAL = f"{VAL_0}, sample 1, key val_00000001: "
NOTICED = [
    *(
        (first_shard(plant), kind, f"{ONE}{words}")
        for plant, kind, words in (
            (value("t5", NAN, 251), "bad sample", "t5 holds NaN or infinite values"),
            *((filled(name, 0), "values", f"{name} is all zeros") for name in MEMBERS),
            (filled("mean", 0x8000), "values", "mean is all zeros"),
            (lambda s: overwrite(s, position("t5", "payload", 1), GARBAGE.tobytes()), "values", "t5 holds "),
            (value("t5", 0x7E80, 7), "values", "t5 holds 8.51e+37, want values from -1000 to 1000"),
            (value("mean", 0xC680), "values", "mean holds -1.64e+04, want"),
            (value("logvar", 0x41F0), "values", "logvar holds 30, want values from -100 to 20"),
            (value("logvar", 0xC348), "values", "logvar holds -200, want"),
            (say(timestep=3), "timestep", "has timestep 3, want none"),
        )
    ),
    (
        first_shard(lambda s: rebuild(s, lambda m: m[:5] + m[6:10] + m[5:6] + m[10:])),
        *("bad sample", f"{TRAIN_0}, sample 1: found member"),
    ),
    *(
        (lambda r, step=step: say(timestep=step)(r / VAL_0), "timestep", f"{IN_VAL}has timestep {step}, want 0 to 7")
        for step in (8, -1, None, 10**30)
    ),
    (lambda r: say(timestep=7)(r / VAL_0), "timestep counts", "val: timesteps 0 to 7 come [2, 1, 2, 2, 2, 2, 2, 3]"),
    (
        lambda r: shutil.copy(r / TRAIN_0, r / "train/shard_000003.tar"),
        "repeated key",
        f"{TRAIN_0}, sample 1, key {KEY}",
    ),
    (
        lambda r: shutil.copy(r / TRAIN_0, r / "val/shard_000006.tar"),
        *("repeated key, timestep", "val/shard_000006.tar, sample 1, key train_00000001: so is the key of"),
    ),
]


def unnoticed(damages: list[tuple], root: Path, run: Callable, *mode: str, listed: bool = False) -> list[tuple]:
    """(line, output) of all damages that are not told, or told as other kinds, or after which a file changed.

    listed: the whole set has a manifest.
    """
    wrong, whole = [], root.parent / "whole"
    shutil.copytree(root, whole)
    for plant, kinds, line in damages:
        shutil.rmtree(root)
        shutil.copytree(whole, root)
        if listed:
            run(root)
        plant(root)
        planted = snapshot(root.parent)
        result = run(root, *mode)
        told = any(line in said for said in result.lines) and ", ".join(sorted(result.counts)) == kinds
        form = all(said.isprintable() and str(root) in said for said in result.lines)
        failed = result.code == 1 and result.text.splitlines()[-1].startswith("FAIL")
        wrong += [(line, result.text)] * (not (told and form and failed) or snapshot(root.parent) != planted)
    shutil.rmtree(root)
    whole.rename(root)
    return wrong


def test_damage_is_found_named_and_counted_and_nothing_is_written(root, run):
    assert unnoticed(NOTICED_FAST + NOTICED, root, run) == []
    assert unnoticed(NOTICED_FAST, root, run, "--fast") == []


def test_all_damage_is_told_but_a_fast_check_reads_nothing_between_the_ends(root, run):
    filled("clip", 0)(root / TRAIN_0)
    value("t5", NAN)(root / TRAIN_1)
    say(timestep=9)(root / VAL_0)
    assert run(root, "--fast").code == 0
    (root / "val/shard_000002.tar").write_bytes(b"")
    one, two = run(root), run(root, workers=2)
    assert set(one.counts) >= {"values", "bad sample", "timestep", "layout"}
    assert two.code == 1 and one.text.splitlines()[:-1] == two.text.splitlines()[:-1]


def test_a_hundred_problems_are_twenty_lines_and_a_number(tmp_path, run):
    shard_writer.write(tmp_path / "train", samples(100), "some", 60)
    result = run(tmp_path / "train")
    assert result.counts == {"timestep": 100}
    assert len(result.lines) == 21 and result.lines[-1] == "... and 80 more of this kind: timestep"
    assert result.lines[0].endswith("shard_000000.tar, sample 0, key some_00000000: has timestep 0, want none")


# Sets that are as they should be


def test_the_shapes_set_passes_though_45_is_not_divisible(shapes_dir, tmp_path, run):
    shutil.copytree(shapes_dir, tmp_path / "set")
    result = run(tmp_path / "set", "--config", str(MICRO))
    assert result.code == 0, result.text


def test_the_names_that_nvidias_converter_gives_pass(root, run):
    """Members by running number in each split; the source's key in the json, which in train has no timestep."""

    def renamed(member: tuple[str, bytes]) -> tuple[str, bytes]:
        name, content = member
        if name.endswith(".json"):
            timestep = json.loads(content)["timestep"]
            content = json.dumps({"key": f"source of {name}"} | ({} if timestep is None else {"timestep": timestep}))
            content = content.encode()
        return name.partition("_")[2], content

    for path in root.rglob("*.tar"):
        rebuild(path, lambda members: [renamed(member) for member in members])
    assert run(root).code == 0
    shutil.copy(root / TRAIN_0, root / "train/shard_000003.tar")
    assert "repeated key" in run(root).counts


def test_a_single_folder_of_shards_is_checked_as_what_its_name_says(root, run, monkeypatch):
    for folder, other in (("train", "else"), ("val", "any"), ("else", "val"), ("any", "train")):
        assert run(root / folder).code == 0
        (root / folder).rename(root / other)
        (root / other / "manifest.sha256").unlink()
    assert set(run(root / "train").counts) == {"timestep"} and set(run(root / "val").counts) >= {"timestep"}
    monkeypatch.chdir(root / "train")
    assert "shard_000000.tar, sample 1, key val_00000001: has timestep 1, want none" in run(Path()).lines


def test_energons_folders_have_the_empty_encodings_beside_them(root, run):
    (root / "empty_encodings").rename(root.parent / "empty_encodings")
    assert set(run(root).counts) == {"missing"}
    (root / ".nv-meta").mkdir()
    (root / ".nv-meta/split.yaml").write_text("split_parts: {}")
    (root / "train/shard_000000.tar.idx").write_bytes(b"index")
    for more in ((), ("--fast",), ()):
        result = run(root, *more)
        assert result.code == 0 and not result.lines, result.text


def test_the_number_of_samples_is_that_of_the_config(root, run, tmp_path, micro):
    for count, code in (("8", 0), ("9", 1)):
        (tmp_path / "count.toml").write_text(micro.read_text() + f"\ndata.train_count = {count}")
        results = [run(root, "--config", str(tmp_path / "count.toml"), *more) for more in ((), ("--fast",))]
        assert [result.code for result in results] == [code, code]
    assert "train: holds 8 samples, want 9" in results[0].text


def test_no_value_that_real_encoders_could_give_is_called_implausible():
    for name, low, high in (("t5", -50, 50), ("clip", -60, 60), ("mean", -40, 40), ("logvar", -30, 19)):
        bits = shards.to_bf16_bits(np.linspace(low, high, 1001))
        assert [verify.implausible(name, part) for part in (bits, bits[:1], bits[-1:])] == ["", "", ""]


# The manifest


def test_a_clean_set_passes_with_one_screen_and_a_manifest_of_all_files_that_sha256sum_takes(root, run, monkeypatch):
    (root / "train/index.txt").write_text("shard_000000.tar\n")
    before = snapshot(root.parent)
    assert run(root, "--fast").code == 0
    with monkeypatch.context() as patch:
        patch.setattr(verify.files, "write_whole", lambda *_: os.rmdir(root))
        result = run(root)
        assert result.code == 0 and "manifest.sha256 cannot be written: Directory not empty" in result.text
    assert snapshot(root.parent) == before
    val = f"{16 * STRIDE + 6 * END_BYTES:,} bytes; timesteps 0 to 7: {8 * [2]}"
    train = f"train: 8 samples in 3 shards, {8 * STRIDE + 3 * END_BYTES:,} bytes"
    begin = f"{train}\nval: 16 samples in 6 shards, {val}\nproblems: none\n"
    result = run(root)
    text = result.text.removeprefix(begin)
    assert result.code == 0 and re.fullmatch(r"PASS in \d+\.\d s, [\d,]+ MB/s\n", text), result.text
    after = snapshot(root.parent)
    assert {name for name in after if after[name] != before.get(name)} == {"set", "set/manifest.sha256"}
    assert len((root / "manifest.sha256").read_text().splitlines()) == 12  # all files
    subprocess.run(["sha256sum", "--strict", "--quiet", "-c", "manifest.sha256"], cwd=root, check=True)
    assert [run(root, *more).code for more in ((), ("--fast",))] == [0, 0]
    assert snapshot(root.parent) == after, "it is written once"


def edit(change: Callable[[str], str]) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        path = root / "manifest.sha256"
        path.write_text(change(path.read_text()), encoding="utf-8", errors="surrogateescape")

    return plant


def swap(root: Path) -> None:
    for old, new in ((TRAIN_0, "x"), (TRAIN_1, TRAIN_0), ("x", TRAIN_1)):
        move(old, new)(root)


LISTED = [
    *(
        (plant, "manifest", f"{name}: has changed")
        for plant, name in (
            (first_shard(value("mean", 0x3F80, 5)), TRAIN_0),  # to 1.0, which nothing but the manifest tells
            (first_shard(lambda s: overwrite(s, position("t5", "payload", 1) + 600, b"x")), TRAIN_0),  # padding
            (swap, TRAIN_1),
            (save_empty("t5", np.full((9, 28), 2, np.float16)), "empty_encodings/t5_empty.npy"),
            (edit(lambda text: "0" * 64 + text[64:]), "clip_empty.npy"),
        )
    ),
    (
        lambda r: shutil.copy(r / TRAIN_1, r / "train/shard_000003.tar"),
        "manifest, repeated key",
        "shard_000003.tar: is not in manifest",
    ),
]
LISTED_FAST = [
    (remove(TRAIN_2), "manifest", f"{TRAIN_2}: is missing"),
    (edit(lambda text: text + f"{'0' * 64}  ../beside.txt\n"), "manifest", "../beside.txt: is missing"),
    (edit(lambda text: ""), "manifest", f"{TRAIN_0}: is not in manifest"),
]


def test_what_differs_from_the_manifest_is_found(root, run):
    assert unnoticed(LISTED, root, run, listed=True) == []
    assert unnoticed(LISTED_FAST, root, run, "--fast", listed=True) == []


def test_manifests_that_others_wrote_are_taken_and_a_new_file_is_no_problem(root, run):
    run(root)
    path = root / "manifest.sha256"
    ours = path.read_text()
    shouted = re.sub("^.{64}", lambda match: match[0].upper(), ours)
    for theirs in (ours.replace("  ", " *"), ours.replace("  ", "  ./"), shouted):
        path.write_text(theirs)
        assert run(root).code == 0
    (root / "train/index.txt").write_text("notes")
    assert run(root).code == 0


# What cannot be checked


def test_what_cannot_be_checked_is_refused_and_an_empty_folder_fails(root, run):
    (root / "val" / "manifest.sha256").write_text("rubbish")
    before = snapshot(root.parent)
    for folder, args, words in (
        ("none", (), "is no folder"),
        ("beside.txt", (), "is no folder"),
        ("set/val", (), "line 1: not a line of sha256sum"),
        ("set", ("--config", "none.toml"), "none.toml"),
    ):
        with pytest.raises(Refusal, match=words):
            run(root.parent / folder, *args)
    assert snapshot(root.parent) == before
    (root / "nothing").mkdir()
    result = run(root / "nothing")
    assert result.code == 1 and set(result.counts) == {"missing"} and "holds no *.tar shard" in result.text


# Reading


def test_every_byte_is_read_once_and_memory_does_not_grow_with_the_shard(tmp_path):
    layout, peaks = Layout({**LAYOUT.shapes, "t5": (64, 1024)}), []
    for count in (4, 64):
        shard_writer.write(tmp_path / str(count), samples(count, 0, False, layout), "some")
        path, read = tmp_path / str(count) / "shard_000000.tar", []
        tracemalloc.start()
        report = verify.look(path, "train", False, layout, read.append)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert sum(read) == path.stat().st_size and report.samples == count and not report.problems
    assert max(peaks) < 8 * layout.stride and peaks[1] < 1.2 * peaks[0]
