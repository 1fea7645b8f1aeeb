"""Shards: what is written is read, by us and by others; whatever happened to the bytes is told."""

import errno
import io
import json
import os
import pickle
import tarfile
from functools import partial
from unittest import mock

import numpy as np
import pytest
import shard_damage
import torch
import webdataset
from conftest import refusal
from payload import Payload
from shard_damage import (
    LAYOUT,
    NAN,
    blob_bytes,
    opened,
    overwrite,
    overwrite_json,
    overwrite_value,
    position,
    rename,
)

from flux_ref import config, config_file, dataloader, dataset
from flux_ref.cli import Fault, Refusal
from flux_ref.config import ModelConfig
from flux_ref.dataset import BLOCK, END_BYTES, MEMBERS, NPY_HEADER, RECORD, BadSample, Meta, SampleLayout

WIDE = SampleLayout({**LAYOUT.shapes, "t5": (20, 300)})  # a sample is longer than a tar record, as real ones are
STRIDE = LAYOUT.stride
COUNT = 12
WRITTEN = shard_damage.samples(COUNT)


@pytest.fixture
def folder(tmp_path):
    """Four shards of three samples."""
    shard_damage.write(tmp_path / "set", WRITTEN)
    return tmp_path / "set"


@pytest.fixture
def shard(folder):
    return folder / "shard_000000.tar"


def require_as_written(folder, written=WRITTEN, layout=LAYOUT):
    stored = opened(folder, layout)
    assert len(stored) == len(written)
    for index, (meta, members) in enumerate(written):
        arrays = layout.arrays()
        assert stored.read(index, arrays) == meta
        assert all(np.array_equal(arrays[name], members[name]) for name in MEMBERS)


# What is written is read


def test_the_benchmarks_samples_have_the_public_stride_and_webdataset_reads_what_we_write(folder):
    assert dataset.sample_layout(ModelConfig()).stride == 2_169_344
    require_as_written(folder)
    paths = sorted(map(str, folder.iterdir()))
    for i, found in enumerate(webdataset.WebDataset(paths, shardshuffle=False)):
        meta = {"key": f"some_{i:08d}", "timestep": i % 8, "caption": f"words {i}"}
        assert (found["__key__"], json.loads(found["json"])) == (meta["key"], meta)
        for name in MEMBERS:
            assert np.array_equal(np.load(io.BytesIO(found[f"{name}.bytes"])), WRITTEN[i][1][name])
    assert i == COUNT - 1


def test_shards_of_tar_are_read_padded_or_not_and_with_members_in_any_order(tmp_path):
    """As Python's tarfile and webdataset's writer, which sorts names, make them."""
    written = shard_damage.samples(4, layout=WIDE)
    shard_damage.write(tmp_path / "wide", written, 4)
    path = tmp_path / "wide" / "shard_000000.tar"
    with tarfile.open(path) as archive:
        entries = [(entry, archive.extractfile(entry).read()) for entry in archive]
    by_name = sorted(entries, key=lambda pair: pair[0].name)
    assert entries != by_name
    for order, kind in ((entries, tarfile.USTAR_FORMAT), (by_name, tarfile.GNU_FORMAT)):
        with tarfile.open(path, "w", format=kind) as archive:
            for entry, content in order:
                archive.addfile(entry, io.BytesIO(content))
        assert path.stat().st_size % RECORD == 0
        require_as_written(tmp_path / "wide", written, WIDE)


def test_captions_are_cut_to_a_block_and_never_amid_a_character(tmp_path):
    for caption in ("", '"' * 600, "é猫" * 200):
        folder = tmp_path / str(len(caption))
        shard_damage.write(folder, [(Meta("some", None, caption), WRITTEN[0][1])])
        found = opened(folder).read(0, LAYOUT.arrays()).caption
        assert caption.startswith(found) and len(json.dumps(found, ensure_ascii=False).encode()) >= min(
            len(caption), BLOCK - 50
        )


def test_a_json_may_lack_all_and_the_largest_and_smallest_values_are_read(folder, shard):
    """A timestep that is absent and one that is null are no timestep."""
    for content in ({"key": "x"}, {"timestep": None}, {"timestep": 7, "caption": None}):
        overwrite_json(shard, json.dumps(content))
        assert opened(folder).read(1, LAYOUT.arrays()) == Meta("some_00000001", content.get("timestep"), "")
    extremes = [0x7F7F, 0xFF7F, 0x0001, 0x8000]
    for place, value in enumerate(extremes):
        overwrite_value(shard, "clip", value, place)
    arrays = LAYOUT.arrays()
    opened(folder).read(1, arrays)
    assert arrays["clip"][:4].tolist() == extremes


# What opening refuses


def test_a_missing_or_empty_folder_or_a_file_is_refused(tmp_path, shard):
    assert "none does not exist; set data.train" in refusal(opened, tmp_path / "none")
    (tmp_path / ".shard.tar").write_bytes(shard.read_bytes())
    assert "no *.tar shard; it may be the folder above" in refusal(opened, tmp_path)
    assert str(shard) in refusal(opened, shard)


def test_no_truncated_or_foreign_file_passes_for_a_whole_shard(folder, shard):
    whole = shard.read_bytes()
    lengths = {*range(0, len(whole), 1021)}
    for end in range(0, len(whole), STRIDE):
        lengths |= {end + extra for extra in (0, 1, BLOCK, END_BYTES + 1)}
    contents = [whole[:length] for length in sorted(lengths) if length < len(whole) and (length % RECORD or not length)]
    contents.append(whole + bytes(BLOCK))
    for content in contents:
        shard.write_bytes(content)
        assert str(shard) in refusal(opened, folder), len(content)


def test_samples_of_another_model_are_refused_by_their_size_or_their_header(tmp_path):
    for number, (name, shape) in enumerate((("t5", (9, 30)), ("clip", (15,)), ("t5", (8, 28)))):
        other = SampleLayout({**LAYOUT.shapes, name: shape})
        shard_damage.write(tmp_path / str(number), shard_damage.samples(2, layout=other))
        message = complaint(tmp_path / str(number), 0, kind=(Refusal, BadSample))
        assert "shard_000000.tar" in message and str(LAYOUT.shapes[name]) in message


# What reading notices


def complaint(folder, index=1, kind=BadSample):
    """What opening a set or reading one of its samples says."""
    return refusal(lambda: opened(folder).read(index, LAYOUT.arrays()), kind=kind)


def test_a_disk_that_fails_is_no_damage_of_the_sample(folder, shard, monkeypatch):
    monkeypatch.setattr(os, "pread", mock.Mock(side_effect=OSError(errno.ESTALE, "Stale file handle")))
    with pytest.raises(OSError, match=f"Stale file handle: '{shard}'"):
        opened(folder).read(1, LAYOUT.arrays())


def test_damage_of_a_sample_is_noticed_and_named(folder, shard):
    damages = []
    for member in (*MEMBERS, "json"):
        damages += [
            (partial(overwrite, shard, position(member), bytes(BLOCK)), ""),
            (partial(overwrite, shard, position(member), b"X"), ""),
            (partial(rename, shard, member, "other.mean.bytes"), "it holds ['"),
            (partial(rename, shard, member, "some_00000001.x"), "it holds ['"),
        ]
    for text in (
        "{",
        "[" * 400,
        "[]",
        '"key"',
        "{}",
        "\0",
        '{"\udcff": 1}',
        *(f'{{"timestep": {t}}}' for t in ('"3"', 3.0, "[]")),
    ):
        damages.append((partial(overwrite_json, shard, text), "its json is "))
    whole = {"descr": "<u2", "fortran_order": False, "shape": LAYOUT.shapes["t5"]}
    for other in ({"descr": "<f2"}, {"descr": "|O"}, {"fortran_order": True}, {"shape": (28, 9)}):
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(stream, whole | other)
        damages.append((partial(overwrite, shard, position("t5") + BLOCK, stream.getvalue()), "t5 is no .npy file"))
    for member in MEMBERS:
        last = (blob_bytes(member) - NPY_HEADER) // 2 - 1
        for value, place in ((NAN, 0), (NAN | 0x8001, last // 2), (0x7F80, last), (0xFF80, 0)):
            words = f"{member} holds NaN or infinite values"
            damages.append((partial(overwrite_value, shard, member, value, place), words))
    before = shard.read_bytes()
    for shift in (1, BLOCK):
        damages.append((partial(shard.write_bytes, before[shift:] + bytes(shift)), "it holds ["))
    wrong = []
    for damage, words in damages:
        damage()
        if not (line := complaint(folder)).startswith(f"{shard}, sample 1: ") or words not in line:
            wrong.append((words, line))
        shard.write_bytes(before)
    assert wrong == []
    stored = opened(folder)
    os.truncate(shard, 2 * STRIDE - 1)
    assert "sample 1: the file ends within the sample" in refusal(stored.read, 1, LAYOUT.arrays(), kind=BadSample)


def config_for(cfg, folder):
    places = {"data__train": str(folder), "data__val": str(folder), "data__empty": str(config.empty_dir(cfg))}
    return config_file.replace(
        cfg, **places, data__expected_train_samples=COUNT, data__expected_val_samples=COUNT, eval__batch=8
    )


def test_damage_stops_the_run_with_shard_sample_and_remedy(micro, folder, shard):
    def used(kind):
        found = kind(config_for(micro, folder), 0, 1, False)
        found.open()
        feed = found.feed(0)
        next(feed)
        next(feed)

    used(dataloader.ValSet)
    for timestep in (8, -1, None, 10**30):
        overwrite_json(shard, json.dumps({"timestep": timestep}))
        with pytest.raises(Fault, match=f"some_00000001 has timestep {timestep}, want 0 to 7; make"):
            used(dataloader.ValSet)
    overwrite_value(shard, "mean", NAN)
    for kind in (dataloader.ValSet, dataloader.TrainSet):
        where = f"{shard}, sample 1: mean holds NaN or infinite values; make the set anew"
        with pytest.raises(Fault, match=where):
            used(kind)


# bf16 bits, and the encodings of the empty caption


def test_to_bf16_bits_rounds_as_torch_does_and_from_bf16_bits_inverts_it():
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (bits[:1000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    values = np.concatenate((bits, ties)).view(np.float32)
    values = values[np.isfinite(values)]
    want = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert np.array_equal(dataset.to_bf16_bits(values), want)
    exact = torch.from_numpy(want).view(torch.bfloat16).float().numpy()
    assert np.array_equal(dataset.from_bf16_bits(want).view(np.int32), exact.view(np.int32))


def test_empty_encodings_are_read_in_each_form_and_refused_in_any_other(tmp_path):
    """No pickle in a file is executed."""
    shard_damage.write_set(tmp_path, 3, 3)
    empty = tmp_path / "empty_encodings"
    path = empty / "t5_empty.npy"
    encoding = np.arange(9 * 28).reshape(9, 28) % 50
    stored = [encoding.astype(np.float16), np.asfortranarray(encoding, np.float32), dataset.to_bf16_bits(encoding)]
    for array in (*stored, *(array[None] for array in stored)):
        np.save(path, array)
        assert np.array_equal(dataset.from_bf16_bits(dataset.read_empty(empty, LAYOUT)["t5"]), encoding)
    other = [np.zeros(shape, np.float16) for shape in ((28, 9), (2, 9, 28), ())]
    other += [np.zeros((9, 28), dtype) for dtype in (np.float64, ">f4", "<U4")]
    for value in (np.float16("nan"), np.float32("-inf"), np.uint16(NAN)):
        other.append(np.full((9, 28), value))
    for array in other:
        np.save(path, array)
        message = refusal(dataset.read_empty, empty, LAYOUT)
        assert str(path) in message and ("want uint16, float16 or float32 (9, 28)" in message or "NaN" in message)
    trap = Payload(tmp_path / "sprung")
    np.save(path, np.array([trap] * 3, dtype=object), allow_pickle=True)
    for content in (path.read_bytes(), pickle.dumps(trap), b""):
        path.write_bytes(content)
        assert f"{path}: " in refusal(dataset.read_empty, empty, LAYOUT)
    assert not (tmp_path / "sprung").exists()
    path.unlink()
    assert "No such file" in refusal(dataset.read_empty, empty, LAYOUT)
