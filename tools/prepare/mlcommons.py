"""From the MLCommons' preprocessed arrow folders, cc12m_preprocessed and coco_preprocessed, to our shards.

    python -m tools.prepare mlcommons --input DIR/cc12m_preprocessed --output data/mlperf --split train
    python -m tools.prepare mlcommons --input DIR/coco_preprocessed --output data/mlperf --split val

The source is what `datasets.save_to_disk` writes: files data-00000-of-0000N.arrow, each an Arrow IPC stream
(arrow.apache.org/docs/format/Columnar.html) with a row for each sample. The columns t5_encodings, clip_encodings, mean
and logvar hold .npy files of bf16 bits, which the shards get byte for byte. DIR/empty_encodings becomes
OUTPUT/empty_encodings. The set grows in OUTPUT/SPLIT.partial; a stopped command makes the shards that are missing.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from flux_ref import shards
from flux_ref.errors import Refusal, package
from flux_ref.progress import progress
from flux_ref.schedule import TIMESTEPS
from flux_ref.shards import NPY_HEADER, PER_SHARD, Layout, key_of, new_shard, shard_path, write_empty
from tools.prepare import job

COLUMNS = {"t5": "t5_encodings", "clip": "clip_encodings", "mean": "mean", "logvar": "logvar"}  # of each member
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def arrow_files(source: Path) -> list[Path]:
    """The files of a folder, in order. Raises: Refusal if one is missing."""
    paths = sorted(source.glob("data-*.arrow"))
    names = [f"data-{number:05d}-of-{len(paths):05d}.arrow" for number in range(len(paths))]
    if not paths or [path.name for path in paths] != names:
        raise Refusal(f"{source} holds {len(paths)} files data-*.arrow, which are not all of one set; download all")
    return paths


def read_table(path: Path):
    """The rows of a file as a pyarrow.Table. It is memory-mapped: no payload is read before it is used.

    Raises: Refusal for a file that is truncated or has other columns.
    """
    pa = package("pyarrow", "reading arrow files")
    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
            # Without its end, a stream that was cut between two batches looks whole.
            if file.tell() != file.size() or file.read_at(8, file.size() - 8) != END_OF_STREAM:
                raise Refusal(f"{path} is truncated: its stream has no end; download it again")
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise Refusal(f"{path} is truncated or no arrow stream ({reason}); download it again") from None
    for name in COLUMNS.values():
        kinds = [field.type for field in table.schema if field.name == name]
        if len(kinds) != 1 or kinds[0] not in (pa.binary(), pa.large_binary()):
            columns = ", ".join(f"{field.name} ({field.type})" for field in table.schema)
            raise Refusal(f"{path}: want one column {name} of binary; the columns are {columns}")
    return table


def read_row(table, row: int, split: str, layout: Layout, path: Path) -> tuple[dict[str, memoryview], int | None]:
    """(the .npy files of a row, not copied; its timestep: 0 to 7 for val, None for train). Raises: Refusal."""
    timestep = table["timestep"][row].as_py() if "timestep" in table.column_names else None
    if timestep not in (range(TIMESTEPS) if split == "val" else [None]):
        want = f"0 to {TIMESTEPS - 1}" if split == "val" else "none"
        raise Refusal(f"{path}, row {row}: timestep {timestep!r}, want {want}; is this the {split} split?")
    blobs = {}
    for member, column in COLUMNS.items():
        blob = blobs[member] = memoryview(table[column][row].as_buffer() or b"")
        head = blob[:NPY_HEADER].tobytes()
        if len(blob) != layout.blob_bytes[member] or head != layout.npy_headers[member]:
            raise Refusal(
                f"{path}, row {row}: {column} ({len(blob)} bytes, {head.strip()!r}) is no .npy file of uint16"
                f" {layout.shapes[member]} in C order; download it again, or give the --config of its model"
            )
    return blobs, timestep


def read_rows(
    counts: dict[Path, int], wanted: range, split: str, layout: Layout
) -> Iterator[tuple[dict[str, memoryview], int | None]]:
    """`read_row` of each wanted sample, across files. counts: the rows of each file. Raises: Refusal."""
    first = 0
    for path, count in counts.items():
        here = range(max(wanted.start, first), min(wanted.stop, first + count))
        table = read_table(path) if here else None
        for index in here:
            yield read_row(table, index - first, split, layout, path)
        first += count


def read_empty(args: argparse.Namespace, layout: Layout) -> dict[str, np.ndarray]:
    """The encodings of the empty caption; {} if OUTPUT has them or if validation lacks them. Raises: Refusal."""
    source = args.input.resolve().parent / "empty_encodings"
    if (args.output / source.name).exists():
        return {}
    if source.exists():
        return shards.read_empty(source, layout)
    if args.split == "train":
        raise Refusal(f"{source} does not exist, and training needs it; put empty_encodings beside --input")
    print(f"note: {source} does not exist; training will need it")
    return {}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", type=Path, required=True, help="folder of data-*.arrow, beside empty_encodings")
    add("--output", type=Path, required=True, help="folder in which to make SPLIT and empty_encodings")
    add("--split", choices=("train", "val"), required=True)
    add("--per-shard", type=job.number, default=PER_SHARD, metavar="N", help="samples (%(default)s)")
    add("--workers", type=job.number, default=2, metavar="N", help="threads (%(default)s)")
    add("--config", metavar="FILE", help="expect the sizes of this config's model (FLUX.1-schnell's)")


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code. Raises: Refusal; OSError."""
    split, per_shard = args.split, args.per_shard
    final = args.output / split
    layout = shards.layout(job.config(args.config).model)
    job.require_new(final)  # before all rows are counted
    counts = {}
    for path in progress(arrow_files(args.input), desc=f"counting {args.input.name}", unit=" files", leave=False):
        table = read_table(path)
        counts[path] = len(table)
        if len(table):  # tells another model's samples before anything is written
            read_row(table, 0, split, layout, path)
    count = sum(counts.values())
    empty = read_empty(args, layout)
    listed = [[path.name, path.stat().st_size, counts[path]] for path in counts]
    made_from = {"split": split, "per_shard": per_shard, "shapes": layout.shapes, "files": listed}
    with job.growing(final, made_from) as folder:
        if empty:
            write_empty(args.output / "empty_encodings", empty)
        starts = {shard_path(folder / "set", number): start for number, start in enumerate(range(0, count, per_shard))}
        missing = [path for path in starts if not path.exists()]
        done = min(count, per_shard * (len(starts) - len(missing)))
        with progress(total=count, initial=done, desc=f"converting {split}", unit=" samples") as bar:

            def write_shard(path: Path, advance: job.Advance) -> None:
                wanted = range(starts[path], min(starts[path] + per_shard, count))
                with new_shard(path) as file:
                    for index, (blobs, timestep) in zip(wanted, read_rows(counts, wanted, split, layout)):
                        shards.add(file, key_of(split, index), blobs, timestep)
                        advance(1)

            job.each(write_shard, missing, args.workers, bar)
    print(f"{final}: {count:,} samples")
    return 0
