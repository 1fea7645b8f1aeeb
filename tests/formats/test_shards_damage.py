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
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import shard_damage
from conftest import MICRO
from payload import Payload
from shard_damage import (
    INF,
    LAYOUT,
    MINUS_INF,
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
from flux_ref.formats.shards import BLOCK, END_BYTES, MEMBERS, NPY_HEADER, BadSample, Layout, ShardSet

WIDE = Layout({**LAYOUT.shapes, "t5": (20, 300)})  # a sample is longer than a tar record, as real ones are
COUNT, PER_SHARD = 5, 3
WRITTEN = shard_damage.samples(COUNT)


@pytest.fixture
def folder(tmp_path) -> Path:
    """Two shards, of three and two samples."""
    assert shard_writer.write(tmp_path / "set", WRITTEN, "some", PER_SHARD) == COUNT
    return tmp_path / "set"


@pytest.fixture
def shard(folder) -> Path:
    return folder / "shard_000000.tar"


def read_all(stored: ShardSet) -> list[dict[str, np.ndarray]]:
    read = [stored.layout.rows() for _ in range(len(stored))]
    for index, row in enumerate(read):
        stored.read(index, row)
    return read


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
    whole, wrong = shard.read_bytes(), []
    for number, (damage, words) in enumerate(damages):
        damage()
        if words not in (line := said()):
            wrong.append(f"{number}: {words!r} is not in {line!r}")
        shard.write_bytes(whole)
    return wrong


def test_a_missing_or_empty_folder_or_a_file_is_refused(tmp_path, shard):
    missing = refusal(tmp_path / "none")
    assert str(tmp_path / "none") in missing and "does not exist" in missing and "data.train" in missing
    for name in ("notes.txt", "shard.tar.partial"):
        message = refusal(tmp_path)
        assert str(tmp_path) in message and "no *.tar" in message
        (tmp_path / name).write_bytes(b"x" * (STRIDE + END_BYTES))
    assert str(shard) in refusal(shard)


def test_no_length_of_a_truncated_shard_passes_for_the_whole(folder, shard):
    whole = shard.read_bytes()
    rng = random.Random(0)
    ends = [k * STRIDE + extra for k in range(PER_SHARD + 1) for extra in (-1, 0, 1, BLOCK, END_BYTES, END_BYTES + 1)]
    lengths = {0, 1, BLOCK, len(whole) - 1, *ends, *(rng.randrange(len(whole)) for _ in range(50))}
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
    assert all(same(read, sample) for read, sample in zip(read_all(opened(tmp_path / "set", WIDE)), written))


def test_files_that_are_no_shards_are_refused(folder, shard):
    whole = shard.read_bytes()
    with tarfile.open(folder.parent / "other.tar", "w") as archive:
        archive.add(MICRO)
    other = (folder.parent / "other.tar").read_bytes()
    contents = [other, other.ljust(2 * STRIDE + END_BYTES, b"\0"), bytes(shards.RECORD)]
    contents += [(pattern * STRIDE)[: STRIDE + END_BYTES] for pattern in (b"\0", b"\xff", b"PK\3\4")]
    damages = [(partial(shard.write_bytes, content), str(shard)) for content in contents]
    assert unnoticed(shard, damages, lambda: refusal(folder)) == []
    shard.unlink()
    shard.symlink_to(folder.parent / "none.tar")
    assert str(shard) in refusal(folder)
    (folder.parent / "none.tar").write_bytes(whole)  # a link to a shard is as good as the shard
    assert all(same(read, written) for read, written in zip(read_all(opened(folder)), WRITTEN))


def test_a_shard_of_another_config_says_which_shapes_it_holds(tmp_path):
    shapes = {**LAYOUT.shapes, "mean": (16, 24, 20), "logvar": (16, 24, 20)}
    shard_writer.write(tmp_path / "set", shard_damage.samples(2, layout=Layout(shapes)), "some")
    line, own = refusal(tmp_path / "set"), LAYOUT.shapes["mean"]
    found, _, wanted = line.partition("want")
    assert "'mean': (16, 24, 20)" in found and f"'mean': {own}" in wanted and "--config" in line


def test_a_foreign_shard_is_refused_with_the_remedy(folder, shard):
    whole = shard.read_bytes()
    for cut, moved in ((0, 2 * BLOCK), (STRIDE, STRIDE + 2 * BLOCK)):  # the json comes last
        members = whole[moved : cut + STRIDE] + whole[cut:moved]
        shard.write_bytes(whole[:cut] + members + whole[cut + STRIDE :])
        line = complaint(folder) if cut else refusal(folder)
        assert str(shard) in line and "found member" in line and "in this order" in line
    shard.write_bytes(whole + bytes(BLOCK))
    assert "truncated or foreign" in refusal(folder) and "in this order" in refusal(folder)


def test_samples_of_other_shapes_are_refused(tmp_path):
    smaller = {"mean": (16, 4, 4), "logvar": (16, 4, 4)}
    others = ({"t5": (9, 30)}, {"clip": (15,)}, {"mean": (16, 6, 4)}, smaller, {"t5": (8, 28)})
    for number, other in enumerate(others):
        folder = tmp_path / str(number)
        shard_writer.write(folder, shard_damage.samples(2, layout=Layout({**LAYOUT.shapes, **other})), "some")
        message = refusal(folder)
        assert str(folder / "shard_000000.tar") in message
        # Where padding hides the difference from the size, the array's header tells.
        assert "truncated or foreign" in message or any(f"'shape': {other[name]}" in message for name in other)


def test_an_array_of_another_kind_is_refused_with_what_it_is_and_should_be(folder, shard):
    whole, damages = {"descr": "<u2", "fortran_order": False, "shape": LAYOUT.shapes["t5"]}, []
    others = [{"descr": kind} for kind in ("<f2", "<f4", "<i2", ">u2", "|O")]
    for other in (*others, {"fortran_order": True}, {"shape": (28, 9)}, {"shape": (1, 9, 28)}, {"shape": ()}):
        stream = io.BytesIO()
        np.lib.format.write_array_header_1_0(stream, whole | other)
        header = stream.getvalue()[10:].decode().strip()
        words = f"{shard}, sample 2, key some_00000002: t5 is {header!r}, want uint16 (9, 28)"
        damages.append((partial(overwrite, shard, position("t5", "npy", sample=2), stream.getvalue()), words))
    assert unnoticed(shard, damages, lambda: refusal(folder)) == []


def test_only_the_first_and_the_last_sample_are_read_on_opening(folder, shard):
    overwrite(shard, position("json", sample=1), bytes(BLOCK))
    stored = opened(folder)
    stored.read(0, LAYOUT.rows())
    with pytest.raises(BadSample):
        stored.read(1, LAYOUT.rows())
    places = {sample: position("json", sample=sample) for sample in (0, 2)}
    ends = [(partial(overwrite, shard, place, bytes(BLOCK)), f"sample {sample}") for sample, place in places.items()]
    assert unnoticed(shard, ends, lambda: refusal(folder)) == []


def test_a_file_truncated_after_opening_is_noticed(folder, shard):
    stored = opened(folder)
    for left in (STRIDE, STRIDE - 1, 0):
        os.truncate(shard, STRIDE + left)
        with pytest.raises(BadSample, match="sample 0: the file has changed since the start"):
            stored.read(0, LAYOUT.rows())
        for index in range(1 + left // STRIDE, PER_SHARD):
            with pytest.raises(BadSample, match=f"sample {index}: the file ends"):
                stored.read(index, LAYOUT.rows())
    assert stored.read(PER_SHARD, LAYOUT.rows()).key == "some_00000003"


def test_members_in_another_order_or_with_other_names_are_noticed(folder, shard):
    content = shard.read_bytes()
    starts = [*(position(name, sample=1) for name in MEMBERS), 2 * STRIDE]
    members = {name: content[start:stop] for name, start, stop in zip(MEMBERS, starts, starts[1:])}
    swapped = b"".join((members | {"mean": members["logvar"], "logvar": members["mean"]}).values())
    words = "found member 'some_00000001.logvar.bytes' where some_00000001.mean.bytes belongs"
    damages = [(partial(overwrite, shard, starts[0], swapped), words)]
    names = [(member, b"some_00000002.", "some_00000002.") for member in (*MEMBERS, "json")]
    names += [("json", name.ljust(100, b"\0"), "KEY.json") for name in (b"some.txt", b"json", b"some.JSON", b"")]
    for member, name, words in [*names, ("json", b"\xff\xfe.json", "no tar header")]:
        damages.append((partial(overwrite, shard, position(member, sample=1), name), words))
    assert unnoticed(shard, damages, lambda: complaint(folder)) == []


def test_a_json_that_is_no_object_or_has_no_usable_timestep_is_noticed(folder, shard):
    texts = ["", "{", "[]", '"key"', "null", "3", '{"key": "some_00000001", "timestep": }', "\0", '{"\udcff\udcfe": 1}']
    words = "some_00000001.json is not a JSON object"
    damages = [(partial(overwrite_json, shard, text), words) for text in texts]
    for timestep in ("3", 3.0, True, [3], {}, float("nan")):
        damages.append((partial(overwrite_json, shard, describe(timestep=timestep)), f"timestep {timestep!r}"))
    damages.append((partial(overwrite, shard, position("json", sample=1) + 124, b"00000001001\0"), "513 bytes"))
    assert unnoticed(shard, damages, lambda: complaint(folder)) == []


def test_what_a_json_may_leave_out(folder, shard):
    for content in ({}, {"timestep": None}, {"timestep": 7, "caption": None}):
        overwrite_json(shard, describe(**content))
        meta = opened(folder).read(1, LAYOUT.rows())
        assert meta == shards.Meta("some_00000001", content.get("timestep"), "")


def test_nan_and_infinity_are_noticed_wherever_they_are(folder, shard):
    damages = []
    for member in MEMBERS:
        count = LAYOUT.payload_bytes[member] // 2
        for value in (NAN, NAN | 0x8001, INF, MINUS_INF):
            for place in (0, count // 2, count - 1):
                words = f"key some_00000001: {member} holds NaN or infinite values"
                damages.append((partial(overwrite_value, shard, member, value, place), words))
    assert unnoticed(shard, damages, lambda: complaint(folder)) == []
    extremes, rows = [0x7F7F, 0xFF7F, 0x0001, 0x8000], LAYOUT.rows()  # the largest and the smallest values are taken
    for place, value in enumerate(extremes):
        overwrite_value(shard, "clip", value, place)
    opened(folder).read(1, rows)
    assert rows["clip"][:4].tolist() == extremes


def test_zeroed_headers_and_wrong_sizes_are_noticed(folder, shard):
    damages = []
    for member in (*MEMBERS, "json"):
        npy = "JSON" if member == "json" else f"{member} is '', want uint16"
        for part, count, words in (("tar", BLOCK, "no tar header"), ("npy", NPY_HEADER, npy)):
            damages.append((partial(overwrite, shard, position(member, part, sample=1), bytes(count)), words))
        for size in (b"00000000000\0", b"77777777777\0", b"-0000000001\0", b"\x80" + b"\xff" * 11, b"x" * 12):
            damages.append((partial(overwrite, shard, position(member, sample=1) + 124, size), ""))
    assert unnoticed(shard, damages, lambda: complaint(folder)) == []


def headers(sample: int) -> list[range]:
    """The positions of all bytes of a sample that are not payload or padding, stretch by stretch."""
    members = (position(member, "tar", sample) for member in MEMBERS)
    start = position("json", "tar", sample)
    return [range(start, start + 2 * BLOCK), *(range(begin, begin + BLOCK + NPY_HEADER) for begin in members)]


def read_as_written_or_bad(stored: ShardSet, index: int) -> bool:
    """Whether a sample reads, and then as it was written; anything but BadSample, even a warning, is an error."""
    read = LAYOUT.rows()
    try:
        with warnings.catch_warnings(action="error"):
            meta = stored.read(index, read)
    except BadSample as bad:
        assert str(stored.paths[0]) in str(bad) and "sample 1" in str(bad)
        return False
    assert same(read, WRITTEN[index]) and meta.key == f"some_{index:08d}"
    assert meta.timestep is None or type(meta.timestep) is int
    return True


@pytest.fixture
def bad_disk(monkeypatch):
    """Damage of the disk itself, which changes no time of a file."""
    monkeypatch.setattr(shards, "_stamp", lambda status: (status.st_size, 0))


def test_a_file_that_is_written_after_opening_is_noticed(folder, shard):
    """Also if the bytes of the sample that is read are sound."""
    stored = opened(folder)
    stored.read(0, LAYOUT.rows())
    overwrite_value(shard, "mean", 0, sample=1)
    for index in (0, 1):
        with pytest.raises(BadSample, match=f"sample {index}: the file has changed since the start; copy it again"):
            stored.read(index, LAYOUT.rows())
    assert stored.read(PER_SHARD, LAYOUT.rows()).key == "some_00000003"


def test_any_changed_byte_of_a_header_is_harmless_or_noticed(folder, shard, bad_disk):
    stored, whole, rng = opened(folder), shard.read_bytes(), random.Random(0)
    harmless = noticed = 0
    with shard.open("r+b", buffering=0) as file:
        for place in chain.from_iterable(headers(sample=1)):
            flipped = whole[place] ^ 1 << rng.randrange(8)
            for value in {flipped, rng.choice((*b"'\"({", rng.randrange(256)))} - {whole[place]}:
                os.pwrite(file.fileno(), bytes([value]), place)
                reads = read_as_written_or_bad(stored, 1)
                harmless, noticed = harmless + reads, noticed + (not reads)
            os.pwrite(file.fileno(), whole[place : place + 1], place)
    assert read_as_written_or_bad(stored, 1) and shard.read_bytes() == whole
    assert noticed > 1000 and harmless > 1000


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


def test_a_damaged_validation_sample_or_one_without_a_usable_timestep_stops_the_run(folder, shard):
    validation_batches(folder)
    for timestep in (8, -1, None, 10**30):
        overwrite_json(shard, describe(timestep=timestep))
        with pytest.raises(Fault, match=f"some_00000001 in {folder} has timestep {timestep}; want 0 to 7"):
            validation_batches(folder)
    overwrite_value(shard, "mean", NAN)
    with pytest.raises(Fault, match=r"bad validation sample: .*shard_000000\.tar, sample 1, key some_00000001: mean"):
        validation_batches(folder)


@pytest.mark.parametrize("skip_bad", [0, 1, 2])
def test_as_many_damaged_training_samples_are_skipped_as_allowed(skip_bad, folder, shard, shapes_dir, bad_disk):
    damaged = range(skip_bad + 1)
    cfg = config_for(folder, folder, shapes_dir / "empty_encodings", data__skip_bad=skip_bad, train__global_batch=COUNT)
    train_set = data.TrainSet(cfg, rank=0, size=1, pin=False)
    train_set.open()
    for sample in damaged[:skip_bad]:
        overwrite_value(shard, "mean", NAN, sample=sample)
    feed = train_set.feed(0)
    try:
        for _epoch in range(4):  # the same samples, met again, count once
            batch = feed.take()
            assert sorted(batch.rows["weight"]) == [0] * skip_bad + [1] * (COUNT - skip_bad)
            assert not any(batch.rows[name][batch.rows["weight"] == 0].any() for name in ("mean", "logvar"))
            feed.give_back(batch)
        assert sorted(train_set.skipped) == list(damaged[:skip_bad])
        overwrite_value(shard, "mean", NAN, sample=skip_bad)
        with pytest.raises(Fault, match=rf"mean holds NaN .*data\.skip_bad={skip_bad} allows no"):
            for _ in range(10):
                feed.give_back(feed.take())
    finally:
        feed.close()


@pytest.fixture
def empty(tmp_path, shapes_dir) -> Path:
    return Path(shutil.copytree(shapes_dir / "empty_encodings", tmp_path / "empty"))


def empty_refusal(folder: Path, name: str = "t5") -> str:
    with pytest.raises(Refusal) as refused:
        shards.read_empty(folder, LAYOUT)
    message = str(refused.value)
    assert str(folder / f"{name}_empty.npy") in message and "\n" not in message
    return message


def test_empty_encodings_are_read_in_each_form(empty):
    encoding, wrong = np.arange(9 * 28).reshape(9, 28) % 50, []
    for dtype, has_batch_axis in product((np.float16, np.float32, np.uint16), (True, False)):
        stored = shards.to_bf16_bits(encoding) if dtype == np.uint16 else encoding.astype(dtype)
        np.save(empty / "t5_empty.npy", stored[None] if has_batch_axis else stored)
        read = shards.from_bf16_bits(shards.read_empty(empty, LAYOUT)["t5"])
        wrong += [] if np.array_equal(read, encoding) else [(dtype, has_batch_axis)]
    assert wrong == []


def test_an_empty_encoding_of_another_kind_or_not_finite_in_bf16_or_absent_is_refused(empty):
    arrays = [np.zeros(shape, np.float16) for shape in ((28, 9), (2, 9, 28), ())]
    arrays += [np.zeros((9, 28), dtype) for dtype in (np.float64, np.int16, ">f4", "<U4", [("a", "<f4")])]
    for array in arrays:
        np.save(empty / "t5_empty.npy", array)
        assert f"{array.dtype} {array.shape}; want uint16, float16 or float32 (9, 28)" in empty_refusal(empty)
    np.save(empty / "t5_empty.npy", np.zeros((9, 28), np.float16))
    for value in (np.float16("nan"), np.float16("inf"), np.float32("-inf"), np.float32(3.4e38), np.uint16(NAN)):
        array = np.zeros(LAYOUT.shapes["clip"], value.dtype)
        array.flat[-1] = value
        np.save(empty / "clip_empty.npy", array)
        assert "NaN or infinite" in empty_refusal(empty, "clip")
    (empty / "clip_empty.npy").unlink()
    empty_refusal(empty, "clip")
    whole = (empty / "t5_empty.npy").read_bytes()
    for length in (0, 5, 100, NPY_HEADER, len(whole) - 1):
        (empty / "t5_empty.npy").write_bytes(whole[:length])
        empty_refusal(empty)


def test_the_header_of_an_empty_encoding_allocates_nothing_and_its_file_has_an_end(empty):
    path, shape = empty / "t5_empty.npy", LAYOUT.shapes["t5"]
    stored = np.arange(252, dtype=np.float32).reshape(shape)
    np.save(path, np.asfortranarray(stored))
    assert np.array_equal(shards.from_bf16_bits(shards.read_empty(empty, LAYOUT)["t5"]), stored)
    whole = path.read_bytes()
    for found in ("(9, 2800000000000)", "(-9, 28)", "(9, 28, 0)", "(True, 9, 28)", "9" * 40, "(" * 40, "'\x1b[2J'"):
        path.write_bytes(whole.replace(b"(9, 28), }", f"{found}, }}".encode()))
        assert "\x1b" not in empty_refusal(empty)
    path.write_bytes(whole + b"x" * 8)
    empty_refusal(empty)
    path.write_bytes(whole.ljust(2**20))
    assert "larger than" in empty_refusal(empty)
    path.unlink()
    os.mkfifo(path)
    assert "is not a regular file" in empty_refusal(empty)


def test_an_empty_encoding_is_never_unpickled(empty, tmp_path):
    trap = Payload(tmp_path / "sprung")
    with (empty / "t5_empty.npy").open("wb") as file:
        np.save(file, np.array([trap] * 3, dtype=object), allow_pickle=True)
    empty_refusal(empty)
    (empty / "t5_empty.npy").write_bytes(pickle.dumps(trap))
    empty_refusal(empty)
    assert not (tmp_path / "sprung").exists()
    pickle.loads((empty / "t5_empty.npy").read_bytes())
    assert (tmp_path / "sprung").exists()  # the trap works
