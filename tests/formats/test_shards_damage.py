"""Damaged data sets: whatever happened to the bytes, the reader returns what was written or says what is wrong."""

import io
import os
import pickle
import random
import shutil
import tarfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import shard_damage
from conftest import MICRO
from payload import Payload
from shard_damage import (
    LAYOUT,
    NAN,
    STRIDE,
    close,
    describe,
    opened,
    overwrite,
    overwrite_json,
    overwrite_value,
    position,
    same,
)

from flux_ref import config, config_file, data
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import shard_writer, shards
from flux_ref.formats.shards import BLOCK, END_BYTES, MEMBERS, NPY_HEADER, BadSample, Layout

WIDE = Layout({**LAYOUT.shapes, "t5": (20, 300)})  # a sample is longer than a tar record, as real ones are
COUNT, PER_SHARD = 12, 3
WRITTEN = shard_damage.samples(COUNT)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Four shards of three samples."""
    assert shard_writer.write(tmp_path / "set", WRITTEN, "some", PER_SHARD) == COUNT
    return tmp_path / "set"


@pytest.fixture
def shard(folder) -> Path:
    return folder / "shard_000000.tar"


def require_as_written(folder: Path, written: list = WRITTEN, layout: Layout = LAYOUT) -> None:
    stored = opened(folder, layout)
    assert len(stored) == len(written)
    for index, sample in enumerate(written):
        rows = layout.rows()
        stored.read(index, rows)
        assert same(rows, sample), index
    close(stored)


def complaint(folder: Path, index: int = 1) -> str:
    """What reading sample `index` of a set that opens says."""
    stored = opened(folder)
    with pytest.raises(BadSample) as bad:
        stored.read(index, LAYOUT.rows())
    close(stored)
    assert "\n" not in str(bad.value) and f"sample {index % PER_SHARD}" in str(bad.value)
    return str(bad.value)


def refusal(folder: Path) -> str:
    """What making or opening a set says when it is refused."""
    with pytest.raises((Refusal, OSError)) as refused:  # a rank turns an OSError into a refusal, see ranks.agreed
        opened(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def unnoticed(shard: Path, damages: list[tuple[Callable[[], object], str]], said: Callable[[], str]) -> list[str]:
    """The words of the damages that are not told when they are done one by one. A damage: (do it, words)."""
    whole = shard.read_bytes()
    wrong = []
    for damage, words in damages:
        damage()
        if words not in (line := said()):
            wrong.append(f"{words!r} is not in {line!r}")
        shard.write_bytes(whole)
    return wrong


# What opening refuses


def test_a_missing_or_empty_folder_or_a_file_is_refused(tmp_path, shard):
    missing = refusal(tmp_path / "none")
    assert str(tmp_path / "none") in missing and "does not exist" in missing and "data.train" in missing
    for name in ("shard.tar.partial", ".shard.tar"):
        shutil.copy(shard, tmp_path / name)
    message = refusal(tmp_path)
    assert str(tmp_path) in message and "no *.tar" in message
    assert str(shard) in refusal(shard)


def test_no_length_of_a_truncated_shard_passes_for_the_whole(folder, shard):
    whole = shard.read_bytes()
    lengths = set(random.Random(0).sample(range(len(whole)), 50))
    for end in range(0, len(whole), STRIDE):
        lengths |= {end + extra for extra in (-1, 0, 1, BLOCK, END_BYTES, END_BYTES + 1)}
    for length in sorted(length for length in lengths if 0 <= length < len(whole)):
        shard.write_bytes(whole[:length])
        try:
            stored = opened(folder)
        except Refusal as refused:
            assert str(shard) in str(refused)
            continue
        assert len(stored) < COUNT and (length - END_BYTES) % STRIDE == 0, length
        close(stored)


def test_a_padded_shard_of_large_samples_is_read(tmp_path):
    written = shard_damage.samples(3, layout=WIDE)
    shard_writer.write(tmp_path / "set", written, "some")
    path = tmp_path / "set" / "shard_000000.tar"
    path.write_bytes(path.read_bytes() + bytes(-path.stat().st_size % shards.RECORD))
    require_as_written(tmp_path / "set", written, WIDE)


def test_files_that_are_no_shards_are_refused(folder, shard):
    with tarfile.open(folder.parent / "other", "w") as archive:
        archive.add(MICRO)
    other = (folder.parent / "other").read_bytes()
    contents = [other, other.ljust(2 * STRIDE + END_BYTES, b"\0"), bytes(shards.RECORD)]
    contents += [(pattern * STRIDE)[: STRIDE + END_BYTES] for pattern in (b"\0", b"\xff", b"PK\3\4")]
    damages = [(partial(shard.write_bytes, content), str(shard)) for content in contents]
    damages += [(partial(shard.write_bytes, shard.read_bytes() + bytes(BLOCK)), "truncated or foreign")]
    assert unnoticed(shard, damages, lambda: refusal(folder)) == []
    target = shard.rename(folder.parent / "elsewhere.tar")
    shard.symlink_to(target)  # a link to a shard is as good as the shard
    require_as_written(folder)
    target.unlink()
    assert str(shard) in refusal(folder)


def test_samples_of_other_shapes_are_refused(tmp_path):
    """By the size of the file. Where padding hides the difference, the array's header tells."""
    large = {"mean": (16, 24, 20), "logvar": (16, 24, 20)}
    small = {"mean": (16, 4, 4), "logvar": (16, 4, 4)}
    for number, other in enumerate(
        ({"t5": (9, 30)}, {"clip": (15,)}, {"mean": (16, 6, 4)}, {"t5": (8, 28)}, small, large)
    ):
        folder = tmp_path / str(number)
        shard_writer.write(folder, shard_damage.samples(2, layout=Layout({**LAYOUT.shapes, **other})), "some")
        message = refusal(folder)
        name, shape = next(iter(other.items()))
        found, _, wanted = message.partition("want")
        assert str(folder / "shard_000000.tar") in message and str(shape) in found, message
        assert str(LAYOUT.shapes[name]) in wanted


def test_only_the_first_and_the_last_sample_are_read_on_opening(folder, shard):
    overwrite(shard, position("json", sample=1), bytes(BLOCK))
    complaint(folder, 1)
    places = {sample: position("json", sample=sample) for sample in (0, 2)}
    ends = [(partial(overwrite, shard, place, bytes(BLOCK)), f"sample {sample}") for sample, place in places.items()]
    ends.append((partial(overwrite, shard, PER_SHARD * STRIDE + 5, b"x"), "no end marker after 3 samples"))
    assert unnoticed(shard, ends, lambda: refusal(folder)) == []


# What reading notices


def test_a_file_that_is_written_after_opening_is_noticed(folder, shard):
    """Also if the bytes of the sample that is read are sound."""
    stored = opened(folder)
    stored.read(0, LAYOUT.rows())
    overwrite_value(shard, "mean", 0, sample=1)
    for index in (0, 1):
        with pytest.raises(BadSample, match=f"sample {index}: the file has changed since the start; copy it again"):
            stored.read(index, LAYOUT.rows())
    os.truncate(shard, 2 * STRIDE - 1)
    for index in (1, 2):
        with pytest.raises(BadSample, match=f"sample {index}: the file ends"):
            stored.read(index, LAYOUT.rows())
    assert stored.read(PER_SHARD, LAYOUT.rows()).key == "some_00000003"


def npy_damages() -> list[tuple[bytes, str]]:
    """Headers of the array t5 of other kinds, and how each is told."""
    whole = {"descr": "<u2", "fortran_order": False, "shape": LAYOUT.shapes["t5"]}
    others = [{"descr": kind} for kind in ("<f2", "<f4", "<i2", ">u2", "|O")]
    others += [{"fortran_order": True}, {"shape": (28, 9)}, {"shape": (1, 9, 28)}, {"shape": ()}]
    damages = []
    for other in others:
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(stream, whole | other)
        header = stream.getvalue()
        damages.append((header, f"t5 is {header[10:].decode().strip()!r}, want uint16 (9, 28)"))
    return damages


def test_damage_of_a_sample_is_noticed_and_named(folder, shard):
    """Members in another order or with other names, headers, sizes, the json, and values that are not finite."""
    content = shard.read_bytes()
    starts = [*(position(name, sample=1) for name in MEMBERS), 2 * STRIDE]
    json_at = position("json", sample=1)
    mean, logvar = (content[position(name, sample=1) :][: starts[3] - starts[2]] for name in ("mean", "logvar"))
    swapped = "found member 'some_00000001.logvar.bytes' where some_00000001.mean.bytes belongs"
    places = [(starts[2], logvar + mean, swapped)]
    places.append((json_at, content[starts[0] : 2 * STRIDE] + content[json_at : starts[0]], "in this order"))
    places.append((json_at, b"\xff\xfe.json", "no tar header"))
    places.append((json_at + 124, b"00000001001\0", "513 bytes"))
    places += [(json_at, name.ljust(100, b"\0"), "KEY.json") for name in (b"some.txt", b"json", b"some.JSON", b"")]
    places += [(position("t5", "npy", 1), header, words) for header, words in npy_damages()]
    for member in (*MEMBERS, "json"):
        begin = position(member, sample=1)
        npy = "JSON" if member == "json" else f"{member} is '', want uint16"
        places.append((begin, bytes(BLOCK), "no tar header"))
        places.append((begin, b"some_00000002.", "some_00000002."))
        places.append((position(member, "npy", 1), bytes(NPY_HEADER), npy))
        for size in (b"00000000000\0", b"77777777777\0", b"-0000000001\0", b"\x80" + b"\xff" * 11, b"x" * 12):
            places.append((begin + 124, size, "sample 1"))
    damages = [(partial(overwrite, shard, place, new), words) for place, new, words in places]
    utf_16 = '{"timestep": 3}'.encode("utf-16").decode("utf-8", "surrogateescape")
    for text in (utf_16, "", "{", "[]", '"key"', "null", "3", '{"timestep": }', "\0", '{"\udcff\udcfe": 1}', "[" * 500):
        damages.append((partial(overwrite_json, shard, text), "some_00000001.json is not a JSON object"))
    damages.append((partial(overwrite_json, shard, describe(key="some_00000002")), "is of sample 'some_00000002'"))
    for kind in b"1256xL":  # links, a folder, a pipe, headers before a member
        damages.append((partial(overwrite, shard, json_at + 156, bytes([kind])), "no tar header"))
    for timestep in ("3", 3.0, True, [3], {}, float("nan")):
        damages.append((partial(overwrite_json, shard, describe(timestep=timestep)), f"timestep {timestep!r}"))
    for member in MEMBERS:
        last = LAYOUT.payload_bytes[member] // 2 - 1
        for value in (NAN, NAN | 0x8001, shard_damage.INF, shard_damage.MINUS_INF):
            for place in (0, last // 2, last):
                words = f"key some_00000001: {member} holds NaN or infinite values"
                damages.append((partial(overwrite_value, shard, member, value, place), words))
    assert unnoticed(shard, damages, lambda: complaint(folder)) == []


def test_what_a_json_may_leave_out_and_extreme_values_are_read(folder, shard):
    for content in ({}, {"timestep": None}, {"timestep": 7, "caption": None}):
        overwrite_json(shard, describe(**content))
        meta = opened(folder).read(1, LAYOUT.rows())
        assert meta == shards.Meta("some_00000001", content.get("timestep"), "")
    extremes, rows = [0x7F7F, 0xFF7F, 0x0001, 0x8000], LAYOUT.rows()
    for place, value in enumerate(extremes):
        overwrite_value(shard, "clip", value, place)
    opened(folder).read(1, rows)
    assert rows["clip"][:4].tolist() == extremes


@pytest.fixture
def bad_disk(monkeypatch):
    """Damage of the disk itself, which changes no time of a file."""
    monkeypatch.setattr(shards, "_stamp", lambda status: (status.st_size, 0))


def test_any_changed_byte_of_a_header_is_harmless_or_noticed(folder, shard, bad_disk):
    """Anything but BadSample, even a warning, is an error."""
    stored = opened(folder)
    whole = shard.read_bytes()
    rng = random.Random(0)
    reads = {True: 0, False: 0}
    places = [*range(STRIDE, STRIDE + 2 * BLOCK)]
    for member in MEMBERS:
        begin = position(member, sample=1)
        places += range(begin, begin + BLOCK + NPY_HEADER)
    for place in places:
        flipped = whole[place] ^ 1 << rng.randrange(8)
        for value in {flipped, rng.choice((*b"'\"({", rng.randrange(256)))} - {whole[place]}:
            overwrite(shard, place, bytes([value]))
            rows = LAYOUT.rows()
            try:
                with warnings.catch_warnings(action="error"):
                    meta = stored.read(1, rows)
            except BadSample as bad:
                assert f"{shard}, sample 1" in str(bad)
                reads[False] += 1
                continue
            assert same(rows, WRITTEN[1]) and meta.key == "some_00000001" and type(meta.timestep) in (int, type(None))
            reads[True] += 1
        overwrite(shard, place, whole[place : place + 1])
    assert min(reads.values()) > 1000


def config_for(train: Path, val: Path, empty: Path | str = "", **values: object) -> config.Config:
    values |= {"data__train": str(train), "data__val": str(val), "data__empty": str(empty), "data__kind": "embeddings"}
    return config_file.replace(config_file.load(MICRO), data__train_count=0, data__val_count=0, **values)


def validation_batches(folder: Path) -> None:
    val_set = data.ValSet(config_for(folder, folder), rank=0, size=1, pin=False)
    val_set.open()
    for _ in val_set.feed(0):
        pass


def test_a_damaged_validation_sample_or_one_without_a_usable_timestep_stops_the_run(folder, shard):
    validation_batches(folder)
    for timestep in (8, -1, None, 10**30):
        overwrite_json(shard, describe(timestep=timestep))
        with pytest.raises(Fault, match=f"some_00000001 in {folder} has timestep {timestep}; want 0 to 7"):
            validation_batches(folder)
    overwrite_value(shard, "mean", NAN)
    with pytest.raises(
        Fault, match=r"bad val sample: .*shard_000000\.tar, sample 1, key some_00000001: mean holds NaN .*prepare again"
    ):
        validation_batches(folder)


# The encodings of the empty caption


@pytest.fixture
def empty(tmp_path, shapes_dir) -> Path:
    return Path(shutil.copytree(shapes_dir / "empty_encodings", tmp_path / "empty"))


def empty_refusal(folder: Path, name: str = "t5") -> str:
    with pytest.raises(Refusal) as refused:
        shards.read_empty(folder, LAYOUT)
    message = str(refused.value)
    assert str(folder / f"{name}_empty.npy") in message and "\n" not in message and "\x1b" not in message
    return message


def test_empty_encodings_are_read_in_each_form(empty):
    encoding = np.arange(9 * 28).reshape(9, 28) % 50
    stored = {dtype: encoding.astype(dtype) for dtype in (np.float16, np.float32)}
    stored |= {"bits": shards.to_bf16_bits(encoding), "by columns": np.asfortranarray(encoding.astype(np.float32))}
    stored |= {f"{kind}, batch axis": array[None] for kind, array in stored.items()}
    for kind, array in stored.items():
        np.save(empty / "t5_empty.npy", array)
        assert np.array_equal(shards.from_bf16_bits(shards.read_empty(empty, LAYOUT)["t5"]), encoding), kind


def test_an_empty_encoding_of_another_kind_or_not_finite_in_bf16_or_damaged_is_refused(empty, tmp_path):
    """Its header allocates nothing, its file has an end, and no pickle in it is executed."""
    path = empty / "t5_empty.npy"
    arrays = [np.zeros(shape, np.float16) for shape in ((28, 9), (2, 9, 28), ())]
    arrays += [np.zeros((9, 28), dtype) for dtype in (np.float64, np.int16, ">f4", "<U4", [("a", "<f4")])]
    for array in arrays:
        np.save(path, array)
        assert f"{array.dtype} {array.shape}; want uint16, float16 or float32 (9, 28)" in empty_refusal(empty)
    for value in (np.float16("nan"), np.float16("inf"), np.float32("-inf"), np.float32(3.4e38), np.uint16(NAN)):
        array = np.zeros((9, 28), value.dtype)
        array.flat[-1] = value
        np.save(path, array)
        assert "NaN or infinite" in empty_refusal(empty)
    np.save(path, np.zeros((9, 28), np.float32))
    whole = path.read_bytes()
    contents = [whole[:length] for length in (0, 5, 100, NPY_HEADER, len(whole) - 1)] + [whole + b"x" * 8]
    for found in ("(9, 2800000000000)", "(-9, 28)", "(9, 28, 0)", "(True, 9, 28)", "9" * 40, "(" * 40, "'\x1b[2J'"):
        contents.append(whole.replace(b"(9, 28), }", f"{found}, }}".encode()))
    trap = Payload(tmp_path / "sprung")
    stream = io.BytesIO()
    np.save(stream, np.array([trap] * 3, dtype=object), allow_pickle=True)
    contents += [stream.getvalue(), pickle.dumps(trap)]
    for content in contents:
        path.write_bytes(content)
        assert "it is no whole .npy file" in empty_refusal(empty)
    assert not (tmp_path / "sprung").exists()
    pickle.loads(contents[-1])
    assert (tmp_path / "sprung").exists()  # the trap works
    path.write_bytes(whole.ljust(2**20))
    assert "larger than" in empty_refusal(empty)
    path.unlink()
    os.mkfifo(path)
    assert "is not a regular file" in empty_refusal(empty)
    path.unlink()
    path.write_bytes(whole)
    (empty / "clip_empty.npy").unlink()
    empty_refusal(empty, "clip")
