"""From the MLCommons' preprocessed arrow folders, cc12m_preprocessed and coco_preprocessed, to our shards.

    python -m flux_ref.prepare mlcommons --input DIR/cc12m_preprocessed --output data/mlperf --split train
    python -m flux_ref.prepare mlcommons --input DIR/coco_preprocessed --output data/mlperf --split val

The source is what `datasets.save_to_disk` writes: state.json lists files in order, each an Arrow IPC stream
(arrow.apache.org/docs/format/Columnar.html) with a row per sample, in which t5_encodings, clip_encodings, mean and
logvar are .npy files of bf16 bits. Those go into the shards byte for byte. A set grows in OUTPUT/SPLIT.partial, one
process per shard, and becomes OUTPUT/SPLIT once it is whole; the same command goes on with the shards that are missing.
"""

import argparse
import fcntl
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np

from flux_ref import config_file
from flux_ref.config import Config
from flux_ref.errors import Fault, Refusal
from flux_ref.formats import shards
from flux_ref.formats.shard_writer import PER_SHARD, ShardWriter, key_of, shard_path
from flux_ref.formats.shards import NPY_HEADER, Layout, npy_header
from flux_ref.run.progress import progress
from flux_ref.schedule import TIMESTEPS

COLUMNS = {"t5": "t5_encodings", "clip": "clip_encodings", "mean": "mean", "logvar": "logvar"}  # of each member
BENCHMARK = {"train": 1_099_776, "val": 29_696}  # samples (mlcommons/training, text_to_image)
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
PLAN = "plan.json"


@dataclass(frozen=True)
class ArrowFile:
    """One file of the source; first: the index of its first sample in the whole set."""

    path: Path
    bytes: int
    rows: int
    first: int


@dataclass(frozen=True)
class Job:
    """A conversion, as every process knows it. folder: where the shards grow."""

    files: list[ArrowFile]
    folder: Path
    split: str
    layout: Layout
    per_shard: int

    @property
    def count(self) -> int:
        return self.files[-1].first + self.files[-1].rows

    def samples(self, shard: int) -> range:
        return range(shard * self.per_shard, min((shard + 1) * self.per_shard, self.count))

    def missing(self) -> list[int]:
        """The shards to write; one that has its name is whole."""
        return [i for i in range(-(-self.count // self.per_shard)) if not shard_path(self.folder, i).exists()]

    def plan(self) -> str:
        """What a conversion that goes on must have in common with the one that began, as JSON."""
        options = {"split": self.split, "per_shard": self.per_shard, "shapes": str(self.layout.shapes)}
        return json.dumps(options | {f.path.name: f"{f.bytes} bytes, {f.rows} rows" for f in self.files}, indent=0)


def convert(
    source: Path, output: Path, split: str, layout: Layout, expect: int, per_shard: int, workers: int, empty: Path
) -> int:
    """Write output/split, and output/empty_encodings unless it is there; returns the number of samples.

    expect: how many there must be; 0: any number. empty: folder of t5_empty.npy and clip_empty.npy.
    Raises: Refusal; Fault if a process died. The shards that are finished by then are kept.
    """
    final, partial = output / split, output / f"{split}.partial"
    if final.exists():
        raise Refusal(f"{final} exists; remove it or choose another --output")
    job = Job(_inspect(source, split, layout, expect), partial, split, layout, per_shard)
    _convert_empty(empty, output, split, layout)
    with _claimed(job):
        _write_missing(job, workers)
        _sync(partial)
        partial.rename(final)
        _sync(output)
    return job.count


# The source


def _pyarrow() -> ModuleType:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise Refusal("reading arrow files needs pyarrow, which is not installed: pip install pyarrow") from None
    return pyarrow


def _inspect(source: Path, split: str, layout: Layout, expect: int) -> list[ArrowFile]:
    """The files of a folder, after a look at the columns, rows and timesteps of each. Raises: Refusal."""
    files, first, timesteps = [], 0, Counter()
    for path in progress(_paths(source), desc=f"counting {source.name}", unit=" files", leave=False):
        rows = 0
        for batch in _batches(path):
            timesteps.update(_timesteps(batch, split, path, rows))
            if rows == 0 and batch.num_rows:  # samples of another model are known at once, the others when copied
                _blobs(batch, 0, layout, f"{path}, row 0")
            rows += batch.num_rows
        files.append(ArrowFile(path, path.stat().st_size, rows, first))
        first += rows
    if first == 0:
        raise Refusal(f"{source} holds no sample")
    if expect not in (0, first):
        raise Refusal(
            f"{source} holds {first} samples, the {split} split should have {expect}; download what is missing,"
            f" or give --expect-samples {first}"
        )
    each = BENCHMARK["val"] // TIMESTEPS
    if (split, expect) == ("val", BENCHMARK["val"]) and set(timesteps.values()) != {each}:
        counts = ", ".join(f"{count} of {timestep}" for timestep, count in sorted(timesteps.items()))
        raise Refusal(f"{source} holds timesteps {counts}, want {each} of each; give --expect-samples any to take them")
    return files


def _paths(source: Path) -> list[Path]:
    """The arrow files of a folder: those in state.json, without it all by name. Raises: Refusal."""
    state = source / "state.json"
    if not state.is_file():
        paths = sorted(source.glob("data-*.arrow"))
        if not paths:
            raise Refusal(f"{source} holds neither state.json nor data-*.arrow; give the folder in which they are")
        return paths
    try:
        names = [entry["filename"] for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refusal(f"{state} is damaged ({error!r}); download it again or remove it") from None
    for name in names:  # data from outside: it may not lead out of the folder
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+\.arrow", name)) or names.count(name) > 1:
            raise Refusal(f"{state} lists {name!r}, which is no name of an arrow file, or twice; download it again")
    return [source / name for name in names]


def _batches(path: Path) -> Iterator:
    """The record batches of a file, memory-mapped: no payload is read before it is used.

    Raises: Refusal for a file that is missing, truncated or has other columns.
    """
    pa = _pyarrow()
    try:
        with pa.memory_map(str(path)) as file:
            stream = pa.ipc.open_stream(file)
            _require_columns(stream.schema, path)
            for batch in stream:
                batch.validate(full=True)
                yield batch
            # Without its end, a stream that was cut between two batches looks whole.
            if file.tell() != file.size() or file.read_at(8, file.size() - 8) != END_OF_STREAM:
                raise Refusal(f"{path} is truncated: its stream has no end; download it again")
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise Refusal(f"{path} is missing, truncated or no arrow stream ({reason}); download it again") from None


def _require_columns(schema, path: Path) -> None:
    types = _pyarrow().types
    lacks = [name for name in COLUMNS.values() if name not in schema.names]
    if lacks:
        raise Refusal(f"{path} lacks the columns {', '.join(lacks)}; it has {', '.join(schema.names)}")
    for name in schema.names:
        kind = schema.types[schema.names.index(name)]
        fits = name not in COLUMNS.values() or types.is_binary(kind) or types.is_large_binary(kind)
        fits = fits and (name != "timestep" or types.is_integer(kind) or types.is_null(kind))
        if not fits or schema.names.count(name) > 1:
            raise Refusal(f"{path}: column {name} is {kind} or there twice; want binary encodings, integer timesteps")


def _timesteps(batch, split: str, path: Path, row: int) -> list[int | None]:
    """The timesteps of a batch that begins at `row` of its file: 0 to 7 for val, None for train. Raises: Refusal."""
    has = "timestep" in batch.schema.names
    values = batch.column("timestep").to_pylist() if has else [None] * batch.num_rows
    for i, value in enumerate(values):
        if value not in (range(TIMESTEPS) if split == "val" else (None,)):
            want = f"0 to {TIMESTEPS - 1}" if split == "val" else "none"
            raise Refusal(f"{path}, row {row + i}: timestep {value}, want {want}; is this the {split} split?")
    return values


def _blobs(batch, i: int, layout: Layout, where: str) -> dict[str, memoryview]:
    """The .npy files of the i-th sample of a batch, not copied. Raises: Refusal."""
    blobs = {}
    for member, column in COLUMNS.items():
        array = batch.column(column)
        _, ends, content = array.buffers()
        width = np.dtype(np.int64 if _pyarrow().types.is_large_binary(array.type) else np.int32)
        start, stop = np.frombuffer(ends, width, 2, (array.offset + i) * width.itemsize)
        blob = blobs[member] = memoryview(content or b"")[start:stop]
        head, shape = blob[:NPY_HEADER].tobytes(), layout.shapes[member]
        if len(blob) != NPY_HEADER + layout.payload_bytes[member] or head != npy_header(shape):
            raise Refusal(
                f"{where}: {column} ({len(blob)} bytes, {head.strip()!r}) is no .npy file of uint16 {shape} in C order;"
                " download it again, or give the --config of its model"
            )
    return blobs


# Beside the shards


def _convert_empty(source: Path, output: Path, split: str, layout: Layout) -> None:
    """Write output/empty_encodings as bf16 bits, unless it is there. Raises: Refusal, if training lacks them."""
    final, partial = output / "empty_encodings", output / f".empty_encodings.{split}.partial"
    if final.exists():
        shards.read_empty(final, layout)
        return
    if not source.is_dir():
        line = f"folder {source} of t5_empty.npy and clip_empty.npy does not exist; training needs it, see --empty"
        if split == "train":
            raise Refusal(line)
        print(f"note: {line}")
        return
    bits = shards.read_empty(source, layout)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for name, array in bits.items():
        np.save(partial / f"{name}_empty.npy", array)
        _sync(partial / f"{name}_empty.npy")
    partial.rename(final)


@contextmanager
def _claimed(job: Job) -> Iterator[None]:
    """Within it the folder of a job is ours, and its plan written down; dying gives it back. Raises: Refusal."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with (job.folder / PLAN).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal(f"{job.folder} is in use by another conversion; wait for it") from None
        file.seek(0)
        began = file.read()
        if began != job.plan():
            if any(job.folder.glob("*.tar")):
                raise Refusal(
                    f"{job.folder} was begun otherwise ({_difference(began, job.plan())}); convert the same source with"
                    " the same options, or remove the folder to begin again"
                )
            file.truncate(0)
            file.write(job.plan())
            file.flush()
            os.fsync(file.fileno())
        for path in job.folder.glob(".shard_*"):  # of processes that were killed
            path.unlink()
        yield


def _difference(began: str, plan: str) -> str:
    then, now = ([line.rstrip(",") for line in text.splitlines()] for text in (began, plan))
    gone, new = ([line for line in one if line not in other] for one, other in ((then, now), (now, then)))
    return f"with {', '.join(gone[:2]) or 'nothing'}, now {', '.join(new[:2]) or 'in another order'}"


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


# The shards, one process each


class Shared:
    """What all processes of a conversion share, without locks, as any of them may be killed."""

    written = None  # samples of each shard
    stop = None


def _write_missing(job: Job, workers: int) -> None:
    """Raises: Refusal; Fault; KeyboardInterrupt, once no process is at work any more."""
    missing = job.missing()
    todo = sum(len(job.samples(shard)) for shard in missing)
    bar = progress(total=job.count, initial=job.count - todo, desc=f"converting {job.split}", unit=" samples")
    spawn = multiprocessing.get_context("spawn")
    written, stop = spawn.RawArray("q", 1 + max(missing, default=0)), spawn.RawValue("b")
    pool = ProcessPoolExecutor(workers, spawn, _start_process, (written, stop))
    # Ctrl-C reaches every process. Here it sets a flag, as an exception could leave a lock held; there it is blocked.
    before = signal.signal(signal.SIGINT, lambda *_: setattr(stop, "value", True))
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        pending = {pool.submit(_write_shard, job, shard) for shard in missing}
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        while pending:
            done, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            bar.update(bar.initial + sum(written) - bar.n)
            for future in done:
                future.result()
    except BrokenProcessPool:
        raise Fault("a process was killed; if memory ran out, give the same command with fewer --workers") from None
    finally:
        stop.value = True
        pool.shutdown(cancel_futures=True)
        bar.close()
        signal.signal(signal.SIGINT, before)


def _start_process(written, stop) -> None:
    Shared.written, Shared.stop = written, stop
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Once the parent is killed, its folder is free for the next conversion."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _write_shard(job: Job, number: int) -> None:
    with ShardWriter(shard_path(job.folder, number)) as shard:
        for index, blobs, timestep in _samples(job, job.samples(number)):
            if Shared.stop.value:
                raise KeyboardInterrupt
            shard.add(key_of(job.split, index), blobs, timestep)
            Shared.written[number] += 1


def _samples(job: Job, wanted: range) -> Iterator[tuple[int, dict[str, memoryview], int | None]]:
    """(index, blobs, timestep) of each wanted sample, across batches and files. Raises: Refusal."""
    for file in job.files:
        if file.first >= wanted.stop or file.first + file.rows <= wanted.start:
            continue
        row = 0  # of the file, at which the batch begins
        for batch in _batches(file.path):
            first = file.first + row
            part = range(max(0, wanted.start - first), min(batch.num_rows, wanted.stop - first))
            timesteps = _timesteps(batch, job.split, file.path, row) if part else []
            for i in part:
                yield first + i, _blobs(batch, i, job.layout, f"{file.path}, row {row + i}"), timesteps[i]
            row += batch.num_rows
        if row != file.rows:
            raise Refusal(f"{file.path} had {file.rows} rows and now has {row}; remove {job.folder} and begin again")


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", type=Path, required=True, help="folder of state.json and data-*.arrow")
    add("--output", type=Path, required=True, help="folder in which to make SPLIT and empty_encodings")
    add("--split", choices=list(BENCHMARK), required=True)
    add("--expect-samples", type=_number_or_any, metavar="N|any", help="refuse another number (the benchmark's)")
    add("--per-shard", type=_number, default=PER_SHARD, metavar="N", help="samples (%(default)s)")
    add("--workers", type=_number, default=2, metavar="N", help="processes (%(default)s)")
    add("--empty", type=Path, metavar="DIR", help="of t5_empty.npy and clip_empty.npy (INPUT/../empty_encodings)")
    add("--config", metavar="FILE", help="whose model's sizes to expect (FLUX.1-schnell's)")


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _number_or_any(text: str) -> int:
    return 0 if text == "any" else _number(text)


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code. Raises: Refusal; Fault; OSError, as when the disk is full."""
    layout = shards.layout((config_file.load(args.config) if args.config else Config()).model)
    expect = BENCHMARK[args.split] if args.expect_samples is None else args.expect_samples
    empty = args.empty or args.input.resolve().parent / "empty_encodings"
    try:
        count = convert(args.input, args.output, args.split, layout, expect, args.per_shard, args.workers, empty)
    except KeyboardInterrupt:
        print("stopped; the same command goes on with the shards that are missing", file=sys.stderr)
        return 130
    print(f"{args.output / args.split}: {count} samples")
    return 0
