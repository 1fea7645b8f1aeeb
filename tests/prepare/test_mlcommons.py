"""From the MLCommons' arrow folders to shards: every byte arrives, whatever kills the conversion; or it is refused."""

import argparse
import io
import json
import os
import random
import shutil
import signal
import sys
import tarfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from conftest import MICRO, ROOT, called
from killing import Job, send

from flux_ref import config, config_file
from flux_ref.errors import Refusal
from flux_ref.formats import shard_writer, shards
from flux_ref.formats.shards import MEMBERS, Layout
from flux_ref.prepare import mlcommons

pa = pytest.importorskip("pyarrow")

LAYOUT = shards.layout(config_file.load(MICRO).model)
COUNT, PER_SHARD = 23, 4  # samples
ENCODINGS = {"t5": "t5_encodings", "clip": "clip_encodings", "mean": "mean", "logvar": "logvar"}


@dataclass
class Row:
    """A row of the source: .npy files, and the timestep."""

    blobs: dict[str, bytes]
    timestep: int | None = None

    def record(self, number: int) -> dict[str, object]:
        named = {ENCODINGS[member]: blob for member, blob in self.blobs.items()}
        return {"__key__": f"{number:012d}", **named, "timestep": self.timestep}


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@cache
def rows(count: int = COUNT, split: str = "train", seed: int = 0) -> list[Row]:
    """Random samples, with finite bf16 bits."""
    rng = np.random.default_rng(seed)

    def bits(shape: tuple[int, ...]) -> np.ndarray:
        return (rng.integers(0, 0x7F80, shape) | rng.integers(0, 2, shape) << 15).astype("<u2")

    return [
        Row({member: npy(bits(shape)) for member, shape in LAYOUT.shapes.items()}, i % 8 if split == "val" else None)
        for i in range(count)
    ]


def schema(timestep=None, binary=None, without: tuple[str, ...] = ()) -> "pa.Schema":
    kinds = {"__key__": pa.string()} | dict.fromkeys(ENCODINGS.values(), binary or pa.binary())
    kinds["timestep"] = timestep or pa.int32()
    return pa.schema({name: kind for name, kind in kinds.items() if name not in without})


def write_arrow(path: Path, content: list[Row], batches: tuple[int, ...] = (COUNT,), kind: "pa.Schema" = None) -> None:
    """An arrow stream with batches of so many rows."""
    kind = kind or schema()
    path.parent.mkdir(parents=True, exist_ok=True)
    records = iter([row.record(number) for number, row in enumerate(content)])
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, kind) as stream:
        for size in batches:
            part = [next(records) for _ in range(size)]
            stream.write_batch(pa.RecordBatch.from_pylist(part, schema=kind))
    assert next(records, None) is None


def write_state(folder: Path, names: list[str]) -> None:
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))


def write_empty(folder: Path) -> None:
    """As the public ones are: float16, with a batch axis."""
    draw = np.random.default_rng(5)
    shapes = {member: (1, *LAYOUT.shapes[member]) for member in ("t5", "clip")}
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
    source: Path, output: Path, split: str = "train", expect: object = "any", per_shard: int = PER_SHARD, workers=1
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
    """What a conversion says when it is refused: one line."""
    with pytest.raises(Refusal) as refused:
        convert(*args, **kwargs)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def require_converted(output: Path, want: list[Row], split: str = "train", per_shard: int = PER_SHARD) -> None:
    """Each shard holds its rows, all bytes of all members, in order; and our reader says the same."""
    folder = output / split
    names = [f"shard_{i:06d}.tar" for i in range(-(-len(want) // per_shard))]
    assert sorted(path.name for path in folder.iterdir()) == ["plan.json", *names]
    members = {}
    for number, name in enumerate(names):
        with tarfile.open(folder / name) as archive:
            found = {entry.name: archive.extractfile(entry).read() for entry in archive}
        assert len(found) == 5 * len(want[number * per_shard : (number + 1) * per_shard])
        members |= found
    keys = [f"{split}_{i:08d}" for i in range(len(want))]
    assert list(members) == [f"{key}.{kind}" for key in keys for kind in ("json", *(f"{m}.bytes" for m in MEMBERS))]
    for key, row in zip(keys, want):
        assert json.loads(members[f"{key}.json"]) == {"key": key, "timestep": row.timestep}
        assert all(members[f"{key}.{member}.bytes"] == row.blobs[member] for member in MEMBERS)
    require_readable(folder, LAYOUT, want)


def require_readable(folder: Path, layout: Layout, want: list[Row]) -> None:
    found = shards.ShardSet(folder, layout)
    assert len(found) == len(want)
    found.open()
    read = layout.rows()
    for index, row in enumerate(want):
        assert found.read(index, read).timestep == row.timestep
        assert all(npy(read[member]) == row.blobs[member] for member in MEMBERS)
    for shard in found.shards:
        shard.close()


# What is taken


@pytest.mark.parametrize("workers", [1, 3])
def test_both_splits_arrive_byte_for_byte_and_the_source_is_left_alone(public, output, workers):
    before = contents(public)
    assert convert(public / "cc12m_preprocessed", output, expect=COUNT, workers=workers) == COUNT
    assert convert(public / "coco_preprocessed", output, "val", expect=16, workers=workers) == 16
    require_converted(output, rows())
    require_converted(output, rows(16, "val", seed=1), "val")
    assert sorted(path.name for path in output.iterdir()) == ["empty_encodings", "train", "val"]
    assert contents(public) == before and len(list(output.parent.iterdir())) == 2


def write_as_large_binary(folder: Path) -> None:
    write_arrow(folder / "data-00000-of-00001.arrow", rows(), (5, 18), schema(binary=pa.large_binary()))


def write_without_timestep_column(folder: Path) -> None:
    write_arrow(folder / "data-00000-of-00001.arrow", rows(), (COUNT,), schema(without=("timestep", "__key__")))


def write_with_timesteps_of_type_null(folder: Path) -> None:
    write_arrow(folder / "data-00000-of-00001.arrow", rows(), (1,) * COUNT, schema(timestep=pa.null()))


def write_with_empty_batches_and_files(folder: Path) -> None:
    write_arrow(folder / "data-00000-of-00004.arrow", [], ())
    write_arrow(folder / "data-00001-of-00004.arrow", rows()[:6], (0, 6, 0))
    write_arrow(folder / "data-00002-of-00004.arrow", [], (0,))
    write_arrow(folder / "data-00003-of-00004.arrow", rows()[6:], (17, 0))


def write_listed_in_another_order_than_by_name(folder: Path) -> None:
    write_arrow(folder / "data-b.arrow", rows()[:9], (9,))
    write_arrow(folder / "data-a.arrow", rows()[9:], (14,))
    write_arrow(folder / "data-c.arrow", rows(5, seed=9), (5,))  # which is not listed
    write_state(folder, ["data-b.arrow", "data-a.arrow"])


def write_slices_of_a_larger_table(folder: Path) -> None:
    """Chunks and offsets, as `datasets` has them after select and concatenate."""
    records = [row.record(number) for number, row in enumerate(rows())]
    table = pa.Table.from_pylist(records, schema=schema())
    table = pa.concat_tables([table.slice(0, 3), table.slice(3, 9), table.slice(12)])
    folder.mkdir(parents=True)
    with pa.OSFile(str(folder / "data-0.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table, max_chunksize=5)


def write_compressed(folder: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    folder.mkdir(parents=True)
    with pa.ipc.new_stream(str(folder / "data-0.arrow"), schema(), options=options) as stream:
        stream.write_table(pa.Table.from_pylist([row.record(0) for row in rows()], schema=schema()))


@pytest.mark.parametrize(
    "write",
    [
        write_as_large_binary,
        write_without_timestep_column,
        write_with_timesteps_of_type_null,
        write_with_empty_batches_and_files,
        write_listed_in_another_order_than_by_name,
        write_slices_of_a_larger_table,
        write_compressed,
    ],
)
def test_training_sets_of_many_forms_are_taken(write, public, output):
    write(public / "other")
    assert convert(public / "other", output, expect=COUNT) == COUNT
    require_converted(output, rows())


def test_timesteps_may_be_integers_of_any_width(public, output):
    want = rows(9, "val")
    for kind in ("int8", "int64", "uint8"):
        write_arrow(public / kind / "data-0.arrow", want, (9,), schema(timestep=getattr(pa, kind)()))
        convert(public / kind, output / kind, "val")
        require_converted(output / kind, want, "val")


@pytest.mark.parametrize("split", ["train", "val"])
def test_what_datasets_saves_is_taken(split, public, output):
    datasets = pytest.importorskip("datasets")
    want = rows(29, split)
    kinds = {"__key__": "string"} | dict.fromkeys(ENCODINGS.values(), "binary") | {"timestep": "int32"}
    features = datasets.Features({name: datasets.Value(kind) for name, kind in kinds.items()})
    made = datasets.Dataset.from_list([row.record(i) for i, row in enumerate(want)], features=features)
    made.save_to_disk(str(public / "saved"), num_shards=3)
    assert (public / "saved" / "state.json").exists()
    assert convert(public / "saved", output, split, expect=29) == 29
    require_converted(output, want, split)


def test_a_set_of_one_shard_less_than_full(train, output):
    convert(train, output, per_shard=1000)
    require_converted(output, rows(), per_shard=1000)


def test_empty_encodings_become_bf16_bits_without_a_batch_axis_once(public, output):
    convert(public / "coco_preprocessed", output, "val")
    want = shards.read_empty(public / "empty_encodings", LAYOUT)
    for member in ("t5", "clip"):
        found = np.load(output / "empty_encodings" / f"{member}_empty.npy")
        assert found.dtype == np.uint16 and found.shape == LAYOUT.shapes[member]
        assert np.array_equal(found, want[member])
    before = {path: path.stat().st_mtime_ns for path in (output / "empty_encodings").iterdir()}
    shutil.rmtree(public / "empty_encodings")
    convert(public / "cc12m_preprocessed", output)
    assert before == {path: path.stat().st_mtime_ns for path in (output / "empty_encodings").iterdir()}


# The command


PROGRAM = """
import sys, time
sys.path.insert(0, {root!r})
from flux_ref.formats.shard_writer import ShardWriter
from flux_ref.prepare import commands

def add_later(shard, key, *args):  # in every process: each imports this file
    {first}
    add(shard, key, *args)

add, ShardWriter.add = ShardWriter.add, add_later

if __name__ == "__main__":
    sys.exit(commands.main(["mlcommons", *sys.argv[1:]]))
"""


class Conversion(Job):
    """The command in processes of its own; first: what happens before a sample is written."""

    def __init__(self, source: Path, output: Path, *args: object, first: str = "pass"):
        program = output.with_name(f"program_{time.monotonic_ns()}.py")
        program.write_text(PROGRAM.format(root=str(ROOT), first=first))
        args = ("--input", source, "--output", output, "--split", "train", "--config", MICRO, *args)
        super().__init__(program.with_suffix(".log"), program, *args, ranks=0)
        self.partial = output / "train.partial"

    def shards(self) -> int:
        return len(list(self.partial.glob("*.tar")))

    def writes(self) -> bool:
        return any(self.partial.glob(".shard_*"))

    def workers(self) -> list[int]:
        command = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in self.alive()}
        return [pid for pid, words in command.items() if b"--multiprocessing-fork" in words]


def test_the_command_tells_its_progress_and_what_it_made(train, output):
    with Conversion(train, output, "--expect-samples", COUNT, "--per-shard", PER_SHARD) as job:
        assert job.wait() == 0, job.said
        assert f"{output}/train: {COUNT} samples" in job.said
        assert "samples/s" in job.said and f"{COUNT}/{COUNT}" in job.said
    require_converted(output, rows())


def test_the_benchmarks_counts_and_sizes_are_the_defaults(train, public, output):
    for split, folder, count in (("train", train, 1_099_776), ("val", public / "coco_preprocessed", 29_696)):
        args = ("--input", folder, "--output", output, "--split", split)
        with pytest.raises(Refusal, match=r"t5_encodings .* is no \.npy file of uint16 \(256, 4096\)"):
            mlcommons.run(arguments(*args))
        with pytest.raises(Refusal, match=f"should have {count}"):
            mlcommons.run(arguments(*args, "--config", MICRO))
    assert not output.exists()


def test_the_empty_encodings_may_lie_elsewhere(train, public, output):
    (public / "empty_encodings").rename(public / "elsewhere")
    args = ("--input", train, "--output", output, "--split", "train", "--config", MICRO, "--expect-samples", "any")
    with pytest.raises(Refusal, match=f"{public}/empty_encodings .*--empty"):
        mlcommons.run(arguments(*args))
    assert mlcommons.run(arguments(*args, "--empty", public / "elsewhere")) == 0
    require_converted(output, rows(), per_shard=10_000)


def test_senseless_options_are_refused(capsys):
    options = ("--expect-samples=0", "--expect-samples=some", "--per-shard=0", "--workers=0", "--split=test")
    for option in options:
        with pytest.raises(SystemExit):
            arguments("--input", "a", "--output", "b", "--split", "val", option)
        assert option.partition("=")[0] in capsys.readouterr().err


# Whatever ends it, the same command goes on


MANY = 120
OPTIONS = ("--expect-samples", "any", "--per-shard", 2, "--workers", 2)
SLOWLY = "time.sleep(0.02)"


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """A source of many samples."""
    folder = tmp_path_factory.mktemp("many") / "public"
    write_arrow(folder / "source" / "data-00000-of-00002.arrow", rows(MANY)[:71], (30, 1, 40))
    write_arrow(folder / "source" / "data-00001-of-00002.arrow", rows(MANY)[71:], (49,))
    write_empty(folder / "empty_encodings")
    return folder / "source"


@pytest.fixture(scope="module")
def whole(many, tmp_path_factory) -> dict[str, bytes]:
    """What an uninterrupted conversion leaves."""
    output = tmp_path_factory.mktemp("whole") / "output"
    convert(many, output, per_shard=2)
    require_converted(output, rows(MANY), per_shard=2)
    return contents(output)


def go_on(many: Path, output: Path) -> None:
    with Conversion(many, output, *OPTIONS) as job:
        assert job.wait() == 0, job.said


@pytest.mark.nightly
def test_ten_kills_of_all_processes_leave_no_trace(many, whole, output):
    draw, reached = random.Random(0), []
    for attempt in range(10):
        with Conversion(many, output, *OPTIONS, first=SLOWLY) as job:
            goal = job.shards() + draw.randrange(1, 5)
            if attempt % 3:
                assert job.until(lambda job=job, goal=goal: job.shards() >= goal)
            time.sleep(draw.uniform(0, 0.05 if attempt % 3 else 0.8))  # the latter to meet it while it starts
            assert job.process.poll() is None, job.said
            os.killpg(job.process.pid, signal.SIGKILL)
            job.wait()
            assert job.gone(timeout=10)
            reached.append(job.shards())
            assert not (output / "train").exists()
    assert len(set(reached)) >= 6 and reached[-1] < MANY // 2, reached
    go_on(many, output)
    assert contents(output) == whole


def test_a_conversion_that_is_killed_goes_on_with_the_missing_shards(many, whole, output):
    """Only the first process is killed. The others end by themselves."""
    with Conversion(many, output, *OPTIONS, first=SLOWLY) as job:
        assert job.until(lambda: job.shards() >= 3) and len(job.workers()) == 2
        assert "in use by another job" in refusal(many, output, per_shard=2)
        send(job.process.pid, signal.SIGKILL)
        job.wait()
        assert job.gone(timeout=10)
        kept = {path.name: path.stat().st_mtime_ns for path in job.partial.glob("*.tar")}
    go_on(many, output)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in (output / "train").iterdir()}.items()
    assert contents(output) == whole


def test_a_process_that_is_killed_ends_the_conversion_with_one_line(many, whole, output):
    with Conversion(many, output, *OPTIONS, first=SLOWLY) as job:
        assert job.until(lambda: job.shards() >= 3)
        send(job.workers()[0], signal.SIGKILL)
        assert job.wait(timeout=20) == 3
        assert "prepare: a process was killed" in job.said and "Traceback" not in job.said
        assert job.gone(timeout=10)
    go_on(many, output)
    assert contents(output) == whole


def test_ctrl_c_stops_all_processes_quietly(many, whole, output):
    with Conversion(many, output, *OPTIONS, first=SLOWLY) as job:
        assert job.until(lambda: job.shards() >= 3)
        os.killpg(job.process.pid, signal.SIGINT)
        assert job.wait(timeout=20) == 130
        assert "Traceback" not in job.said
        assert job.gone(timeout=10) and not job.writes() and not (output / "train").exists()
    go_on(many, output)
    assert contents(output) == whole


def test_a_full_disk_ends_the_conversion_with_one_line(many, whole, output):
    full = "if key == 'train_00000031': raise OSError(28, 'No space left on device')"
    with Conversion(many, output, *OPTIONS, first=full) as job:
        assert job.wait(timeout=20) == 2
        assert "No space left on device" in job.said and "Traceback" not in job.said
        assert job.shards() >= 10 and not job.writes()
    go_on(many, output)
    assert contents(output) == whole


def test_samples_before_a_bad_one_are_kept_for_the_repaired_source(train, output):
    path = train / "data-00001-of-00002.arrow"
    good = path.read_bytes()
    place = good.index(rows()[-2].blobs["mean"])
    path.write_bytes(good[:place] + b"\x00" + good[place + 1 :])
    assert f"{path}, row 11: mean (" in refusal(train, output)
    assert not (output / "train").exists()
    kept = {path: path.stat().st_mtime_ns for path in (output / "train.partial").glob("*.tar")}
    assert [path.name for path in sorted(kept)] == [f"shard_{i:06d}.tar" for i in range(5)]
    path.write_bytes(good)
    convert(train, output)
    require_converted(output, rows())
    assert all((output / "train" / path.name).stat().st_mtime_ns == time_ns for path, time_ns in kept.items())


# What is refused before anything is written


@pytest.fixture
def begun(train, output) -> Path:
    """The folder of a conversion of which one shard is missing."""
    convert(train, output)
    (output / "train").rename(output / "train.partial")
    (output / "train.partial" / "shard_000003.tar").unlink()
    return output / "train.partial"


def test_a_conversion_goes_on_with_its_own_plan_only(begun, train, output):
    before = contents(begun)
    message = refusal(train, output, per_shard=5)
    assert str(begun) in message and "per_shard was 4, is 5; remove" in message
    write_arrow(train / "data-00001-of-00002.arrow", rows()[11:], (12,))
    assert "data-00001-of-00002.arrow was [" in (message := refusal(train, output)) and ", 13], is [" in message
    write_arrow(train / "data-00001-of-00002.arrow", rows()[10:], (13,))
    write_state(train, ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"])
    assert "another order" in refusal(train, output)
    write_state(train, ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"])
    assert contents(begun) == before
    convert(train, output)
    require_converted(output, rows())


def test_shards_without_their_plan_are_not_taken_up(begun, train, output):
    for plan in ("", "{", "[]", '{"split": "train"}'):
        (begun / "plan.json").write_text(plan)
        assert f"{begun} was begun otherwise: its plan.json is damaged" in refusal(train, output)
    (begun / "plan.json").unlink()
    assert str(begun) in refusal(train, output)


@pytest.mark.parametrize("plan", ["{", None])
def test_a_conversion_that_was_killed_before_its_first_shard_begins_again(plan, train, output):
    (output / "train.partial").mkdir(parents=True)
    (output / "train.partial" / ".shard_000099.tar.partial").write_bytes(b"half")
    (output / "train.partial" / ".empty_encodings.partial").mkdir()
    (output / "train.partial" / ".empty_encodings.partial" / "t5_empty.npy").write_bytes(b"half")
    if plan is not None:
        (output / "train.partial" / "plan.json").write_text(plan)
    convert(train, output)
    require_converted(output, rows())
    shards.read_empty(output / "empty_encodings", LAYOUT)


def test_a_set_that_was_finished_but_not_renamed_is_renamed(train, output):
    convert(train, output)
    (output / "train").rename(output / "train.partial")
    before = {path.name: path.stat().st_mtime_ns for path in (output / "train.partial").iterdir()}
    convert(train, output)
    assert before == {path.name: path.stat().st_mtime_ns for path in (output / "train").iterdir()}


def test_an_existing_set_is_refused_and_left_alone(train, output):
    (output / "train").mkdir(parents=True)
    message = refusal(train, output)
    assert f"{output}/train exists; remove it" in message
    assert [path.name for path in output.rglob("*")] == ["train"]


def refused(source: Path, output: Path, *args: object, **kwargs: object) -> str:
    """As refusal, of what is found out before anything is written."""
    message = refusal(source, output, *args, **kwargs)
    assert not output.exists()
    return message


def test_missing_pyarrow_is_said_with_the_remedy(train, output, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install pyarrow" in refused(train, output)


def test_folders_without_arrow_files_are_refused(public, output):
    (public / "bare").mkdir()
    for folder in (public, public / "bare", public / "missing"):
        message = refused(folder, output)
        assert str(folder) in message and "state.json" in message


def test_a_damaged_state_is_refused(train, output):
    for text in ("", "{", "[]", "null", "{}", '{"_data_files": 3}', '{"_data_files": ["a.arrow"]}'):
        (train / "state.json").write_text(text)
        assert f"{train}/state.json is damaged" in refused(train, output)


def test_a_state_that_names_anything_but_a_file_beside_it_is_refused(train, output):
    write_arrow(train.parent / "secret.arrow", rows())
    names = (
        "../secret.arrow",
        "/secret.arrow",
        "..",
        ".",
        "",
        "a/b.arrow",
        "a\\b.arrow",
        "a\0.arrow",
        "a.txt",
        3,
        None,
    )
    for name in names:
        write_state(train, ["data-00000-of-00002.arrow", name])
        assert f"{train}/state.json lists {name!r}" in refused(train, output)


def test_a_file_that_is_listed_twice_or_missing_is_refused(train, output):
    write_state(train, ["data-00000-of-00002.arrow"] * 2)
    assert "twice" in refused(train, output)
    write_state(train, ["data-00000-of-00002.arrow", "none.arrow"])
    assert f"{train}/none.arrow is missing" in refused(train, output)


def test_no_length_of_a_truncated_file_is_taken(train, output):
    path = train / "data-00000-of-00002.arrow"
    good, draw = path.read_bytes(), random.Random(0)
    ends = [0, 1, 4, 8, len(good) - 1, len(good) - 4, len(good) - 8, len(good) - 9]
    with pa.memory_map(str(path)) as file:
        ends += [file.tell() for _ in pa.ipc.open_stream(file)]  # just behind each batch
    for length in [*ends, *(draw.randrange(len(good)) for _ in range(60))]:
        path.write_bytes(good[:length])
        message = refused(train, output)
        assert str(path) in message and "truncated" in message, length


def test_bytes_after_the_end_of_a_stream_are_refused(train, output):
    path = train / "data-00000-of-00002.arrow"
    whole = path.read_bytes()
    for junk in (b"\0" * 8, b"x", b"\xff\xff\xff\xff\0\0\0\0"):
        path.write_bytes(whole + junk)
        assert f"{path} is truncated" in refused(train, output)


def test_files_of_other_kinds_are_refused(train, output):
    path = train / "data-00000-of-00002.arrow"
    with pa.ipc.new_file(str(path), schema()) as file:
        file.write_table(pa.Table.from_pylist([row.record(0) for row in rows()], schema=schema()))
    assert str(path) in refused(train, output)
    for content in (b"", b"PAR1" * 99, random.Random(0).randbytes(5000)):
        path.write_bytes(content)
        assert str(path) in refused(train, output)


def test_any_changed_byte_of_the_metadata_is_harmless_or_refused(train, output):
    """In the messages before and between the payloads; whatever else an arrow file may be made to say."""
    path = train / "data-00000-of-00002.arrow"
    good, draw = path.read_bytes(), random.Random(1)
    for _ in range(150):
        place = draw.randrange(3000)
        path.write_bytes(good[:place] + draw.randbytes(1) + good[place + 1 :])
        try:
            mlcommons._inspect(train, "train", LAYOUT, 0)
        except Refusal as refused:
            assert str(path) in str(refused)


def test_missing_columns_are_named(train, output):
    path = train / "data-00001-of-00002.arrow"
    write_arrow(path, rows()[10:], (13,), schema(without=("clip_encodings", "logvar")))
    message = refused(train, output)
    assert str(path) in message and "lacks the columns clip_encodings, logvar; it has __key__, t5_enc" in message


def test_columns_of_another_type_are_refused(train, output):
    path = train / "data-00000-of-00002.arrow"
    for kind, words in (
        (schema(timestep=pa.float32()), "timestep is float"),
        (schema(timestep=pa.string()), "timestep is string"),
        (schema(without=("mean",)).append(pa.field("mean", pa.int64())), "mean is int64"),
        (schema().append(pa.field("t5_encodings", pa.binary())), "t5_encodings is binary or there twice"),
        (schema().append(pa.field("timestep", pa.int32())), "timestep is int32 or there twice"),
    ):
        with pa.ipc.new_stream(str(path), kind):
            pass
        message = refused(train, output)
        assert str(path) in message and words in message


def test_what_is_no_npy_of_the_right_kind_is_refused_with_its_place(train, output):
    t5 = np.zeros(LAYOUT.shapes["t5"], np.uint16)
    arrays = [t5.astype(np.float16), t5.astype(np.int16), t5.astype(">u2"), t5[None], t5.T.copy(), t5[:-1]]
    arrays.append(np.asfortranarray(t5))
    path = train / "data-00001-of-00002.arrow"
    for blob in (*map(npy, arrays), npy(t5)[:-1], npy(t5) + b"\0", npy(t5)[:50], t5.tobytes(), b"", None):
        write_arrow(path, [Row(rows()[0].blobs | {"t5": blob}), *rows()[11:]], (13,))
        message = refused(train, output)
        assert f"{path}, row 0: t5_encodings (" in message and "uint16 (9, 28) in C order" in message
        assert b"NUMPY" not in (blob or b"")[:50] or str(blob[:40].strip())[2:-1] in message


def test_a_file_that_changes_while_it_is_converted_is_noticed(train, output):
    files = mlcommons._inspect(train, "train", LAYOUT, 0)
    write_arrow(files[0].path, rows()[:9], (9,))
    job = mlcommons.Conversion(files, output, "train", LAYOUT)
    with pytest.raises(Refusal, match="had 10 rows and now has 9"):
        list(mlcommons._samples(job, range(8, 12)))


# Timesteps and counts


def test_validation_needs_the_eight_timesteps(public, output):
    val, content = public / "coco_preprocessed", rows(16, "val", seed=1)
    for timestep in (None, 8, -1, 1 << 20):
        wrong = [*content[:9], Row(content[9].blobs, timestep)]
        write_arrow(val / "data-00000-of-00001.arrow", wrong, (4, 6))
        message = refused(val, output, "val")
        assert f"data-00000-of-00001.arrow, row 9: timestep {timestep}, want 0 to 7" in message
    message = refused(public / "cc12m_preprocessed", output, "val")
    assert "row 0: timestep None, want 0 to 7; is this the val split?" in message
    write_without_timestep_column(public / "other")
    assert "timestep None" in refused(public / "other", output, "val")


def test_training_samples_with_timesteps_are_refused(public, output):
    message = refused(public / "coco_preprocessed", output, "train")
    assert "row 0: timestep 0, want none; is this the train split?" in message


def test_another_number_of_samples_is_refused_with_both(train, output):
    message = refused(train, output, expect=24)
    assert f"{train} holds 23 samples, the train split should have 24" in message and "--expect-samples 23" in message


def test_no_sample_at_all_is_refused(public, output):
    write_arrow(public / "none" / "data-0.arrow", [], (0, 0))
    assert f"{public}/none holds no sample" in refused(public / "none", output)


def test_the_benchmarks_validation_set_has_as_many_of_each_timestep(public, output, monkeypatch):
    monkeypatch.setitem(mlcommons.BENCHMARK, "val", 16)
    val = public / "coco_preprocessed"
    content = rows(16, "val", seed=1)
    unbalanced = [*content[:15], Row(content[15].blobs, 0)]
    write_arrow(val / "data-00000-of-00001.arrow", unbalanced, (16,))
    message = refused(val, output, "val", expect=16)
    assert f"{val} holds timesteps 3 of 0, 2 of 1," in message and "1 of 7, want 2 of each" in message
    convert(val, output, "val", expect="any")
    require_converted(output, unbalanced, "val")


# The encodings of the empty caption


def test_training_needs_the_empty_encodings_and_validation_says_that_it_will(public, output, capsys):
    shutil.rmtree(public / "empty_encodings")
    message = refused(public / "cc12m_preprocessed", output)
    assert f"folder {public}/empty_encodings of t5_empty.npy and clip_empty.npy does not exist" in message
    convert(public / "coco_preprocessed", output, "val")
    assert f"note: folder {public}/empty_encodings" in capsys.readouterr().out
    assert [path.name for path in output.iterdir()] == ["val"]


@pytest.mark.parametrize("split", ["train", "val"])
def test_damaged_empty_encodings_are_refused(split, public, output):
    path = public / "empty_encodings" / "clip_empty.npy"
    source = public / {"train": "cc12m_preprocessed", "val": "coco_preprocessed"}[split]
    path.write_bytes(path.read_bytes()[:-1])
    assert str(path) in refused(source, output, split)
    path.unlink()
    assert str(path) in refused(source, output, split)


# The result


def as_rows(folder: Path) -> list[Row]:
    """What our own shards hold."""
    found = shards.ShardSet(folder, LAYOUT)
    found.open()
    read = LAYOUT.rows()
    content = []
    for index in range(len(found)):
        timestep = found.read(index, read).timestep
        content.append(Row({member: npy(bits) for member, bits in read.items()}, timestep))
    return content


def test_a_converted_set_trains_and_validates(shapes_dir, tmp_path, output):
    shutil.copytree(shapes_dir / "empty_encodings", tmp_path / "public" / "empty_encodings")
    for split, count in (("train", 50), ("val", 45)):
        source = tmp_path / "public" / split
        write_arrow(source / "data-0.arrow", as_rows(shapes_dir / split), (17, 20, count - 37))
        convert(source, output, split, expect=count, per_shard=20)
    run, own = tmp_path / "run", [f"--data.train={output}/train", f"--data.val={output}/val"]
    assert called("train.py", MICRO, "--data.kind=embeddings", *own, f"--run.dir={run}") == 0
    records = [json.loads(line) for line in (run / "eval.jsonl").open()]
    assert records and all(record["count"] == 45 and np.isfinite(record["val_loss"]) for record in records)


def anonymous_mb(pid: int) -> float:
    """Memory of a process that is no page of a file."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    sizes = [int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("RssAnon")]
    return sizes[0] if sizes else 0.0


@pytest.mark.slow
def test_samples_of_full_size_arrive_byte_for_byte_in_little_memory(tmp_path, output):
    full, count = shards.layout(config.Config().model), 300
    rng = np.random.default_rng(0)
    random_bits = rng.integers(0, 0x7F80, 2 << 20, dtype=np.uint16)

    def row(i: int) -> Row:
        def part(member: str, shape: tuple[int, ...]) -> np.ndarray:
            begin = 1009 * i + MEMBERS.index(member)
            return random_bits[begin : begin + int(np.prod(shape))].reshape(shape)

        return Row({member: npy(part(member, shape)) for member, shape in full.shapes.items()})

    source = tmp_path / "public" / "source"
    source.mkdir(parents=True)
    for name, begin, end in (("data-0.arrow", 0, 130), ("data-1.arrow", 130, count)):
        with pa.ipc.new_stream(str(source / name), schema()) as stream:
            for i in range(begin, end, 37):
                part = [row(k).record(k) for k in range(i, min(i + 37, end))]
                stream.write_batch(pa.RecordBatch.from_pylist(part, schema=schema()))
    for member in ("t5", "clip"):
        (tmp_path / "public" / "empty_encodings").mkdir(exist_ok=True)
        np.save(tmp_path / "public" / "empty_encodings" / f"{member}_empty.npy", np.zeros(full.shapes[member], "f2"))
    args = ("--expect-samples", count, "--per-shard", 70, "--config", ROOT / "configs" / "schnell_gbs512.toml")
    peak = 0.0
    with Conversion(source, output, *args) as job:
        while job.process.poll() is None:
            peak = max([peak, *map(anonymous_mb, job.alive())])
            time.sleep(0.02)
        assert job.wait() == 0, job.said
        print(job.said.split("\r")[-1])
    print(f"{peak:.0f} MB in the largest process")
    assert peak < 250
    require_readable(output / "train", full, [row(i) for i in range(count)])
    shutil.rmtree(tmp_path / "public")
    shutil.rmtree(output)
