"""From the MLCommons' arrow folders to shards: every byte arrives, also after a stop, or the source is refused."""

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import signal
import tarfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import conftest
import numpy as np
import pytest
from conftest import MICRO
from run_files import contents
from shard_damage import LAYOUT, opened

from flux_ref import shards
from flux_ref.shards import MEMBERS
from tools.prepare import commands as prepare
from tools.prepare import mlcommons

pa = pytest.importorskip("pyarrow")
from arrow_files import ENCODINGS, Row, schema, write_arrow  # noqa: E402  (it needs pyarrow)

COUNT, PER_SHARD = 23, 4  # samples
FIRST, SECOND = "data-00000-of-00002.arrow", "data-00001-of-00002.arrow"


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def rows(count: int = COUNT, split: str = "train") -> list[Row]:
    """Random samples, with finite bf16 bits."""
    rng = np.random.default_rng(0)

    def encodings() -> Iterator[tuple[str, bytes]]:
        for member, shape in LAYOUT.shapes.items():
            bits = rng.integers(0, 0x7F80, shape, np.uint16) | rng.integers(0, 2, shape, np.uint16) << 15
            yield ENCODINGS[member], npy(bits)

    steps = [i % 8 if split == "val" else None for i in range(count)]
    return [{"__key__": f"{i:012d}", **dict(encodings()), "timestep": step} for i, step in enumerate(steps)]


@pytest.fixture
def train(tmp_path) -> Path:
    """A download: a folder of two files in odd batches, beside empty_encodings."""
    folder = tmp_path / "public" / "cc12m_preprocessed"
    write_arrow(folder / FIRST, rows()[:10], (3, 1, 5, 1))
    write_arrow(folder / SECOND, rows()[10:], (13,))
    draw = np.random.default_rng(5)
    empty = {name: draw.standard_normal((1, *LAYOUT.shapes[name])).astype(np.float16) for name in ("t5", "clip")}
    shards.write_empty(tmp_path / "public" / "empty_encodings", empty)
    return folder


@pytest.fixture
def val(train) -> Path:
    folder = train.with_name("coco_preprocessed")
    write_arrow(folder / "data-00000-of-00001.arrow", rows(16, "val"), (7, 9))
    return folder


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "output"


def words(source: Path, output: Path, split: str = "train", per_shard=PER_SHARD, workers=1) -> list:
    given = {"input": source, "output": output, "split": split, "per-shard": per_shard}
    given |= {"workers": workers, "config": MICRO}
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)]


def convert(*args: object, **options: object) -> None:
    """In this process. Raises: Refusal."""
    parser = argparse.ArgumentParser()
    mlcommons.add_arguments(parser)
    assert mlcommons.run(parser.parse_args(words(*args, **options))) == 0


def refusal(*args: object, **options: object) -> str:
    """The one line with which a conversion is refused."""
    return conftest.refusal(partial(convert, *args, **options))


def require_converted(output: Path, want: list[Row], split="train") -> None:
    """Each shard holds its rows, all bytes of all members, in order; and our reader says the same."""
    names = [f"shard_{i:06d}.tar" for i in range(-(-len(want) // PER_SHARD))]
    assert sorted(path.name for path in (output / split).iterdir()) == names
    found = []
    for number, name in enumerate(names, 1):
        with tarfile.open(output / split / name) as archive:
            found += [(entry.name, archive.extractfile(entry).read()) for entry in archive]
        assert len(found) == 5 * min(len(want), number * PER_SHARD)
    for i, row in enumerate(want):
        (name, text), *blobs = found[5 * i : 5 * i + 5]
        key = f"{split}_{i:08d}"
        timestep = {} if row["timestep"] is None else {"timestep": row["timestep"]}  # NVIDIA's reader takes no null
        assert name == f"{key}.json" and json.loads(text) == {"key": key} | timestep
        assert blobs == [(f"{key}.{member}.bytes", row[ENCODINGS[member]]) for member in MEMBERS]
    opened(output / split)


def test_both_splits_arrive_byte_for_byte_and_the_source_is_left_alone(train, val, output, capsys):
    before = contents(train.parent)
    for workers in (1, 3):
        folder = output / str(workers)
        convert(train, folder, workers=workers)
        out, err = capsys.readouterr()
        assert f"{folder}/train: {COUNT} samples" in out and f"{COUNT}/{COUNT}" in err and "samples/s" in err
        convert(val, folder, "val", workers=workers)
        require_converted(folder, rows())
        require_converted(folder, rows(16, "val"), "val")
        assert sorted(path.name for path in folder.iterdir()) == ["empty_encodings", "train", "val"]
    assert contents(train.parent) == before and len(list(output.parent.iterdir())) == 2


def test_sets_of_other_forms_are_taken_also_what_datasets_saves(train, output):
    datasets = pytest.importorskip("datasets")
    want = rows()
    only, lz4 = "data-00000-of-00001.arrow", pa.ipc.IpcWriteOptions(compression="lz4")
    source = train.with_name("source")
    forms = [
        lambda: write_arrow(source / only, want, (5, 0, 18), schema(binary=pa.large_binary())),
        lambda: write_arrow(source / only, want, (1,) * COUNT, schema(timestep=pa.null())),
        lambda: write_arrow(source / only, want, kind=schema(without=("timestep", "__key__")), options=lz4),
        lambda: [write_arrow(source / FIRST, [], ()), write_arrow(source / SECOND, want)],
        lambda: datasets.Dataset.from_list(want).save_to_disk(str(source), num_shards=3),
    ]
    for number, write in enumerate(forms):
        shutil.rmtree(source, ignore_errors=True)
        write()
        convert(source, output / str(number))
        require_converted(output / str(number), want)


def test_empty_encodings_become_bf16_bits_and_are_needed_once_and_only_for_training(train, val, output, capsys):
    source = train.with_name("empty_encodings")
    want = shards.read_empty(source, LAYOUT)
    source.rename(train.with_name("away"))
    assert f"{source} does not exist, and training needs it; put" in refusal(train, output)
    assert not output.exists()
    convert(val, output, "val")
    assert f"note: {source} does not exist" in capsys.readouterr().out
    train.with_name("away").rename(source)
    convert(train, output)
    for member in ("t5", "clip"):
        found = np.load(output / "empty_encodings" / f"{member}_empty.npy")
        assert found.dtype == np.uint16 and np.array_equal(found, want[member])


# Whatever ends it, the same command goes on


@contextlib.contextmanager
def struck(key: str, strike) -> Iterator[None]:
    """Writing the sample of this key goes wrong."""
    add = shards.add

    def write(shard, own, *given):
        if own == key:
            strike()
        time.sleep(0.01)
        add(shard, own, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "add", write)
        yield


def no_space() -> None:
    raise OSError(28, "No space left on device")


def test_an_error_or_ctrl_c_amid_a_shard_is_one_line_and_only_missing_shards_are_made_again(train, output, capsys):
    args, growing = ["mlcommons", *words(train, output, workers=2)], output / "train.partial" / "set"
    for key, strike, code in (
        ("train_00000009", lambda: os.kill(os.getpid(), signal.SIGINT), 130),
        ("train_00000021", no_space, 3),
    ):
        with struck(key, strike):
            assert prepare.main(args) == code
        err = capsys.readouterr().err
        assert "Traceback" not in err and ("No space left" in err) == (code == 3)
        assert not (output / "train").exists() and not list(growing.glob(".*"))
    kept = {path.name: path.stat().st_mtime_ns for path in growing.iterdir()}
    assert 0 < len(kept) < 6
    (growing / ".shard_000000.tar.0.flux_ref_partial").write_bytes(b"x")  # as a kill leaves it
    assert "was begun from another input or with other options; remove it" in refusal(train, output, per_shard=5)
    convert(train, output)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in (output / "train").iterdir()}.items()
    require_converted(output, rows())
    assert "train exists; remove it" in refusal(train, output)


# What is refused before anything is written


T5 = np.zeros(LAYOUT.shapes["t5"], np.uint16)
ARRAYS = (T5.astype(np.float16), T5.astype(">u2"), T5[None], T5.T.copy(), np.asfortranarray(T5))
BLOBS = (*map(npy, ARRAYS), npy(T5)[:-1], npy(T5) + b"\0", npy(T5)[:50], b"", None)


def test_sources_that_are_damaged_or_of_another_model_are_refused_before_anything_is_written(train, output):
    whole, step = (train / FIRST).read_bytes(), {"timestep": 3}
    with pa.memory_map(str(train / FIRST)) as file:
        ends = [file.tell() for _ in pa.ipc.open_stream(file)]  # just behind each batch

    def t5(blob: bytes | None) -> None:
        write_arrow(train / SECOND, [rows()[0] | {"t5_encodings": blob}, *rows()[11:]])

    def columns(kind: pa.Schema) -> None:
        write_arrow(train / FIRST, [], kind=kind)

    refused = [
        *((partial((train / FIRST).write_bytes, whole[:end]), "is truncated") for end in (0, 9, *ends, len(whole) - 8)),
        *((partial((train / FIRST).write_bytes, other), "is truncated") for other in (whole + bytes(8), b"PAR1" * 99)),
        *((partial(t5, blob), r"row 0: t5_encodings \(.* of uint16 \(9, 28\) in C order") for blob in BLOBS),
        (partial(columns, schema(without=("clip_encodings",))), "want one column clip_encodings of binary"),
        (partial(columns, schema().append(pa.field("mean", pa.binary()))), "want one column mean of binary"),
        (lambda: write_arrow(train / FIRST, [rows()[0] | step]), "row 0: timestep 3, want none; is this the train"),
        ((train / FIRST).unlink, "holds 1 files data-.*; download all"),
        (lambda: [path.unlink() for path in train.iterdir()], "holds 0 files data-"),
    ]
    shutil.copytree(train, train.with_name("whole"))
    wrong = []
    for number, (change, pattern) in enumerate(refused):
        change()
        message = refusal(train, output)
        wrong += [(number, message)] * (str(train) not in message or not re.search(pattern, message))
        shutil.rmtree(train)
        shutil.copytree(train.with_name("whole"), train)
    assert wrong == [] and not output.exists()


def test_what_is_wrong_behind_the_first_row_ends_the_conversion(train, val, output):
    content = (train / SECOND).read_bytes()
    place = content.index(rows()[-2]["mean"])
    (train / SECOND).write_bytes(content[:place] + b"\x00" + content[place + 1 :])
    assert f"{train / SECOND}, row 11: mean (" in refusal(train, output)
    for timestep in (None, 8, -1):
        write_arrow(val / "data-00000-of-00001.arrow", [*rows(9, "val"), rows(1)[0] | {"timestep": timestep}])
        assert f"row 9: timestep {timestep}, want 0 to 7; is this the val" in refusal(val, output / "1", "val")
        shutil.rmtree(output / "1" / "val.partial")


def test_the_benchmarks_sizes_are_the_default(train, output, capsys):
    assert prepare.main(["mlcommons", f"--input={train}", f"--output={output}", "--split=train"]) == 2
    assert "no .npy file of uint16 (256, 4096)" in capsys.readouterr().err and not output.exists()
