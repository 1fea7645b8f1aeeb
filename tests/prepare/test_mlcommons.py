"""From the MLCommons' arrow folders to shards: every byte arrives, also after a stop, or the source is refused."""

import contextlib
import io
import json
import os
import shutil
import signal
import tarfile
import threading
import time
from functools import partial

import numpy as np
import pytest
from conftest import MICRO, the_line
from run_files import contents
from shard_damage import LAYOUT, opened

from flux_ref import dataset
from flux_ref.dataset import MEMBERS
from tools.prepare import __main__ as prepare
from tools.prepare import mlcommons

pa = pytest.importorskip("pyarrow")
from arrow_files import ENCODINGS, schema, write_arrow  # noqa: E402  (it needs pyarrow)

COUNT, PER_SHARD = 23, 4  # samples
FIRST, SECOND = "data-00000-of-00002.arrow", "data-00001-of-00002.arrow"


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def rows(count=COUNT, split="train"):
    """Random samples, with finite bf16 bits."""
    rng = np.random.default_rng(0)
    found = []
    for i in range(count):
        row = {"__key__": f"{i:012d}", "timestep": i % 8 if split == "val" else None}
        for member, shape in LAYOUT.shapes.items():
            row[ENCODINGS[member]] = npy(rng.integers(0, 0x7F80, shape, np.uint16))
        found.append(row)
    return found


@pytest.fixture
def train(tmp_path):
    """A download: a folder of two files in odd batches, beside empty_encodings."""
    folder = tmp_path / "public" / "cc12m_preprocessed"
    write_arrow(folder / FIRST, rows()[:10], (3, 1, 5, 1))
    write_arrow(folder / SECOND, rows()[10:], (13,))
    draw = np.random.default_rng(5)
    empty = {name: draw.standard_normal((1, *LAYOUT.shapes[name])).astype(np.float16) for name in ("t5", "clip")}
    dataset.write_empty(tmp_path / "public" / "empty_encodings", empty)
    return folder


@pytest.fixture
def val(train):
    folder = train.with_name("coco_preprocessed")
    write_arrow(folder / "data-00000-of-00001.arrow", rows(16, "val"), (7, 9))
    return folder


@pytest.fixture
def output(tmp_path):
    return tmp_path / "output"


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(mlcommons, "PER_SHARD", PER_SHARD)


def command(source, output, split="train"):
    options = {"input": source, "output": output, "split": split, "config": MICRO}
    return ["mlcommons", *(f"--{name}={value}" for name, value in options.items())]


def convert(*args):
    assert prepare.main(command(*args)) == 0


@pytest.fixture
def refused(capsys):
    """refused(...): the one line with which a conversion is refused."""

    def line(*args):
        capsys.readouterr()
        assert prepare.main(command(*args)) == 2
        return the_line(capsys.readouterr().err, "prepare")

    return line


def require_converted(output, want, split="train"):
    """Each shard holds its rows, all bytes of all members, in order; and our reader says the same."""
    found = []
    for number in range(-(-len(want) // PER_SHARD)):
        with tarfile.open(output / split / f"shard_{number:06d}.tar") as archive:
            found += [(entry.name, archive.extractfile(entry).read()) for entry in archive]
    assert len(found) == 5 * len(want) and len(list((output / split).iterdir())) == number + 1
    for i, row in enumerate(want):
        (name, text), *blobs = found[5 * i : 5 * i + 5]
        key = f"{split}_{i:08d}"
        timestep = {} if row["timestep"] is None else {"timestep": row["timestep"]}  # NVIDIA's reader takes no null
        assert name == f"{key}.json" and json.loads(text) == {"key": key} | timestep
        assert blobs == [(f"{key}.{member}.bytes", row[ENCODINGS[member]]) for member in MEMBERS]
    assert len(opened(output / split)) == len(want)


def test_both_splits_arrive_byte_for_byte_and_the_source_is_left_alone(train, val, output, capsys):
    before = contents(train.parent)
    want = dataset.read_empty(train.with_name("empty_encodings"), LAYOUT)
    convert(train, output)
    out, err = capsys.readouterr()
    assert f"{output}/train: {COUNT} samples" in out and "6/6" in err and "shards/s" in err
    convert(val, output, "val")
    require_converted(output, rows())
    require_converted(output, rows(16, "val"), "val")
    assert sorted(path.name for path in output.glob("[!.]*")) == ["empty_encodings", "train", "val"]
    for member in ("t5", "clip"):
        found = np.load(output / "empty_encodings" / f"{member}_empty.npy")
        assert found.dtype == np.uint16 and np.array_equal(found, want[member])
    assert contents(train.parent) == before


def test_sets_of_other_forms_are_taken_also_what_datasets_saves(train, output):
    datasets = pytest.importorskip("datasets")
    want = rows()
    only, lz4 = "data-00000-of-00001.arrow", pa.ipc.IpcWriteOptions(compression="lz4")
    source = train.with_name("source")
    forms = [
        lambda: write_arrow(source / only, want, (5, 0, 18), schema(pa.null(), pa.large_binary())),
        lambda: write_arrow(source / only, want, None, schema(without=("timestep", "__key__")), options=lz4),
        lambda: [write_arrow(source / FIRST, []), write_arrow(source / SECOND, want)],
        lambda: datasets.Dataset.from_list(want).save_to_disk(str(source), num_shards=3),
    ]
    for number, write in enumerate(forms):
        shutil.rmtree(source, ignore_errors=True)
        write()
        convert(source, output / str(number))
        require_converted(output / str(number), want)


def test_empty_encodings_are_needed_once_and_only_for_training(train, val, output, refused):
    source = train.with_name("empty_encodings")
    away = source.rename(train.with_name("away"))
    assert f"{source}/t5_empty.npy: [Errno 2] No such file" in refused(train, output) and not output.exists()
    convert(val, output, "val")
    away.rename(source)
    convert(train, output)


# Whatever ends it, the same command goes on


@contextlib.contextmanager
def struck(key, strike):
    """Writing the sample of this key goes wrong."""
    add = dataset.add

    def write(file, meta, members):
        if meta.key == key:
            strike()
        time.sleep(0.01)
        add(file, meta, members)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "add", write)
        yield


def no_space():
    raise OSError(28, "No space left on device")


def test_an_error_or_ctrl_c_amid_a_shard_is_one_line_and_only_missing_shards_are_made_again(
    train, output, capsys, refused
):
    growing = output / "train.partial" / "set"
    interrupt = partial(os.kill, os.getpid(), signal.SIGINT)
    for key, strike, code in (("train_00000009", interrupt, 130), ("train_00000021", no_space, 3)):
        with struck(key, strike):
            assert prepare.main(command(train, output)) == code
            for thread in threading.enumerate():  # the end of the process would end them
                if thread.name.startswith("ThreadPool"):
                    thread.join()
        assert ("No space left" in the_line(capsys.readouterr().err, "prepare")) == (code == 3)
        assert not (output / "train").exists() and not list(growing.glob(".*"))
    kept = {path.name: path.stat().st_mtime_ns for path in growing.iterdir()}
    assert 0 < len(kept) < 6
    (growing / ".shard_000000.tar.0.flux_ref_partial").write_bytes(b"x")  # as a kill leaves it
    write_arrow(train / SECOND, rows()[11:])
    assert "was begun from another input or with other options; remove it" in refused(train, output)
    write_arrow(train / SECOND, rows()[10:], (13,))
    convert(train, output)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in (output / "train").iterdir()}.items()
    require_converted(output, rows())


# What is refused before anything is written


T5 = np.zeros(LAYOUT.shapes["t5"], np.uint16)
ARRAYS = (T5.astype(np.float16), T5.astype(">u2"), T5[None], T5.T.copy(), np.asfortranarray(T5))
BLOBS = (*map(npy, ARRAYS), npy(T5)[:-1], npy(T5)[:50], b"", None)


def test_sources_that_are_damaged_or_of_another_model_are_refused_before_anything_is_written(train, output, refused):
    whole = (train / FIRST).read_bytes()
    with pa.memory_map(str(train / FIRST)) as file:
        ends = [file.tell() for _ in pa.ipc.open_stream(file)]  # just behind each batch
    cut = [whole[:end] for end in (0, 9, *ends, len(whole) - 8)]
    step = {"timestep": 3}
    write = partial(write_arrow, train / FIRST)
    cases = [
        *((partial((train / FIRST).write_bytes, content), "is truncated") for content in (*cut, whole + bytes(8))),
        *((partial(write, [rows()[0] | {"t5_encodings": blob}]), "row 0: t5 is no .npy file") for blob in BLOBS),
        (partial(write, rows(1), None, schema(without=("clip_encodings",))), "want one column clip_encodings of bin"),
        (partial(write, [rows()[0] | step]), "row 0: timestep 3, want one of [None]; is this the train"),
        ((train / FIRST).unlink, "holds 1 files data-*.arrow, which are not all of one set; download all"),
    ]
    wrong = []
    for change, words in cases:
        change()
        message = refused(train, output)
        wrong += [(words, message)] * (str(train) not in message or words not in message)
    assert wrong == [] and not output.exists()


def test_what_is_wrong_behind_the_first_row_ends_the_conversion(train, val, output, refused):
    content = (train / SECOND).read_bytes()
    place = content.index(rows()[-2]["mean"])
    (train / SECOND).write_bytes(content[:place] + b"\x00" + content[place + 1 :])
    assert f"{train / SECOND}, row 11: mean is no .npy file" in refused(train, output)
    for timestep in (None, 8):
        write_arrow(val / "data-00000-of-00001.arrow", [*rows(9, "val"), rows(1)[0] | {"timestep": timestep}])
        assert f"row 9: timestep {timestep}, want one of [0, 1, 2, 3, 4, 5, 6, 7]; is this the val" in refused(
            val, output / "1", "val"
        )
        shutil.rmtree(output / "1" / "val.partial")
