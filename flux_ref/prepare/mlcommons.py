"""From the MLCommons' preprocessed arrow folders, cc12m_preprocessed and coco_preprocessed, to our shards.

    python -m flux_ref.prepare mlcommons --input DIR/cc12m_preprocessed --output data/mlperf --split train
    python -m flux_ref.prepare mlcommons --input DIR/coco_preprocessed --output data/mlperf --split val

The source is what `datasets.save_to_disk` writes. state.json lists files in order. Each file is an Arrow IPC stream
(arrow.apache.org/docs/format/Columnar.html) with a row for each sample. Its columns t5_encodings, clip_encodings,
mean and logvar hold .npy files of bf16 bits. The shards get these files byte for byte. The set grows as in jobs.py.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from flux_ref.benchmark import facts
from flux_ref.errors import Refusal
from flux_ref.formats import shards
from flux_ref.formats.shard_writer import PER_SHARD, key_of, new_shard, shard_path
from flux_ref.formats.shards import NPY_HEADER, Layout
from flux_ref.prepare import jobs, options, pool
from flux_ref.run.progress import progress
from flux_ref.schedule import TIMESTEPS

COLUMNS = {"t5": "t5_encodings", "clip": "clip_encodings", "mean": "mean", "logvar": "logvar"}  # of each member
BENCHMARK = {"train": facts.TRAIN_SAMPLES, "val": facts.VAL_SAMPLES}
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class ArrowFile:
    """One file of the source. samples: their numbers in the whole set."""

    path: Path
    samples: range


@dataclass(frozen=True)
class Conversion:
    """All that a process must know. final: the folder that the set becomes."""

    files: list[ArrowFile]
    final: Path
    split: str
    layout: Layout


# The source


def _inspect(source: Path, split: str, layout: Layout, expect: int) -> list[ArrowFile]:
    """The files of a folder, after a look at the columns, rows and timesteps of each. Raises: Refusal."""
    files, first, timesteps = [], 0, Counter()
    for path in progress(_paths(source), desc=f"counting {source.name}", unit=" files", leave=False):
        table = _table(path)
        timesteps.update(_timesteps(table, split, path))
        if len(table):  # tells another model's samples at once; the other rows are checked when they are copied
            _blobs(table, 0, layout, path)
        files.append(ArrowFile(path, range(first, first + len(table))))
        first += len(table)
    if first == 0:
        raise Refusal(f"{source} holds no sample")
    if expect not in (0, first):
        raise Refusal(
            f"{source} holds {first} samples, the {split} split should have {expect}; download what is missing,"
            f" or give --expect-samples {first}"
        )
    share = BENCHMARK["val"] // TIMESTEPS
    if (split, expect) == ("val", BENCHMARK["val"]) and set(timesteps.values()) != {share}:
        counts = ", ".join(f"{count} of {timestep}" for timestep, count in sorted(timesteps.items()))
        raise Refusal(
            f"{source} holds timesteps {counts}, want {share} of each; give --expect-samples any to take them"
        )
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
    for name in names:  # data from outside may not lead out of the folder
        if not (isinstance(name, str) and re.fullmatch(r"[\w.-]+\.arrow", name)) or names.count(name) > 1:
            raise Refusal(f"{state} lists {name!r}, which is no name of an arrow file, or twice; download it again")
    return [source / name for name in names]


def _table(path: Path):
    """The rows of a file as a pyarrow.Table. It is memory-mapped: no payload is read before it is used.

    Raises: Refusal for a file that is missing, truncated or has other columns.
    """
    pa = options.package("pyarrow", "reading arrow files")
    try:
        with pa.memory_map(str(path)) as file:
            stream = pa.ipc.open_stream(file)
            _require_columns(stream.schema, path, pa.types)
            table = stream.read_all()
            # Without its end, a stream that was cut between two batches looks whole.
            if file.tell() != file.size() or file.read_at(8, file.size() - 8) != END_OF_STREAM:
                raise Refusal(f"{path} is truncated: its stream has no end; download it again")
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise Refusal(f"{path} is missing, truncated or no arrow stream ({reason}); download it again") from None
    return table


def _require_columns(schema, path: Path, types: ModuleType) -> None:
    lacks = [name for name in COLUMNS.values() if name not in schema.names]
    if lacks:
        raise Refusal(f"{path} lacks the columns {', '.join(lacks)}; it has {', '.join(schema.names)}")
    for name, kind in zip(schema.names, schema.types):
        fits = name not in COLUMNS.values() or types.is_binary(kind) or types.is_large_binary(kind)
        fits = fits and (name != "timestep" or types.is_integer(kind) or types.is_null(kind))
        if not fits or schema.names.count(name) > 1:
            raise Refusal(f"{path}: column {name} is {kind} or there twice; want binary encodings, integer timesteps")


def _timesteps(table, split: str, path: Path) -> list[int | None]:
    """The timesteps of a file: 0 to 7 for val, None for train. Raises: Refusal."""
    has = "timestep" in table.schema.names
    values = table.column("timestep").to_pylist() if has else [None] * len(table)
    for row, value in enumerate(values):
        if value not in (range(TIMESTEPS) if split == "val" else (None,)):
            want = f"0 to {TIMESTEPS - 1}" if split == "val" else "none"
            raise Refusal(f"{path}, row {row}: timestep {value}, want {want}; is this the {split} split?")
    return values


def _blobs(table, row: int, layout: Layout, path: Path) -> dict[str, memoryview]:
    """The .npy files of a row, not copied. Raises: Refusal."""
    blobs = {}
    for member, column in COLUMNS.items():
        blob = blobs[member] = memoryview(table.column(column)[row].as_buffer() or b"")
        head, shape = blob[:NPY_HEADER].tobytes(), layout.shapes[member]
        if len(blob) != NPY_HEADER + layout.payload_bytes[member] or head != layout.npy_headers[member]:
            raise Refusal(
                f"{path}, row {row}: {column} ({len(blob)} bytes, {head.strip()!r}) is no .npy file of uint16 {shape}"
                " in C order; download it again, or give the --config of its model"
            )
    return blobs


def _empty(source: Path, final: Path, split: str, layout: Layout) -> dict | None:
    """The encodings of the empty caption, unless they are there already. Raises: Refusal, if training lacks them."""
    if final.exists():
        shards.read_empty(final, layout)
        return None
    if source.is_dir():
        return shards.read_empty(source, layout)
    line = f"folder {source} of t5_empty.npy and clip_empty.npy does not exist; training needs it, see --empty"
    if split == "train":
        raise Refusal(line)
    print(f"note: {line}")
    return None


# The shards, one process each


def _write_shard(task: tuple[Conversion, int, range], advance: pool.Advance) -> None:
    conversion, number, wanted = task
    with new_shard(shard_path(jobs.growing(conversion.final), number)) as shard:
        for index, blobs, timestep in _samples(conversion, wanted):
            shard.add(key_of(conversion.split, index), blobs, timestep)
            advance(1)


def _samples(conversion: Conversion, wanted: range) -> Iterator[tuple[int, dict[str, memoryview], int | None]]:
    """(index, blobs, timestep) of each wanted sample, across files. Raises: Refusal."""
    for file in conversion.files:
        part = range(max(wanted.start, file.samples.start), min(wanted.stop, file.samples.stop))
        if not part:
            continue
        table = _table(file.path)
        if len(table) != len(file.samples):
            raise Refusal(
                f"{file.path} had {len(file.samples)} rows and now has {len(table)}; start again once it is at rest"
            )
        timesteps = _timesteps(table, conversion.split, file.path)
        for index in part:
            row = index - file.samples.start
            yield index, _blobs(table, row, conversion.layout, file.path), timesteps[row]


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", type=Path, required=True, help="folder of state.json and data-*.arrow")
    add("--output", type=Path, required=True, help="folder in which to make SPLIT and empty_encodings")
    add("--split", choices=list(BENCHMARK), required=True)
    add("--expect-samples", type=options.number_or_any, metavar="N|any", help="refuse another number (the benchmark's)")
    add("--per-shard", type=options.number, default=PER_SHARD, metavar="N", help="samples (%(default)s)")
    add("--workers", type=options.number, default=2, metavar="N", help="processes (%(default)s)")
    add("--empty", type=Path, metavar="DIR", help="of t5_empty.npy and clip_empty.npy (INPUT/../empty_encodings)")
    add("--config", metavar="FILE", help="expect the sizes of this config's model (FLUX.1-schnell's)")


def run(args: argparse.Namespace) -> int:
    """Write OUTPUT/SPLIT, and OUTPUT/empty_encodings unless it is there; returns the exit code.

    Finished shards are kept whatever happens. Raises: Refusal; Fault if a process was killed; OSError.
    """
    final, layout = args.output / args.split, shards.layout(options.config(args.config).model)
    jobs.require_new(final)
    expect = BENCHMARK[args.split] if args.expect_samples is None else args.expect_samples
    files = _inspect(args.input, args.split, layout, expect)
    empty = args.empty or args.input.resolve().parent / "empty_encodings"
    encodings, count = _empty(empty, args.output / "empty_encodings", args.split, layout), files[-1].samples.stop
    given = {"split": args.split, "per_shard": args.per_shard, "shapes": layout.shapes}
    listed = [[file.path.name, file.path.stat().st_size, len(file.samples)] for file in files]
    with jobs.claimed(final, {"options": given, "files": listed}):
        if encodings:
            jobs.write_empty(final, encodings)
        conversion, missing = Conversion(files, final, args.split, layout), jobs.missing(final, count, args.per_shard)
        done = count - sum(map(len, missing.values()))
        with progress(total=count, initial=done, desc=f"converting {args.split}", unit=" samples") as bar:
            pool.run(_write_shard, [(conversion, *shard) for shard in missing.items()], args.workers, bar)
    print(f"{final}: {count} samples")
    return 0
