"""Shards that other tools wrote become shards of our layout, whole or not at all."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO
from shard_damage import LAYOUT, opened, same, samples

from flux_ref.formats import shard_writer
from flux_ref.formats.shards import MEMBERS
from flux_ref.prepare import commands as prepare

COUNT = 7
WRITTEN = samples(COUNT)
KINDS = ("json", "t5.bytes", "clip.bytes", "mean.bytes", "logvar.bytes")


def foreign(path: Path, order: tuple = KINDS[::-1], extra: bool = False, form=tarfile.USTAR_FORMAT, **changes) -> None:
    """A shard with members in another order, below a folder, perhaps with more beside them. changes: of sample 3."""
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w", format=form) as archive:
        for number, sample in enumerate(WRITTEN):
            members = {f"{name}.bytes": shard_writer.npy_blob(sample.members[name]) for name in MEMBERS}
            members["json"] = json.dumps({"timestep": sample.timestep, "caption": sample.caption}).encode()
            members |= {"txt": b"beside", "cls": b"", "json": members["json"] + b" " * 900} if extra else {}
            members |= {kind.replace("_", "."): content for kind, content in changes.items()} if number == 3 else {}
            for kind in (*order, *(members.keys() - set(order))):
                entry = tarfile.TarInfo(f"some/folder/{number:08d}.{kind}")
                entry.size = len(members[kind])
                archive.addfile(entry, io.BytesIO(members[kind]))


def repack(root: Path, *args: object) -> int:
    return prepare.main(["repack", str(root / "foreign"), str(root / "set"), "--config", str(MICRO), *map(str, args)])


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("order, extra", [(KINDS, True), (KINDS[::-1], False), (KINDS[2:] + KINDS[:2], True)])
def test_members_in_any_order_with_others_beside_are_repacked(tmp_path, order, extra, form, capsys):
    foreign(tmp_path / "foreign" / "a.tar", order, extra, form)
    foreign(tmp_path / "foreign" / "b.tar", order, extra, form)
    assert repack(tmp_path, "--per-shard", 4) == 0 and "14 samples" in capsys.readouterr().out
    stored, rows = opened(tmp_path / "set", LAYOUT), LAYOUT.rows()
    assert [shard.count for shard in stored.shards] == [4, 4, 4, 2]
    for index, sample in enumerate(WRITTEN + WRITTEN):
        meta = stored.read(index, rows)
        assert (meta.key, meta.timestep, meta.caption) == (f"{index % COUNT:08d}", sample.timestep, sample.caption)
        assert same(rows, sample)


def test_what_is_no_whole_shard_is_refused_and_leaves_nothing(tmp_path, capsys):
    path, wrong = tmp_path / "foreign" / "a.tar", []

    def refused(words: str) -> None:
        code, said = repack(tmp_path), capsys.readouterr().err.rpartition("prepare: ")[2]
        if code != 2 or words not in said or sorted(p.name for p in tmp_path.iterdir()) != ["foreign"]:
            wrong.append((words, code, said))

    foreign(path)
    whole = path.read_bytes()
    with tarfile.open(path) as archive:
        starts = [entry.offset for entry in archive]
    for length in (1, 700, 5000, starts[15], starts[17], starts[17] + 9, starts[-1], len(whole.rstrip(b"\0")) + 600):
        path.write_bytes(whole[:length])
        refused("a.tar")
    path.write_bytes(whole[: starts[15]] + b"junk" + whole[starts[15] + 4 :] + b"more")
    refused("truncated or damaged")
    path.write_bytes(whole[: starts[15] + 148] + b"xxxxxxxx" + whole[starts[15] + 156 :])
    refused(f"truncated or damaged at byte {starts[15]}")
    foreign(path, mean_bytes=shard_writer.npy_blob(np.zeros((16, 6, 4), np.uint16)))
    refused("key '00000003': mean is no .npy file of uint16 (16, 4, 6)")
    foreign(path, json=b"[]")
    refused("00000003.json is not a JSON object")
    foreign(path, json=json.dumps({"timestep": "3"}).encode())
    refused("timestep")
    foreign(path, logvar_bytes=b"")
    refused("logvar is no .npy")
    foreign(path, (*KINDS, "clip.bytes"))  # twice
    refused("logvar.bytes, clip.bytes; want each of")
    with tarfile.open(path, "w") as archive:
        archive.add(MICRO, "micro.json")
    refused("has the members json; want each of")
    with tarfile.open(path, "w") as archive:
        archive.add(MICRO, "micro.toml")
    refused("holds no sample of json, t5.bytes")
    with tarfile.open(path, "w") as archive:
        for kind in KINDS:
            archive.add(MICRO, f"{'k' * 81}.{kind}")
    refused("at most 80")
    path.unlink()
    refused("holds no *.tar")
    assert wrong == []


def test_an_existing_folder_is_refused(tmp_path, capsys):
    foreign(tmp_path / "foreign" / "a.tar")
    (tmp_path / "set").mkdir()
    assert repack(tmp_path) == 2 and "exists; remove it" in capsys.readouterr().err
