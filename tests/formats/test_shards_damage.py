"""Damaged data sets: whatever happened to the bytes, the reader returns what was written or says what is wrong."""

import io
import json
import os
import pickle
import random
import shutil
import tarfile
import warnings
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO

from flux_ref import config, config_file, data
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import shard_writer, shards
from flux_ref.formats.shard_writer import Sample
from flux_ref.formats.shards import BLOCK, END_BYTES, MEMBERS, NPY_HEADER, BadSample, Layout, ShardSet

LAYOUT = shards.layout(config_file.load(MICRO).model)
WIDE = Layout({**LAYOUT.shapes, "t5": (20, 300)})  # a sample is longer than a tar record, as real ones are
STRIDE = LAYOUT.stride
COUNT, PER_SHARD = 5, 3
NAN, INF, MINUS_INF = 0x7FC0, 0x7F80, 0xFF80  # as bf16 bits


def samples(layout: Layout, count: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [
        Sample({n: shards.to_bf16_bits(rng.standard_normal(s)) for n, s in layout.shapes.items()}, i % 8, f"words {i}")
        for i in range(count)
    ]


WRITTEN = samples(LAYOUT, COUNT)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two shards, of three and two samples."""
    assert shard_writer.write(tmp_path / "set", WRITTEN, "some", PER_SHARD) == COUNT
    return tmp_path / "set"


@pytest.fixture
def shard(folder) -> Path:
    return folder / "shard_000000.tar"


def position(member: str, part: str = "tar", sample: int = 0) -> int:
    """Where a part (tar, npy or payload; of the json: tar or payload) of a member begins within its shard."""
    offset = sample * STRIDE
    if member != "json":
        offset += 2 * BLOCK
        for name in MEMBERS[: MEMBERS.index(member)]:
            offset += BLOCK + -(-(NPY_HEADER + LAYOUT.payload_bytes[name]) // BLOCK) * BLOCK
    return offset + {"tar": 0, "npy": BLOCK, "payload": BLOCK + (member != "json") * NPY_HEADER}[part]


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def overwrite_json(path: Path, text: str, sample: int = 0) -> None:
    """Replace a sample's json, with the size in its tar header."""
    overwrite(path, position("json", "tar", sample) + 124, f"{len(text.encode()):011o}\0".encode())
    overwrite(path, position("json", "payload", sample), text.encode().ljust(BLOCK, b"\0"))


def close(found: ShardSet) -> None:
    for descriptor in found.descriptors:
        os.close(descriptor)


def bits(value: int) -> bytes:
    return np.array(value, "<u2").tobytes()


def opened(folder: Path, layout: Layout = LAYOUT) -> ShardSet:
    found = ShardSet(folder, layout)
    found.open()
    return found


def rows(layout: Layout = LAYOUT) -> dict[str, np.ndarray]:
    return {name: np.zeros(shape, np.uint16) for name, shape in layout.shapes.items()}


def read_all(found: ShardSet) -> list[dict[str, np.ndarray]]:
    read = [rows(found.layout) for _ in range(len(found))]
    for index, row in enumerate(read):
        found.read(index, row)
    return read


def same(read: dict[str, np.ndarray], written: Sample) -> bool:
    return all(np.array_equal(read[name], written.members[name]) for name in MEMBERS)


def complaint(folder: Path, index: int) -> str:
    """What reading sample `index` of a set that opens says."""
    found = opened(folder)
    with pytest.raises(BadSample) as bad:
        found.read(index, rows())
    close(found)
    assert "\n" not in str(bad.value) and f"sample {index % PER_SHARD}" in str(bad.value)
    return str(bad.value)


def refusal(folder: Path) -> str:
    """What making or opening a set says when it is refused."""
    with pytest.raises((Refusal, OSError)) as refused:  # a rank turns an OSError into a refusal, see parallel.together
        opened(folder)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_positions_are_where_the_parts_are(folder, shard):
    content = shard.read_bytes()
    for sample, member in ((s, m) for s in range(PER_SHARD) for m in MEMBERS):
        payload = WRITTEN[sample].members[member].tobytes()
        start = position(member, "payload", sample)
        assert content[start : start + len(payload)] == payload
        assert content[position(member, "npy", sample) :].startswith(b"\x93NUMPY")
        assert content[position(member, "tar", sample) :].startswith(f"some_{sample:08d}.{member}.bytes\0".encode())
    assert all(same(read, written) for read, written in zip(read_all(opened(folder)), WRITTEN))


# Folders and files


def test_a_missing_folder_is_refused(tmp_path):
    message = refusal(tmp_path / "none")
    assert str(tmp_path / "none") in message and "does not exist" in message and "data.train" in message


@pytest.mark.parametrize("content", [[], ["notes.txt"], ["shard.tar.partial"]])
def test_a_folder_without_shards_is_refused(content, tmp_path):
    for name in content:
        (tmp_path / name).write_bytes(b"x" * (STRIDE + END_BYTES))
    message = refusal(tmp_path)
    assert str(tmp_path) in message and "no *.tar" in message


def test_a_file_in_place_of_the_folder_is_refused(shard):
    assert str(shard) in refusal(shard)


def test_no_length_of_a_truncated_shard_passes_for_the_whole(folder, shard):
    whole = shard.read_bytes()
    rng = random.Random(0)
    ends = [k * STRIDE + extra for k in range(PER_SHARD + 1) for extra in (-1, 0, 1, BLOCK, END_BYTES, END_BYTES + 1)]
    lengths = {0, 1, BLOCK, len(whole) - 1, *ends, *(rng.randrange(len(whole)) for _ in range(300))}
    for length in sorted(length for length in lengths if 0 <= length < len(whole)):
        shard.write_bytes(whole[:length])
        try:
            found = opened(folder)
        except Refusal as refused:
            assert str(shard) in str(refused)
            continue
        assert len(found) < COUNT and (length - END_BYTES) % STRIDE == 0, length
        close(found)


def test_a_padded_shard_of_large_samples_is_read_and_refused_once_truncated(tmp_path):
    written = samples(WIDE, 3)
    shard_writer.write(tmp_path / "set", written, "some")
    path = tmp_path / "set" / "shard_000000.tar"
    end = path.stat().st_size
    padded = path.read_bytes() + bytes(-end % shards.RECORD)
    assert len(padded) > end and WIDE.stride > shards.RECORD
    path.write_bytes(padded)
    assert all(same(read, sample) for read, sample in zip(read_all(opened(tmp_path / "set", WIDE)), written))
    for length in [*random.Random(0).sample(range(end), 100), end - 1, end + 1, len(padded) - 1]:
        path.write_bytes(padded[:length])
        try:
            assert len(opened(tmp_path / "set", WIDE)) < 3, length
        except Refusal as refused:
            assert str(path) in str(refused)


def test_one_shard_too_many_bytes_is_refused(folder, shard):
    with shard.open("ab") as file:
        file.write(bytes(BLOCK))
    assert str(shard) in refusal(folder)


def test_a_tar_of_something_else_is_refused(folder):
    path = folder / "notes.tar"
    with tarfile.open(path, "w") as archive:
        archive.add(MICRO)
    assert str(path) in refusal(folder)


def test_a_tar_of_something_else_with_the_size_of_samples_is_refused(shard):
    with tarfile.open(shard, "w") as archive:
        archive.add(MICRO)
    os.truncate(shard, 2 * STRIDE + END_BYTES)
    assert str(shard) in refusal(shard.parent)


@pytest.mark.parametrize("content", [b"\0", b"\xff", b"PK\3\4"], ids=ascii)
def test_rubbish_of_the_right_size_is_refused(content, folder, shard):
    shard.write_bytes((content * STRIDE)[: STRIDE + END_BYTES])
    assert str(shard) in refusal(folder)


@pytest.mark.parametrize(
    "other",
    [
        {"t5": (9, 30)},
        {"clip": (15,)},
        {"mean": (16, 6, 4)},
        {"mean": (16, 4, 4), "logvar": (16, 4, 4)},
        {"t5": (8, 28)},
    ],
    ids=str,
)
def test_samples_of_other_shapes_are_refused(other, tmp_path):
    shard_writer.write(tmp_path / "set", samples(Layout({**LAYOUT.shapes, **other}), 2), "some")
    message = refusal(tmp_path / "set")
    assert str(tmp_path / "set" / "shard_000000.tar") in message
    # Where padding hides the difference from the size, the array's header tells.
    assert "truncated or foreign" in message or any(f"{name} is uint16 {other[name]}" in message for name in other)


@pytest.mark.parametrize(
    "header, words",
    [
        ({"descr": "<f2"}, "float16 (9, 28)"),
        ({"descr": "<f4"}, "float32 (9, 28)"),
        ({"descr": "<i2"}, "int16 (9, 28)"),
        ({"descr": ">u2"}, ">u2 (9, 28)"),
        ({"descr": "|O"}, "object (9, 28)"),
        ({"fortran_order": True}, "uint16 (9, 28) in Fortran order"),
        ({"shape": (28, 9)}, "uint16 (28, 9)"),
        ({"shape": (1, 9, 28)}, "uint16 (1, 9, 28)"),
        ({"shape": (9,)}, "uint16 (9,)"),
        ({"shape": ()}, "uint16 ()"),
    ],
    ids=str,
)
def test_an_array_of_another_kind_is_refused_with_what_it_is_and_should_be(header, words, folder, shard):
    stream = io.BytesIO()
    whole = {"descr": "<u2", "fortran_order": False, "shape": LAYOUT.shapes["t5"]} | header
    np.lib.format.write_array_header_1_0(stream, whole)
    assert len(stream.getvalue()) == NPY_HEADER
    overwrite(shard, position("t5", "npy", sample=2), stream.getvalue())
    message = refusal(folder)
    assert f"{shard}, sample 2, key some_00000002: t5 is {words}, want uint16 (9, 28)" in message


def test_only_the_first_and_the_last_sample_are_read_on_opening(folder, shard):
    overwrite(shard, position("json", sample=1), bytes(BLOCK))
    found = opened(folder)
    found.read(0, rows())
    with pytest.raises(BadSample):
        found.read(1, rows())
    for sample in (0, 2):
        shards_before = shard.read_bytes()
        overwrite(shard, position("json", sample=sample), bytes(BLOCK))
        assert f"sample {sample}" in refusal(folder)
        shard.write_bytes(shards_before)


def test_a_file_deleted_after_opening_is_still_read(folder, shard):
    found = opened(folder)
    shard.unlink()
    assert all(same(read, written) for read, written in zip(read_all(found), WRITTEN))


def test_a_file_deleted_before_opening_is_named(folder, shard):
    found = ShardSet(folder, LAYOUT)
    shard.unlink()
    with pytest.raises((Refusal, OSError)) as refused:
        found.open()
    assert str(shard) in str(refused.value)


@pytest.mark.parametrize("left", [0, 1, STRIDE - 1, STRIDE])
def test_a_file_truncated_after_opening_is_noticed(left, folder, shard):
    found = opened(folder)
    os.truncate(shard, STRIDE + left)
    assert found.read(0, rows()).key == "some_00000000"
    for index in range(1 + left // STRIDE, PER_SHARD):
        with pytest.raises(BadSample, match=f"sample {index}: the file ends"):
            found.read(index, rows())
    assert found.read(PER_SHARD, rows()).key == "some_00000003"


def test_a_directory_named_like_a_shard_is_refused(folder, shard):
    shard.unlink()
    shard.mkdir()
    assert str(shard) in refusal(folder)


def test_a_link_to_nothing_is_refused(folder, shard):
    shard.unlink()
    shard.symlink_to(folder / "none.tar")
    assert str(shard) in refusal(folder)


def test_a_link_to_a_shard_is_as_good_as_the_shard(folder, shard):
    shard.symlink_to(shard.rename(folder.parent / "elsewhere.tar"))
    assert all(same(read, written) for read, written in zip(read_all(opened(folder)), WRITTEN))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read anything")
def test_a_shard_that_may_not_be_read_is_named(folder, shard):
    shard.chmod(0)
    assert str(shard) in refusal(folder)


# Samples


@pytest.mark.parametrize("first, second", [("mean", "logvar"), ("t5", "mean"), ("clip", "logvar")])
def test_members_in_another_order_are_noticed(first, second, folder, shard):
    content = shard.read_bytes()
    starts = [*(position(name, sample=1) for name in MEMBERS), 2 * STRIDE]
    whole = {name: content[start:stop] for name, start, stop in zip(MEMBERS, starts, starts[1:])}
    whole[first], whole[second] = whole[second], whole[first]
    overwrite(shard, starts[0], b"".join(whole.values()))
    found, belongs = f"some_00000001.{second}.bytes", f"some_00000001.{first}.bytes"
    assert f"found member {found!r} where {belongs} belongs" in complaint(folder, 1)


@pytest.mark.parametrize("member", [*MEMBERS, "json"])
def test_members_of_two_samples_do_not_mix(member, folder, shard):
    overwrite(shard, position(member, sample=1), b"some_00000002.")
    message = complaint(folder, 1)
    assert "some_00000002." in message and "some_00000001." in message and "belongs" in message


@pytest.mark.parametrize("name", [b"some.txt", b"json", b"some.JSON", b"", b"\xff\xfe.json"], ids=ascii)
def test_a_sample_begins_with_its_json(name, folder, shard):
    overwrite(shard, position("json", sample=1), name.ljust(100, b"\0"))
    message = complaint(folder, 1)
    assert "KEY.json" in message or "no tar header" in message


@pytest.mark.parametrize("text", ["", "{", "[]", '"key"', "null", "3", '{"key": "some_00000001", "timestep": }', "\0"])
def test_a_json_that_is_no_object_is_noticed(text, folder, shard):
    overwrite_json(shard, text, sample=1)
    assert "some_00000001.json is not a JSON object" in complaint(folder, 1)


def test_a_json_that_is_not_unicode_is_noticed(folder, shard):
    overwrite(shard, position("json", "payload", sample=1) + 2, b"\xff\xfe\xff")
    assert "some_00000001.json is not a JSON object" in complaint(folder, 1)


def test_a_json_longer_than_its_block_is_noticed(folder, shard):
    overwrite(shard, position("json", sample=1) + 124, b"00000001001\0")
    assert "513 bytes" in complaint(folder, 1)


@pytest.mark.parametrize("timestep", ["3", 3.0, True, [3], {}, float("nan")], ids=repr)
def test_a_timestep_that_is_no_integer_is_noticed(timestep, folder, shard):
    overwrite_json(shard, json.dumps({"key": "some_00000001", "timestep": timestep}), sample=1)
    assert f"timestep {timestep!r}" in complaint(folder, 1)


@pytest.mark.parametrize("content", [{}, {"timestep": None}, {"timestep": 7, "caption": None}])
def test_what_a_json_may_leave_out(content, folder, shard):
    overwrite_json(shard, json.dumps({"key": "some_00000001"} | content), sample=1)
    meta = opened(folder).read(1, rows())
    assert meta == shards.Meta("some_00000001", content.get("timestep"), "")


@pytest.mark.parametrize("value", [NAN, NAN | 0x8001, INF, MINUS_INF])
@pytest.mark.parametrize("member", MEMBERS)
def test_nan_and_infinity_are_noticed_wherever_they_are(member, value, folder, shard):
    count = LAYOUT.payload_bytes[member] // 2
    for place in (0, count // 2, count - 1):
        whole = shard.read_bytes()
        overwrite(shard, position(member, "payload", sample=1) + 2 * place, bits(value))
        assert f"key some_00000001: {member} holds NaN or infinite values" in complaint(folder, 1)
        shard.write_bytes(whole)


def test_the_largest_and_smallest_values_are_taken(folder, shard):
    extremes = [0x7F7F, 0xFF7F, 0x0001, 0x8000]
    overwrite(shard, position("clip", "payload", sample=1), b"".join(map(bits, extremes)))
    found = rows()
    opened(folder).read(1, found)
    assert found["clip"][:4].tolist() == extremes


@pytest.mark.parametrize("part", ["tar", "npy"])
@pytest.mark.parametrize("member", [*MEMBERS, "json"])
def test_a_zeroed_header_is_noticed(member, part, folder, shard):
    overwrite(shard, position(member, part, sample=1), bytes(BLOCK if part == "tar" else NPY_HEADER))
    message = complaint(folder, 1)
    assert {"tar": "no tar header", "npy": "JSON" if member == "json" else "is not a .npy blob"}[part] in message


@pytest.mark.parametrize(
    "size", [b"00000000000\0", b"77777777777\0", b"-0000000001\0", b"\x80" + b"\xff" * 11, b"x" * 12]
)
@pytest.mark.parametrize("member", [*MEMBERS, "json"])
def test_a_wrong_size_in_a_header_is_noticed(member, size, folder, shard):
    overwrite(shard, position(member, sample=1) + 124, size)
    complaint(folder, 1)


def headers(sample: int) -> list[range]:
    """The positions of all bytes of a sample that are not payload or padding, stretch by stretch."""
    members = (position(member, "tar", sample) for member in MEMBERS)
    start = position("json", "tar", sample)
    return [range(start, start + 2 * BLOCK), *(range(begin, begin + BLOCK + NPY_HEADER) for begin in members)]


def read_as_written_or_bad(found: ShardSet, index: int) -> bool:
    """Whether a sample reads, and then as it was written; anything but BadSample, even a warning, is an error."""
    read = rows()
    try:
        with warnings.catch_warnings(action="error"):
            meta = found.read(index, read)
    except BadSample as bad:
        assert str(found.paths[0]) in str(bad) and "sample 1" in str(bad)
        return False
    assert same(read, WRITTEN[index]) and meta.key == f"some_{index:08d}"
    assert meta.timestep is None or type(meta.timestep) is int
    return True


def test_any_changed_byte_of_a_header_is_harmless_or_noticed(folder, shard):
    found, whole, rng = opened(folder), shard.read_bytes(), random.Random(0)
    harmless = noticed = 0
    with shard.open("r+b", buffering=0) as file:
        for place in chain.from_iterable(headers(sample=1)):
            flipped = whole[place] ^ 1 << rng.randrange(8)
            for value in {flipped, rng.choice((*b"'\"({", rng.randrange(256)))} - {whole[place]}:
                os.pwrite(file.fileno(), bytes([value]), place)
                reads = read_as_written_or_bad(found, 1)
                harmless, noticed = harmless + reads, noticed + (not reads)
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    assert read_as_written_or_bad(found, 1) and shard.read_bytes() == whole
    assert noticed > 1000 and harmless > 1000


def test_any_changed_stretch_of_a_header_is_harmless_or_noticed(folder, shard):
    found, whole, rng = opened(folder), shard.read_bytes(), random.Random(1)
    stretches, noticed = headers(sample=1), 0
    with shard.open("r+b", buffering=0) as file:
        for _ in range(3000):
            stretch = rng.choice(stretches)
            place = rng.choice(stretch)
            length = min(rng.choice((2, 4, 16)), stretch.stop - place)
            source = rng.choice((b"'\"(){}[]:,\\ \n\0", b"0123456789", bytes(range(256))))
            os.pwrite(file.fileno(), bytes(rng.choices(source, k=length)), place)
            noticed += not read_as_written_or_bad(found, 1)
            os.pwrite(file.fileno(), whole[place : place + length], place)
    assert read_as_written_or_bad(found, 1) and noticed > 500


# Through the training and the validation set


def config_for(train: Path, val: Path, empty: Path | str = "", **values: object) -> config.Config:
    values |= {"data__train": str(train), "data__val": str(val), "data__empty": str(empty), "data__kind": "embeddings"}
    return config_file.replace(config_file.load(MICRO), data__train_count=0, data__val_count=0, **values)


def validation_batches(folder: Path) -> None:
    val_set = data.ValSet(config_for(folder, folder), rank=0, size=1, pin=False)
    val_set.open()
    feed = val_set.feed(0)
    try:
        for _ in range(val_set.batches):
            feed.give_back(feed.take())
    finally:
        feed.close()


@pytest.mark.parametrize("timestep", [8, -1, None, 10**30])
def test_a_validation_sample_without_a_usable_timestep_stops_the_run(timestep, folder, shard):
    validation_batches(folder)
    overwrite_json(shard, json.dumps({"key": "some_00000001", "timestep": timestep}), sample=1)
    with pytest.raises(Fault, match=f"some_00000001 in {folder} has timestep {timestep}; want 0 to 7"):
        validation_batches(folder)


def test_a_damaged_validation_sample_stops_the_run(folder, shard):
    overwrite(shard, position("mean", "payload", sample=1), bits(NAN))
    with pytest.raises(Fault, match=r"bad validation sample: .*shard_000000\.tar, sample 1, key some_00000001: mean"):
        validation_batches(folder)


@pytest.mark.parametrize("skip_bad", [0, 1, 2])
def test_as_many_damaged_training_samples_are_skipped_as_allowed(skip_bad, folder, shard, shapes_dir):
    damaged = range(skip_bad + 1)
    cfg = config_for(folder, folder, shapes_dir / "empty_encodings", data__skip_bad=skip_bad, train__global_batch=COUNT)
    train_set = data.TrainSet(cfg, rank=0, size=1, pin=False)
    train_set.open()
    for sample in damaged[:skip_bad]:
        overwrite(shard, position("mean", "payload", sample=sample), bits(NAN))
    feed = train_set.feed(0)
    try:
        for _epoch in range(4):  # the same samples, met again, count once
            batch = feed.take()
            assert sorted(batch.rows["weight"]) == [0] * skip_bad + [1] * (COUNT - skip_bad)
            assert not any(batch.rows[name][batch.rows["weight"] == 0].any() for name in ("mean", "logvar"))
            feed.give_back(batch)
        assert sorted(train_set.skipped) == list(damaged[:skip_bad])
        overwrite(shard, position("mean", "payload", sample=skip_bad), bits(NAN))
        with pytest.raises(Fault, match=rf"mean holds NaN .*data\.skip_bad={skip_bad} allows no"):
            for _ in range(10):
                feed.give_back(feed.take())
    finally:
        feed.close()


# The encodings of the empty caption


@pytest.fixture
def empty(tmp_path, shapes_dir) -> Path:
    return Path(shutil.copytree(shapes_dir / "empty_encodings", tmp_path / "empty"))


def empty_refusal(folder: Path, name: str = "t5") -> str:
    with pytest.raises(Refusal) as refused:
        shards.read_empty(folder, LAYOUT)
    message = str(refused.value)
    assert str(folder / f"{name}_empty.npy") in message and "\n" not in message
    return message


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.uint16])
@pytest.mark.parametrize("batch_axis", [True, False])
def test_empty_encodings_are_read_in_each_form(dtype, batch_axis, empty):
    encoding = np.arange(9 * 28).reshape(9, 28) % 50
    stored = shards.to_bf16_bits(encoding) if dtype == np.uint16 else encoding.astype(dtype)
    np.save(empty / "t5_empty.npy", stored[None] if batch_axis else stored)
    assert np.array_equal(shards.from_bf16_bits(shards.read_empty(empty, LAYOUT)["t5"]), encoding)


@pytest.mark.parametrize("name", ["t5", "clip"])
def test_a_missing_empty_encoding_is_refused(name, empty):
    (empty / f"{name}_empty.npy").unlink()
    empty_refusal(empty, name)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((28, 9), np.float16),
        np.zeros((2, 9, 28), np.float16),
        np.zeros((), np.float16),
        np.zeros((9, 28), np.float64),
        np.zeros((9, 28), np.int16),
        np.zeros((9, 28), ">f4"),
        np.zeros((9, 28), "<U4"),
        np.zeros((9, 28), [("a", "<f4")]),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_empty_encoding_of_another_kind_is_refused(array, empty):
    np.save(empty / "t5_empty.npy", array)
    assert f"{array.dtype} {array.shape}; want float16, float32 or uint16 (9, 28)" in empty_refusal(empty)


@pytest.mark.parametrize(
    "value", [np.float16("nan"), np.float16("inf"), np.float32("-inf"), np.float32(3.4e38)], ids=repr
)
@pytest.mark.parametrize("name", ["t5", "clip"])
def test_an_empty_encoding_that_is_not_finite_in_bf16_is_refused(name, value, empty):
    array = np.zeros(LAYOUT.shapes[name], value.dtype)
    array.flat[-1] = value
    np.save(empty / f"{name}_empty.npy", array)
    empty_refusal(empty, name)


def test_an_empty_encoding_of_bits_that_are_not_finite_is_refused(empty):
    np.save(empty / "t5_empty.npy", np.full((9, 28), NAN, np.uint16))
    empty_refusal(empty)


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_an_empty_encoding_is_never_unpickled(empty, tmp_path):
    trap = Trap(tmp_path / "sprung")
    with (empty / "t5_empty.npy").open("wb") as file:
        np.save(file, np.array([trap] * 3, dtype=object), allow_pickle=True)
    empty_refusal(empty)
    (empty / "t5_empty.npy").write_bytes(pickle.dumps(trap))
    empty_refusal(empty)
    assert not (tmp_path / "sprung").exists()
    pickle.loads((empty / "t5_empty.npy").read_bytes()).close()
    assert (tmp_path / "sprung").exists()  # the trap works


def test_no_length_of_a_truncated_empty_encoding_is_taken(empty):
    whole = (empty / "t5_empty.npy").read_bytes()
    for length in [*range(NPY_HEADER + 8), *range(NPY_HEADER + 8, len(whole), 37)]:
        (empty / "t5_empty.npy").write_bytes(whole[:length])
        empty_refusal(empty)


def test_an_archive_in_place_of_an_empty_encoding_is_refused(empty):
    stream = io.BytesIO()
    np.savez(stream, t5=np.zeros((9, 28), np.float16))
    for content in (stream.getvalue(), stream.getvalue()[:-9]):
        (empty / "t5_empty.npy").write_bytes(content)
        empty_refusal(empty)


def test_any_changed_byte_in_the_header_of_an_empty_encoding_is_harmless_or_refused(empty):
    path, rng = empty / "t5_empty.npy", random.Random(0)
    whole, want = path.read_bytes(), shards.read_empty(empty, LAYOUT)["t5"]
    for place in range(NPY_HEADER):
        for value in {rng.randrange(256), ord("'"), ord("("), ord("9")} - {whole[place]}:
            path.write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            try:
                found = shards.read_empty(empty, LAYOUT)["t5"]
            except Refusal as refused:
                assert str(path) in str(refused)
            else:
                assert found.shape == want.shape and found.dtype == want.dtype
