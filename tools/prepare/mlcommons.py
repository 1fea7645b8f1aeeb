"""From the MLCommons' preprocessed arrow folders, cc12m_preprocessed and coco_preprocessed, to our shards.

    python -m tools.prepare mlcommons --input DIR/cc12m_preprocessed --output data/mlperf --split train
    python -m tools.prepare mlcommons --input DIR/coco_preprocessed --output data/mlperf --split val

The source is what `datasets.save_to_disk` writes. state.json lists files in order. Each file is an Arrow IPC stream
(arrow.apache.org/docs/format/Columnar.html) with a row for each sample. Its columns t5_encodings, clip_encodings,
mean and logvar hold .npy files of bf16 bits. The shards get these files byte for byte. The set grows as in jobs.py.
DIR/empty_encodings becomes OUTPUT/empty_encodings.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flux_ref.benchmark import TRAIN_SAMPLES, VAL_SAMPLES
from flux_ref.errors import Refusal
from flux_ref.formats import outside, shards
from flux_ref.formats.shard_writer import PER_SHARD, key_of, new_shard, shard_path
from flux_ref.formats.shards import NPY_HEADER, Layout
from flux_ref.run.options import between, package
from flux_ref.run.progress import progress
from flux_ref.schedule import TIMESTEPS
from tools.prepare import jobs, options, pool

COLUMNS = {"t5": "t5_encodings", "clip": "clip_encodings", "mean": "mean", "logvar": "logvar"}  # of each member
BENCHMARK = {"train": TRAIN_SAMPLES, "val": VAL_SAMPLES}
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def _inspect(source: Path, split: str, layout: Layout) -> dict[Path, int]:
    """The number of rows of each file, after a look at its columns, timesteps and first row. Raises: Refusal."""
    rows = {}
    for path in progress(_paths(source), desc=f"counting {source.name}", unit=" files", leave=False):
        table = _table(path)
        _timesteps(table, split, path)
        if len(table):  # tells another model's samples at once; the other rows are checked when they are copied
            _blobs(table, 0, layout, path)
        rows[path] = len(table)
    return rows


def _paths(source: Path) -> list[Path]:
    """The arrow files of a folder: those in state.json, without it all by name. Raises: Refusal."""
    state = source / "state.json"
    names = sorted(path.name for path in source.glob("data-*.arrow"))
    if state.is_file():
        try:
            names = [entry["filename"] for entry in outside.read_json(state, "list of arrow files")["_data_files"]]
        except (KeyError, TypeError) as error:
            raise Refusal(f"{state} is damaged ({error!r}); download it again or remove it") from None
        for name in names:  # data from outside may not lead out of the folder
            if not (isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_.-]+\.arrow", name)):
                name = outside.shown(name)
                raise Refusal(f"{state} lists {name}, which is no name of an arrow file; download it again")
    if not names:
        raise Refusal(f"{source} holds neither state.json nor data-*.arrow; give the folder in which they are")
    numbered = sorted(name for name in names if re.fullmatch(r"data-[0-9]{5,9}-of-[0-9]{5,9}\.arrow", name))
    if numbered != [f"data-{number:05d}-of-{len(numbered):05d}.arrow" for number in range(len(numbered))]:
        raise Refusal(f"{source} holds {len(numbered)} arrow files such as {numbered[0]}; download all of one set")
    return [source / name for name in names]


def _table(path: Path):
    """The rows of a file as a pyarrow.Table. It is memory-mapped: no payload is read before it is used.

    Raises: Refusal for a file that is missing, truncated or has other columns.
    """
    pa = package("pyarrow", "reading arrow files")
    if path.exists() and not path.is_file():  # a pipe would wait for ever
        raise Refusal(f"{path} is not a regular file; download it again")
    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
            # Without its end, a stream that was cut between two batches looks whole.
            if file.tell() != file.size() or file.read_at(8, file.size() - 8) != END_OF_STREAM:
                raise Refusal(f"{path} is truncated: its stream has no end; download it again")
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise Refusal(f"{path} is missing, truncated or no arrow stream ({reason}); download it again") from None
    for name in COLUMNS.values():
        kinds = [field.type for field in table.schema if field.name == name]
        if len(kinds) != 1 or kinds[0] not in (pa.binary(), pa.large_binary()):
            columns = ", ".join(f"{field.name} ({field.type})" for field in table.schema)
            raise Refusal(f"{path}: want one column {name} of binary; the columns are {columns}")
    return table


def _timesteps(table, split: str, path: Path) -> list[int | None]:
    """The timesteps of a file: 0 to 7 for val, None for train. Raises: Refusal."""
    index = table.schema.get_field_index("timestep")  # -1 for none, or for several
    values = [None] * len(table) if index < 0 else table.column(index).to_pylist()
    wanted = range(TIMESTEPS) if split == "val" else [None]
    for row, value in enumerate(values):
        if type(value) not in (int, type(None)) or value not in wanted:
            want = f"0 to {TIMESTEPS - 1}" if split == "val" else "none"
            raise Refusal(f"{path}, row {row}: timestep {value!r}, want {want}; is this the {split} split?")
    return values


def _blobs(table, row: int, layout: Layout, path: Path) -> dict[str, memoryview]:
    """The .npy files of a row, not copied. Raises: Refusal."""
    blobs = {}
    for member, column in COLUMNS.items():
        blob = blobs[member] = memoryview(table.column(column)[row].as_buffer() or b"")
        head = blob[:NPY_HEADER].tobytes()
        shape = layout.shapes[member]
        if len(blob) != NPY_HEADER + layout.payload_bytes[member] or head != layout.npy_headers[member]:
            raise Refusal(
                f"{path}, row {row}: {column} ({len(blob)} bytes, {head.strip()!r}) is no .npy file of uint16 {shape}"
                " in C order; download it again, or give the --config of its model"
            )
    return blobs


def _samples(
    rows: dict[Path, int], wanted: range, split: str, layout: Layout
) -> Iterator[tuple[int, dict[str, memoryview], int | None]]:
    """(index, blobs, timestep) of each wanted sample, across files. rows: of each file. Raises: Refusal."""
    first = 0
    for path, count in rows.items():
        here = range(max(wanted.start, first), min(wanted.stop, first + count))
        if here:
            table = _table(path)
            if len(table) != count:
                raise Refusal(f"{path} had {count} rows and now has {len(table)}; start again once it is at rest")
            timesteps = _timesteps(table, split, path)
            for index in here:
                yield index, _blobs(table, index - first, layout, path), timesteps[index - first]
        first += count


def _empty(args: argparse.Namespace, layout: Layout) -> dict[str, np.ndarray] | None:
    """The encodings of the empty caption, unless OUTPUT has them or validation lacks them. Raises: Refusal."""
    made, source = (folder / "empty_encodings" for folder in (args.output, args.input.resolve().parent))
    if made.exists():
        shards.read_empty(made, layout)
        return None
    if source.exists():
        return shards.read_empty(source, layout)
    if args.split == "train":
        raise Refusal(f"{source} does not exist, and training needs it; put empty_encodings beside --input")
    print(f"note: {source} does not exist; training will need it")
    return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", type=Path, required=True, help="folder of state.json and data-*.arrow, beside empty_encodings")
    add("--output", type=Path, required=True, help="folder in which to make SPLIT and empty_encodings")
    add("--split", choices=list(BENCHMARK), required=True)
    add(
        "--expect-samples", type=between(0, 10**9), metavar="N", help="refuse another number; 0: none (the benchmark's)"
    )
    add("--per-shard", type=options.number, default=PER_SHARD, metavar="N", help="samples (%(default)s)")
    add("--workers", type=options.number, default=2, metavar="N", help="threads (%(default)s)")
    add("--config", metavar="FILE", help="expect the sizes of this config's model (FLUX.1-schnell's)")


def run(args: argparse.Namespace) -> int:
    """Write OUTPUT/SPLIT, and OUTPUT/empty_encodings unless it is there; returns the exit code.

    Finished shards are kept whatever happens. Raises: Refusal; OSError.
    """
    split = args.split
    final = args.output / args.split
    layout = shards.layout(options.config(args.config).model)
    jobs.require_new(final)
    rows = _inspect(args.input, split, layout)
    count = sum(rows.values())
    expect = BENCHMARK[split] if args.expect_samples is None else args.expect_samples
    if count == 0 or expect not in (0, count):
        raise Refusal(
            f"{args.input} holds {count} samples, the {split} split should have {expect or 'some'}; download what is"
            f" missing" + (f", or give --expect-samples {count}" if count else "")
        )
    encodings = _empty(args, layout)
    given = {"split": split, "per_shard": args.per_shard, "shapes": layout.shapes}
    listed = [[path.name, path.stat().st_size, rows[path]] for path in rows]
    with jobs.claimed(final, {"options": given, "files": listed}):
        if encodings:
            jobs.write_empty(final, encodings)
        missing = jobs.missing(final, count, args.per_shard)
        done = count - sum(map(len, missing.values()))
        with progress(total=count, initial=done, desc=f"converting {split}", unit=" samples") as bar:

            def write_shard(number: int, advance: pool.Advance) -> None:
                with new_shard(shard_path(jobs.growing(final), number)) as shard:
                    for index, blobs, timestep in _samples(rows, missing[number], split, layout):
                        shard.add(key_of(split, index), blobs, timestep)
                        advance(1)

            pool.run(write_shard, list(missing), args.workers, bar)
    print(f"{final}: {count} samples")
    return 0
