"""From the MLCommons' arrow folders to shards: every byte arrives, whatever kills the conversion; or it is refused."""

import argparse
import io
import json
import os
import random
import re
import shutil
import signal
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from unittest.mock import Mock

import conftest
import numpy as np
import pytest
from conftest import MICRO
from killing import Job, send
from run_files import contents
from shard_damage import LAYOUT, opened

from flux_ref import config
from flux_ref.errors import Refusal
from flux_ref.formats import files, shard_writer, shards
from flux_ref.formats.shards import MEMBERS, Layout
from tools.prepare import commands as prepare
from tools.prepare import mlcommons

pa = pytest.importorskip("pyarrow")
from arrow_files import ENCODINGS, Row, schema, write_arrow, write_state  # noqa: E402  (it needs pyarrow)

FULL = shards.layout(config.Config().model)
COUNT, PER_SHARD = 23, 4  # samples


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@cache
def rows(count: int = COUNT, split: str = "train", seed: int = 0, full: bool = False) -> list[Row]:
    """Random samples, with finite bf16 bits."""
    rng = np.random.default_rng(seed)

    def encodings() -> Iterator[tuple[str, bytes]]:
        for member, shape in (FULL if full else LAYOUT).shapes.items():
            bits = rng.integers(0, 0x7F80, shape, np.uint16) | rng.integers(0, 2, shape, np.uint16) << 15
            yield ENCODINGS[member], npy(bits)

    return [
        {"__key__": f"{i:012d}", **dict(encodings()), "timestep": i % 8 if split == "val" else None}
        for i in range(count)
    ]


def write_empty(folder: Path, layout: Layout = LAYOUT) -> None:
    """As the public ones are: float16, with a batch axis."""
    draw = np.random.default_rng(5)
    shapes = {member: (1, *layout.shapes[member]) for member in ("t5", "clip")}
    shard_writer.write_empty(folder, {m: draw.standard_normal(s).astype(np.float16) for m, s in shapes.items()})


@pytest.fixture
def public(tmp_path) -> Path:
    """A download: cc12m_preprocessed of two files in odd batches, coco_preprocessed, empty_encodings."""
    train, val = tmp_path / "public" / "cc12m_preprocessed", tmp_path / "public" / "coco_preprocessed"
    write_arrow(train / "data-00000-of-00002.arrow", rows()[:10], (3, 1, 5, 1))
    write_arrow(train / "data-00001-of-00002.arrow", rows()[10:], (13,))
    write_state(train, ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"])
    write_arrow(val / "data-00000-of-00001.arrow", rows(16, "val", seed=1), (7, 9))
    write_state(val, ["data-00000-of-00001.arrow"])
    write_empty(tmp_path / "public" / "empty_encodings")
    return tmp_path / "public"


@pytest.fixture
def train(public) -> Path:
    return public / "cc12m_preprocessed"


@pytest.fixture
def output(tmp_path) -> Path:
    return tmp_path / "output"


def convert(
    source: Path, output: Path, split: str = "train", expect: int = 0, per_shard: int = PER_SHARD, workers=1
) -> int:
    """Convert in this process; returns the number of samples that the set then has."""
    given = {"input": source, "output": output, "split": split, "expect-samples": expect, "per-shard": per_shard}
    given |= {"workers": workers, "config": MICRO}
    assert mlcommons.run(arguments(*(word for name, value in given.items() for word in (f"--{name}", value)))) == 0
    return len(shards.ShardSet(output / split, LAYOUT))


def arguments(*args: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    mlcommons.add_arguments(parser)
    return parser.parse_args(list(map(str, args)))


def refusal(*args: object, **kwargs: object) -> str:
    """The one line with which a conversion is refused."""
    return conftest.refusal(partial(convert, *args, **kwargs))


def require_converted(output: Path, want: list[Row], split="train", per_shard=PER_SHARD, layout=LAYOUT) -> None:
    """Each shard holds its rows, all bytes of all members, in order; and our reader says the same."""
    folder = output / split
    shard_names = [f"shard_{i:06d}.tar" for i in range(-(-len(want) // per_shard))]
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", *shard_names]
    found = []
    for number, name in enumerate(shard_names, 1):
        with tarfile.open(folder / name) as archive:
            found += [(entry.name, archive.extractfile(entry).read()) for entry in archive]
        assert len(found) == 5 * min(len(want), number * per_shard)
    for i, row in enumerate(want):
        (name, text), *blobs = found[5 * i : 5 * i + 5]
        key = f"{split}_{i:08d}"
        assert name == f"{key}.json" and json.loads(text) == {"key": key, "timestep": row["timestep"]}
        assert blobs == [(f"{key}.{member}.bytes", row[ENCODINGS[member]]) for member in MEMBERS]
    opened(folder, layout)


# What is taken


def test_both_splits_arrive_byte_for_byte_and_the_source_is_left_alone(public, output, capsys):
    before = contents(public)
    for workers in (1, 3):
        folder = output / str(workers)
        assert convert(public / "cc12m_preprocessed", folder, expect=COUNT, workers=workers) == COUNT
        out, err = capsys.readouterr()
        assert f"{folder}/train: {COUNT} samples" in out and f"{COUNT}/{COUNT}" in err and "samples/s" in err
        assert convert(public / "coco_preprocessed", folder, "val", expect=16, workers=workers) == 16
        require_converted(folder, rows())
        require_converted(folder, rows(16, "val", seed=1), "val")
        assert sorted(path.name for path in folder.iterdir()) == ["empty_encodings", "train", "val"]
    assert contents(public) == before and len(list(output.parent.iterdir())) == 2


def test_training_sets_of_many_forms_are_taken(public, output):
    want = rows()
    lz4 = pa.ipc.IpcWriteOptions(compression="lz4")
    forms = (  # arguments of write_arrow, by file
        {"data-0.arrow": (want, (5, 18), schema(binary=pa.large_binary()))},
        {"data-0.arrow": (want, (1,) * COUNT, schema(timestep=pa.null()))},
        {"data-0.arrow": (want, (COUNT,), schema(without=("timestep", "__key__")))},
        {"data-0.arrow": ([], ()), "data-1.arrow": (want[:6], (0, 6, 0)), "data-2.arrow": (want[6:],)},
        {"data-b.arrow": (want[:9],), "data-a.arrow": (want[9:],), "data-c.arrow": (want,)},
    )
    for number, form in enumerate(forms):
        source = public / f"form_{number}"
        for name, parts in form.items():
            write_arrow(source / name, *parts, options=lz4 if len(parts) == 1 else None)
        if "data-b.arrow" in form:
            write_state(source, ["data-b.arrow", "data-a.arrow"])
        convert(source, output / str(number), expect=COUNT)
        require_converted(output / str(number), want)


def test_what_datasets_saves_is_taken(public, output):
    datasets = pytest.importorskip("datasets")
    kinds = {"__key__": "string"} | dict.fromkeys(ENCODINGS.values(), "binary") | {"timestep": "int32"}
    features = datasets.Features({name: datasets.Value(kind) for name, kind in kinds.items()})
    for split in ("train", "val"):
        want = rows(29, split)
        made = datasets.Dataset.from_list(want, features=features)
        made.save_to_disk(str(public / split), num_shards=3)
        assert (public / split / "state.json").exists()
        convert(public / split, output, split, expect=29)
        require_converted(output, want, split)


def test_empty_encodings_become_bf16_bits_and_are_needed_once_and_only_for_training(public, output, capsys):
    source = public / "empty_encodings"
    train, val = public / "cc12m_preprocessed", public / "coco_preprocessed"
    want = shards.read_empty(source, LAYOUT)
    content = (source / "clip_empty.npy").read_bytes()
    (source / "clip_empty.npy").write_bytes(content[:-1])
    assert str(source / "clip_empty.npy") in refused(train, output)
    (source / "clip_empty.npy").write_bytes(content)
    source.rename(public / "away")
    assert f"{source} does not exist, and training needs it; put" in refused(train, output)
    convert(val, output / "1", "val")
    assert f"note: {source} does not exist" in capsys.readouterr().out
    assert not (output / "1" / "empty_encodings").exists()
    (public / "away").rename(source)
    convert(val, output, "val")
    shutil.rmtree(source)
    convert(train, output)
    for member in ("t5", "clip"):
        found = np.load(output / "empty_encodings" / f"{member}_empty.npy")
        assert found.dtype == np.uint16 and np.array_equal(found, want[member])


def test_two_conversions_into_one_folder_do_not_meet(public, output, monkeypatch):
    """The second one begins and ends while the first one writes empty_encodings."""
    save, begun = np.save, []

    def saved(*args: object) -> None:
        begun.append(args)
        if len(begun) == 1:
            convert(public / "coco_preprocessed", output, "val")
        save(*args)

    monkeypatch.setattr(np, "save", saved)
    convert(public / "cc12m_preprocessed", output)
    require_converted(output, rows())
    require_converted(output, rows(16, "val", seed=1), "val")
    assert sorted(path.name for path in output.iterdir()) == ["empty_encodings", "train", "val"]
    shards.read_empty(output / "empty_encodings", LAYOUT)


# The command


def test_the_benchmarks_counts_and_sizes_are_the_defaults(train, public, output):
    for split, folder, count in (("train", train, 1_099_776), ("val", public / "coco_preprocessed", 29_696)):
        args = ("--input", folder, "--output", output, "--split", split)
        with pytest.raises(Refusal, match=r"t5_encodings .* is no \.npy file of uint16 \(256, 4096\)"):
            mlcommons.run(arguments(*args))
        with pytest.raises(Refusal, match=f"should have {count}"):
            mlcommons.run(arguments(*args, "--config", MICRO))
    assert not output.exists()


# Whatever ends it, the same command goes on


PROGRAM = """
import sys, time
from flux_ref.formats.shard_writer import ShardWriter
from tools.prepare import commands

def add_slowly(*args):
    time.sleep(0.02)
    add(*args)

add, ShardWriter.add = ShardWriter.add, add_slowly
sys.exit(commands.main(["mlcommons", *sys.argv[1:]]))
"""


def test_a_conversion_that_is_killed_goes_on_with_the_missing_shards(public, output):
    many, growing = rows(120), output / "train.partial"
    write_arrow(public / "many" / "data-0.arrow", many[:71], (30, 1, 40))
    write_arrow(public / "many" / "data-1.arrow", many[71:])
    program = output.with_name("program.py")
    program.write_text(PROGRAM)
    args = ("--input", public / "many", "--output", output, "--split", "train", "--config", MICRO)
    with Job(output.with_name("log"), program, *args, "--expect-samples=0", "--per-shard=2", ranks=0) as job:
        assert job.until(lambda: len(list(growing.glob("*.tar"))) > 1)
        assert "in use by another job" in refusal(public / "many", output, per_shard=2)
        send(job.process.pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL, job.said
    kept = {path.name: path.stat().st_mtime_ns for path in growing.glob("*.tar")}
    assert len(kept) < 60 and not (output / "train").exists()
    (growing / f".{min(kept)}{files.CLAIM}").touch()  # as of a kill just after a shard got its name
    convert(public / "many", output, per_shard=2)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in (output / "train").iterdir()}.items()
    require_converted(output, many, per_shard=2)


def test_an_error_or_ctrl_c_amid_a_shard_ends_all_threads_with_one_line(train, output, capsys, monkeypatch):
    args = ["--input", train, "--output", output, "--split", "train", "--config", MICRO, "--expect-samples", "0"]
    args = ["mlcommons", *map(str, args), "--per-shard", str(PER_SHARD), "--workers", "2"]
    add, full = shard_writer.ShardWriter.add, OSError(28, "No space left on device")
    ctrl_c = partial(os.kill, os.getpid(), signal.SIGINT)
    for last, strike, code in (("train_00000009", ctrl_c, 130), ("train_00000021", Mock(side_effect=full), 3)):

        def struck(shard, key, *given, last=last, strike=strike):
            if key == last:
                strike()
            time.sleep(0.01)
            add(shard, key, *given)

        with monkeypatch.context() as patch:
            patch.setattr(shard_writer.ShardWriter, "add", struck)
            assert prepare.main(args) == code
        err = capsys.readouterr().err
        assert "Traceback" not in err and ("No space left" in err) == (code == 3)
        assert not [thread for thread in threading.enumerate() if "PoolExecutor" in thread.name]
        assert not list((output / "train.partial").glob(".*"))
        assert list((output / "train.partial").glob("*.tar")) and not (output / "train").exists()
    convert(train, output)
    require_converted(output, rows())


# What is refused before anything is written


def test_a_conversion_goes_on_with_its_own_plan_only(train, output):
    convert(train, output)
    assert f"{output}/train exists; remove it" in refusal(train, output)
    begun, second = (output / "train").rename(output / "train.partial"), train / "data-00001-of-00002.arrow"
    (begun / "shard_000003.tar").unlink()
    before, content = contents(begun), second.read_bytes()
    assert f"{begun} was begun otherwise: per_shard was 4, is 5; remove" in refusal(train, output, per_shard=5)
    write_arrow(second, rows()[11:], (12,))
    assert "data-00001-of-00002.arrow was [" in (message := refusal(train, output)) and ", 13], is [" in message
    second.write_bytes(content)
    assert contents(begun) == before
    for plan in ("", "{", "[]", '{"split": "train"}'):
        (begun / "plan.json").write_text(plan)
        assert f"{begun} was begun otherwise: its plan.json is damaged" in refusal(train, output)
    (begun / "plan.json").write_bytes(before["plan.json"])
    convert(train, output)
    require_converted(output, rows())


def refused(source: Path, output: Path, *args: object, **kwargs: object) -> str:
    """As refusal, of what is found out before anything is written."""
    message = refusal(source, output, *args, **kwargs)
    assert not output.exists()
    return message


FIRST, SECOND = "data-00000-of-00002.arrow", "data-00001-of-00002.arrow"
T5 = np.zeros(LAYOUT.shapes["t5"], np.uint16)
ARRAYS = (T5.astype(np.float16), T5.astype(np.int16), T5.astype(">u2"), T5[None], T5.T.copy(), T5[:-1])
BLOBS = (*map(npy, ARRAYS), npy(np.asfortranarray(T5)), npy(T5)[:-1], npy(T5) + b"\0", npy(T5)[:50], b"", None)


def state_of(text: str) -> Callable[[Path], object]:
    return lambda train: (train / "state.json").write_text(text)


def listing(*names: object) -> Callable[[Path], None]:
    return lambda train: write_state(train, names)


def columns(kind: pa.Schema) -> Callable[[Path], None]:
    """The first file has these columns and no row."""
    return lambda train: write_arrow(train / FIRST, [], kind=kind)


def t5_of_the_11th_row(blob: bytes | None) -> Callable[[Path], None]:
    return lambda train: write_arrow(train / SECOND, [rows()[0] | {"t5_encodings": blob}, *rows()[11:]])


REFUSED = [  # what is done to the source, and a pattern of the refusal
    *(
        (state_of(text), "state.json (is damaged|is no JSON|holds no JSON)")
        for text in ("", "{", "[]", "{}", '{"_data_files": 3}', '{"_data_files": ["a.arrow"]}')
    ),
    *(
        (listing(FIRST, name), f"state.json lists {re.escape(repr(name))}, which is no name of an arrow file")
        for name in ("../secret.arrow", "/secret.arrow", "..", "", "a\\b.arrow", "a\0.arrow", "a.txt", 3, None)
    ),
    (listing(FIRST, SECOND, "none.arrow"), "/none.arrow is missing"),
    *(
        (listing(*names), "such as data-0000[01]-of-0000.*; download all of one set")
        for names in (("data-00000-of-00003.arrow", SECOND), [SECOND], [FIRST], [FIRST] * 2, [FIRST, SECOND, SECOND])
    ),
    (columns(schema(without=("clip_encodings",))), "want one column clip_encodings of binary; the columns are __key__"),
    (columns(schema(without=("mean",)).append(pa.field("mean", pa.int64()))), "one column mean of binary"),
    (columns(schema().append(pa.field("t5_encodings", pa.binary()))), "one column t5_encodings of binary"),
    *((t5_of_the_11th_row(blob), r"row 0: t5_encodings \(.* of uint16 \(9, 28\) in C order") for blob in BLOBS),
    (lambda train: files.remove(train), "holds neither state.json"),
]


def test_sources_that_are_damaged_or_of_another_model_are_refused_before_anything_is_written(train, output):
    whole = train.rename(train.with_name("whole"))
    wrong = []
    for number, (change, words) in enumerate(REFUSED):
        files.remove(train)
        shutil.copytree(whole, train)
        change(train)
        message = refused(train, output)
        wrong += [(number, message)] * (str(train) not in message or not re.search(words, message))
    assert wrong == []


def test_files_that_are_cut_or_of_other_kinds_are_refused(train, output):
    path = train / FIRST
    whole, draw = path.read_bytes(), random.Random(0)
    with pa.memory_map(str(path)) as file:
        ends = [file.tell() for _ in pa.ipc.open_stream(file)]  # just behind each batch
    ends += [0, 4, 8, *(len(whole) - n for n in (1, 4, 8, 9)), *(draw.randrange(len(whole)) for _ in range(9))]
    with pa.ipc.new_file(str(path), schema()) as file:
        file.write_table(pa.Table.from_pylist(rows(), schema=schema()))
    longer = [whole + junk for junk in (b"\0" * 8, b"x", b"\xff\xff\xff\xff\0\0\0\0")]
    for content in (*(whole[:end] for end in ends), *longer, path.read_bytes(), b"PAR1" * 99, draw.randbytes(5000)):
        path.write_bytes(content)
        message = refused(train, output)
        assert f"{path} is " in message and "truncated" in message


def test_what_is_wrong_behind_the_first_row_is_found_while_it_is_converted(train):
    first, second = train / "data-00000-of-00002.arrow", train / "data-00001-of-00002.arrow"
    files, content = mlcommons._inspect(train, "train", LAYOUT), second.read_bytes()
    place = content.index(rows()[-2]["mean"])
    second.write_bytes(content[:place] + b"\x00" + content[place + 1 :])
    write_arrow(first, rows()[:9], (9,))
    for wanted, words in (
        (range(20, 23), f"{second}, row 11: mean ("),
        (range(8, 12), f"{first} had 10 rows and now has 9"),
    ):
        with pytest.raises(Refusal, match=re.escape(words)):
            list(mlcommons._samples(files, wanted, "train", LAYOUT))


# Timesteps and counts


def test_validation_needs_the_eight_timesteps_and_training_none(public, output):
    train, val, content = public / "cc12m_preprocessed", public / "coco_preprocessed", rows(16, "val", seed=1)
    assert "row 0: timestep 0, want none; is this the train split?" in refused(val, output, "train")
    assert "row 0: timestep None, want 0 to 7; is this the val split?" in refused(train, output, "val")
    wrong = [(schema(), timestep) for timestep in (None, 8, -1, 1 << 20)]
    for kind, timestep in (*wrong, (schema(timestep=pa.float32()), 3.0), (schema(timestep=pa.string()), "3")):
        write_arrow(val / "data-00000-of-00001.arrow", [content[9] | {"timestep": timestep}], (1,), kind)
        message = refused(val, output, "val")
        assert f"data-00000-of-00001.arrow, row 0: timestep {timestep!r}, want 0 to 7" in message


def test_another_number_of_samples_is_refused_with_both(train, public, output):
    message = refused(train, output, expect=24)
    assert f"{train} holds 23 samples, the train split should have 24" in message and "--expect-samples 23" in message
    write_arrow(public / "none" / "data-0.arrow", [], (0, 0))
    assert f"{public}/none holds 0 samples, the train split should have some" in refused(public / "none", output)


# Full size


@pytest.mark.slow
def test_samples_of_full_size_arrive_byte_for_byte_in_little_memory(tmp_path, output):
    want = 7 * rows(41, full=True)
    write_arrow(tmp_path / "public" / "source" / "data-0.arrow", want[:130], (37, 37, 37, 19))
    write_arrow(tmp_path / "public" / "source" / "data-1.arrow", want[130:], (37, 37, 37, 37, 9))
    write_empty(tmp_path / "public" / "empty_encodings", FULL)
    args = ("--input", tmp_path / "public" / "source", "--output", output, "--split", "train")
    args = (*args, "--expect-samples", len(want), "--per-shard", 70)
    peak = 0
    with Job(tmp_path / "log", "tools/prepare/__main__.py", "mlcommons", *args, ranks=0) as job:
        while job.process.poll() is None:
            status = Path(f"/proc/{job.process.pid}/status").read_text()
            peak = max([peak, *map(int, re.findall(r"RssAnon:\s*(\d+)", status))])  # in kB, of no file's pages
            time.sleep(0.02)
        assert job.wait() == 0, job.said
    assert peak < 250_000
    require_converted(output, want, per_shard=70, layout=FULL)
    shutil.rmtree(tmp_path / "public")
    shutil.rmtree(output)
