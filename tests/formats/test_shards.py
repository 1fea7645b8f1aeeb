"""Shards: what is written is read, by us and by others; whatever happened to the bytes is told."""

import io
import json
import os
import pickle
import random
import shutil
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import shard_damage
import torch
import webdataset
from conftest import MICRO, refusal
from payload import Payload
from shard_damage import (
    LAYOUT,
    NAN,
    STRIDE,
    describe,
    opened,
    overwrite,
    overwrite_header,
    overwrite_json,
    overwrite_value,
    position,
    same,
)

from flux_ref import config, config_file, data, shards
from flux_ref.config import ModelConfig
from flux_ref.errors import Fault, Refusal
from flux_ref.shards import BLOCK, END_BYTES, MEMBERS, NPY_HEADER, RECORD, BadSample, Layout

WIDE = Layout({**LAYOUT.shapes, "t5": (20, 300)})  # a sample is longer than a tar record, as real ones are
COUNT, PER_SHARD = 12, 3
WRITTEN = shard_damage.samples(COUNT)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four shards of three samples."""
    assert shards.write(tmp_path / "set", WRITTEN, "some", PER_SHARD) == COUNT
    return tmp_path / "set"


@pytest.fixture
def shard(folder) -> Path:
    return folder / "shard_000000.tar"


def require_as_written(folder: Path, written: list = WRITTEN, layout: Layout = LAYOUT, split: str = "train") -> None:
    stored = opened(folder, layout, split)
    assert len(stored) == len(written)
    for index, sample in enumerate(written):
        rows = layout.rows()
        meta = stored.read(index, rows)
        assert same(rows, sample) and (meta.timestep, meta.caption) == (sample.timestep, sample.caption), index
        assert stored.read_meta(index) == meta
    shard_damage.close(stored)


# What is written is read


def test_the_benchmarks_samples_have_the_public_stride_and_webdataset_reads_what_we_write(folder):
    assert shards.layout(ModelConfig()).stride == 2_169_344
    require_as_written(folder)
    paths = sorted(map(str, folder.iterdir()))
    for i, found in enumerate(webdataset.WebDataset(paths, shardshuffle=False)):
        meta = {"key": f"some_{i:08d}", "timestep": i % 8, "caption": f"words {i}"}
        assert (found["__key__"], json.loads(found["json"])) == (meta["key"], meta)
        for name in MEMBERS:
            assert np.array_equal(np.load(io.BytesIO(found[f"{name}.bytes"])), WRITTEN[i].members[name])
    assert i == COUNT - 1


def test_shards_of_tar_are_read_padded_or_not_and_with_members_in_any_order(folder, tmp_path):
    """As Python's tarfile and webdataset's writer, which sorts names, make them."""
    written = shard_damage.samples(4, layout=WIDE)
    shards.write(tmp_path / "wide", written, "some")
    path = tmp_path / "wide" / "shard_000000.tar"
    with tarfile.open(path) as archive:
        entries = [(entry, archive.extractfile(entry).read()) for entry in archive]
    assert [entry.name for entry, _ in entries[:5]] == [
        f"some_00000000.{k}" for k in ("json", *(f"{m}.bytes" for m in MEMBERS))
    ]
    by_name = sorted(entries, key=lambda pair: pair[0].name)
    for order, kind in ((entries, tarfile.USTAR_FORMAT), (by_name, tarfile.GNU_FORMAT)):
        with tarfile.open(path, "w", format=kind) as archive:
            for entry, content in order:
                archive.addfile(entry, io.BytesIO(content))
        assert path.stat().st_size % RECORD == 0
        require_as_written(tmp_path / "wide", written, WIDE)


def test_a_folder_that_energon_prepared_holds_both_splits(folder, tmp_path):
    root = tmp_path / "root"
    (root / ".nv-meta").mkdir(parents=True)
    folder.rename(root / "val")
    require_as_written(root, split="val")
    assert f"{root}/train does not exist" in refusal(opened, root)


def test_a_json_may_lack_all_and_the_largest_and_smallest_values_are_read(folder, shard):
    """A timestep that is absent and one that is null are no timestep."""
    for content in ({}, {"timestep": None}, {"timestep": 7, "caption": None}):
        overwrite_json(shard, describe(**content))
        assert opened(folder).read(1, LAYOUT.rows()) == shards.Meta("some_00000001", content.get("timestep"), "")
    extremes, rows = [0x7F7F, 0xFF7F, 0x0001, 0x8000], LAYOUT.rows()
    for place, value in enumerate(extremes):
        overwrite_value(shard, "clip", value, place)
    opened(folder).read(1, rows)
    assert rows["clip"][:4].tolist() == extremes


# What opening refuses


def test_a_missing_or_empty_folder_or_a_file_is_refused(tmp_path, shard):
    assert "none does not exist; set data.train" in refusal(opened, tmp_path / "none")
    for name in ("shard.tar.partial", ".shard.tar"):
        shutil.copy(shard, tmp_path / name)
    assert "no *.tar shard; it may be the folder above" in refusal(opened, tmp_path)
    assert str(shard) in refusal(opened, shard)


def test_no_truncated_or_foreign_file_passes_for_a_whole_shard(folder, shard):
    whole = shard.read_bytes()
    lengths = set(random.Random(0).sample(range(len(whole)), 50))
    for end in range(0, len(whole), STRIDE):
        lengths |= {end + extra for extra in (-1, 0, 1, BLOCK, END_BYTES, END_BYTES + 1)}
    contents = [whole[:length] for length in sorted(lengths) if 0 <= length < len(whole)]
    contents += [(pattern * STRIDE)[: STRIDE + END_BYTES] for pattern in (b"\0", b"\xff", b"PK\3\4")]
    contents += [whole + bytes(BLOCK), whole[:-END_BYTES] + b"x" + whole[1 - END_BYTES :]]
    for content in contents:
        shard.write_bytes(content)
        try:
            stored = opened(folder)
        except Refusal as refused:
            assert str(shard) in str(refused)
            continue
        assert len(stored) < COUNT and (len(content) - END_BYTES) % STRIDE == 0, len(content)
        assert content == whole[: len(content)]


def test_samples_of_another_model_are_refused_by_their_size_or_their_header(tmp_path):
    for number, other in enumerate(({"t5": (9, 30)}, {"clip": (15,)}, {"mean": (16, 6, 4)}, {"t5": (8, 28)})):
        folder = tmp_path / str(number)
        shards.write(folder, shard_damage.samples(2, layout=Layout({**LAYOUT.shapes, **other})), "some")
        ((name, _),) = other.items()
        message = refusal(opened, folder)
        assert (
            str(folder / "shard_000000.tar") in message
            and str(LAYOUT.shapes[name]) in message.partition("want")[-1] + message
        )


# What reading notices


def unnoticed(shard: Path, damages: list[tuple[Callable[[], object], str]], said: Callable[[], str]) -> list[str]:
    """The words of the damages that are not told when they are done one by one. A damage: (do it, words)."""
    whole = shard.read_bytes()
    wrong = []
    for damage, words in damages:
        damage()
        if words not in (line := said()) or "\n" in line:
            wrong.append(f"{words!r} is not in {line!r}")
        shard.write_bytes(whole)
    return wrong


def complaint(folder: Path) -> str:
    """What reading sample 1 of a set that opens says."""
    stored = opened(folder)
    with pytest.raises(BadSample, match=r"sample 1[:,]") as bad:
        stored.read(1, LAYOUT.rows())
    shard_damage.close(stored)
    return str(bad.value)


def test_the_first_and_the_last_sample_are_read_on_opening(folder, shard):
    overwrite(shard, position("json", sample=1), bytes(BLOCK))
    complaint(folder)
    ends = [(partial(overwrite, shard, n * STRIDE, bytes(BLOCK)), f"sample {n}: no tar header") for n in (0, 2)]
    ends.append((partial(overwrite, shard, PER_SHARD * STRIDE + 5, b"x"), "no end marker after 3 samples"))
    assert unnoticed(shard, ends, lambda: refusal(opened, folder)) == []


def test_damage_of_a_sample_is_noticed_and_named(folder, shard):
    damages = []
    for member in (*MEMBERS, "json"):
        begin, name = position(member, sample=1), "json" if member == "json" else f"{member}.bytes"
        wrong_name = "it holds " if member == "json" else "some_00000002."
        damages += [
            (partial(overwrite, shard, begin, bytes(BLOCK)), "no tar header"),
            (partial(overwrite, shard, begin, b"X"), "no tar header"),  # the checksum
            (partial(overwrite_header, shard, member, name=f"some_00000002.{name}"), wrong_name),
            (partial(overwrite_header, shard, member, type=b"2"), "is no regular file"),
            (partial(overwrite_header, shard, member, size=2**33 - 1), "is no regular file of a sample's size"),
        ]
    for text in ("{", "[]", '"key"', "null", "3", "\0", '{"\udcff\udcfe": 1}', "[" * 500):
        damages.append((partial(overwrite_json, shard, text), "some_00000001.json holds "))
    for timestep in ("3", 3.0, True, [3], float("nan")):
        damages.append((partial(overwrite_json, shard, describe(timestep=timestep)), "some_00000001.json holds "))
    whole = {"descr": "<u2", "fortran_order": False, "shape": LAYOUT.shapes["t5"]}
    for other in ({"descr": "<f2"}, {"descr": "|O"}, {"fortran_order": True}, {"shape": (28, 9)}, {"shape": ()}):
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(stream, whole | other)
        damages.append(
            (
                partial(overwrite, shard, position("t5", "npy", 1), stream.getvalue()),
                "t5 has another form, want uint16 (9, 28)",
            )
        )
    for member in MEMBERS:
        last = (LAYOUT.blob_bytes[member] - NPY_HEADER) // 2 - 1
        for value, place in (
            (NAN, 0),
            (NAN | 0x8001, last // 2),
            (shard_damage.INF, last),
            (shard_damage.MINUS_INF, 0),
        ):
            words = f"key some_00000001: {member} holds NaN or infinite values"
            damages.append((partial(overwrite_value, shard, member, value, place), words))
    assert unnoticed(shard, damages, lambda: complaint(folder)) == []
    stored = opened(folder)
    os.truncate(shard, 2 * STRIDE - 1)
    with pytest.raises(BadSample, match="sample 1: the file ends within the sample"):
        stored.read(1, LAYOUT.rows())


def config_for(folder: Path, empty: Path | str = "", **values: object) -> config.Config:
    places = {"data__train": str(folder), "data__val": str(folder), "data__empty": str(empty)}
    places |= {"data__kind": "embeddings", "data__train_count": 0, "data__val_count": 0}
    return config_file.replace(config_file.load(MICRO), **(places | values))


def test_damage_stops_the_run_with_shard_sample_and_remedy(folder, shard, shapes_dir):
    def evaluated() -> None:
        val_set = data.ValSet(config_for(folder), 0, 1, pin=False)
        val_set.open()
        list(val_set.feed(0))

    evaluated()
    overwrite_json(shard, "{")
    assert "sample 1: some_00000001.json holds" in refusal(evaluated), "which the look for timesteps meets"
    for timestep in (8, -1, None, 10**30):
        overwrite_json(shard, describe(timestep=timestep))
        with pytest.raises(Fault, match=f"some_00000001 in {folder} has timestep {timestep}; want 0 to 7"):
            evaluated()
    overwrite_value(shard, "mean", NAN)
    where = r"sample: .*shard_000000\.tar, sample 1, key some_00000001: mean holds NaN or infinite values"
    again = (
        "remove the shard and give the command of tools.prepare again that made it, which writes as many samples anew"
    )
    with pytest.raises(Fault, match=f"^bad val {where}; {again}$"):
        evaluated()
    for kind, remedy in (("embeddings", again), ("shapes", f"remove {folder.parent} and start again, which")):
        cfg = config_for(
            folder, shapes_dir / "empty_encodings", data__kind=kind, data__train_count=12, data__val_count=12
        )
        train_set = data.TrainSet(cfg, 0, 1, pin=False)
        train_set.open()
        with pytest.raises(Fault, match=f"^bad train {where}; {remedy}"):
            next(train_set.feed(0))


# bf16 bits, and the encodings of the empty caption


def test_to_bf16_bits_rounds_as_torch_does_and_from_bf16_bits_inverts_it():
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    ties = (bits[:1000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    values = np.concatenate((bits, ties)).view(np.float32)
    values = values[np.isfinite(values)]
    want = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(shards.to_bf16_bits(values), want)
    bits = np.arange(2**16, dtype=np.uint16)
    bits = bits[(bits & 0x7F80) != 0x7F80]
    assert np.array_equal(shards.to_bf16_bits(shards.from_bf16_bits(bits)), bits)


def test_empty_encodings_are_read_in_each_form_and_refused_in_any_other(shapes_dir, tmp_path):
    """No pickle in a file is executed."""
    empty = Path(shutil.copytree(shapes_dir / "empty_encodings", tmp_path / "empty"))
    path = empty / "t5_empty.npy"
    encoding = np.arange(9 * 28).reshape(9, 28) % 50
    stored = {dtype: encoding.astype(dtype) for dtype in (np.float16, np.float32)}
    stored |= {"bits": shards.to_bf16_bits(encoding), "by columns": np.asfortranarray(encoding.astype(np.float32))}
    stored |= {f"{kind}, batch axis": array[None] for kind, array in stored.items()}
    for kind, array in stored.items():
        np.save(path, array)
        assert np.array_equal(shards.from_bf16_bits(shards.read_empty(empty, LAYOUT)["t5"]), encoding), kind
    other = [np.zeros(shape, np.float16) for shape in ((28, 9), (2, 9, 28), ())]
    other += [np.zeros((9, 28), dtype) for dtype in (np.float64, np.int16, ">f4", "<U4")]
    for value in (np.float16("nan"), np.float32("-inf"), np.float32(3.4e38), np.uint16(NAN)):
        other.append(np.full((9, 28), value, value.dtype))
    for array in other:
        np.save(path, array)
        message = refusal(shards.read_empty, empty, LAYOUT)
        assert str(path) in message and ("want uint16, float16 or float32 (9, 28)" in message or "NaN" in message)
    trap = Payload(tmp_path / "sprung")
    stream = io.BytesIO()
    np.save(stream, np.array([trap] * 3, dtype=object), allow_pickle=True)
    np.save(path, np.zeros((9, 28), np.float32))
    whole = path.read_bytes()
    contents = [whole[:length] for length in (0, 5, 100, NPY_HEADER, len(whole) - 1)]
    contents += [whole.replace(b"(9, 28), }", b"(9, 2800000000000), }"), stream.getvalue(), pickle.dumps(trap)]
    for content in contents:
        path.write_bytes(content)
        assert f"{path} cannot be read: " in refusal(shards.read_empty, empty, LAYOUT)
    assert not (tmp_path / "sprung").exists()
    path.unlink()
    assert "No such file" in refusal(shards.read_empty, empty, LAYOUT)
