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

from flux_ref import dataset
from flux_ref.cli import Refusal, one_line, progress
from flux_ref.dataset import Arrays, Meta, Sample, SampleLayout
from flux_ref.files import matching
from flux_ref.schedule import TIMESTEPS
from tools.prepare import common

COLUMNS = {  # of each member
    "t5": "t5_encodings",
    "clip": "clip_encodings",
    "mean": "mean",
    "logvar": "logvar",
}
PER_SHARD = 10_000  # samples, as in the public conversions: 21.7 GB
THREADS = 2  # a disk serves no more writers better
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


def arrow_files(source: Path) -> list[Path]:
    """The files of a folder, in order. Raises: Refusal if one is missing."""
    paths = matching(source, "data-*.arrow")
    count = len(paths)
    names = [f"data-{number:05d}-of-{count:05d}.arrow" for number in range(count)]
    if not paths or [path.name for path in paths] != names:
        raise Refusal(f"{source} holds {count} files data-*.arrow, which are not all of one set; download all")
    return paths


def read_table(path: Path):
    """The rows of a file as a pyarrow.Table. It is memory-mapped: no payload is read before it is used.

    Raises: Refusal for a file that is truncated.
    """
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
            # Without its end, a stream that was cut between two batches looks whole.
            if file.tell() != file.size() or file.read_at(8, file.size() - 8) != END_OF_STREAM:
                raise ValueError("its stream has no end")
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise Refusal(f"{path} is truncated or no arrow stream ({one_line(error)}); download it again") from None
    return table


def read_row(table, row: int, split: str, layout: SampleLayout, path: Path) -> tuple[int | None, Arrays]:
    """(the timestep of a row: 0 to 7 for val, None for train; its bf16 bits, not copied). Raises: Refusal."""
    where = f"{path}, row {row}"
    timestep = table["timestep"][row].as_py() if "timestep" in table.column_names else None
    allowed = [*range(TIMESTEPS)] if split == "val" else [None]
    if timestep not in allowed:
        raise Refusal(f"{where}: timestep {timestep!r}, want one of {allowed}; is this the {split} split?")
    members = {}
    for member, column in COLUMNS.items():
        try:
            blob = memoryview(table[column][row].as_buffer() or b"")
        except (KeyError, AttributeError):
            columns = ", ".join(f"{field.name} ({field.type})" for field in table.schema)
            raise Refusal(f"{path}: want one column {column} of binary; the columns are {columns}") from None
        try:
            members[member] = layout.numbers(member, blob)
        except ValueError as error:
            raise Refusal(f"{where}: {error}; download it again, or give the --config of its model") from None
    return timestep, members


def read_samples(counts: dict[Path, int], wanted: range, split: str, layout: SampleLayout) -> Iterator[Sample]:
    """The wanted samples, by their places in all files together. counts: the rows of each file. Raises: Refusal."""
    first = 0
    for path, count in counts.items():
        here = range(max(wanted.start, first), min(wanted.stop, first + count))
        table = read_table(path) if here else None
        for index in here:
            timestep, members = read_row(table, index - first, split, layout, path)
            yield Meta(dataset.key_of(split, index), timestep), members
        first += count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", type=Path, required=True, help="folder of data-*.arrow, beside empty_encodings")
    add("--output", type=Path, required=True, help="folder in which to make SPLIT and empty_encodings")
    add("--split", choices=("train", "val"), required=True)
    common.add_config(parser)


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code. Raises: Refusal; OSError."""
    split = args.split
    final = args.output / split
    layout = dataset.sample_layout(args.config.model)
    common.require_new(final)  # before all rows are counted
    paths = arrow_files(args.input)
    counts = {}
    for path in progress(paths, desc=f"counting {args.input.name}", unit=" files", leave=False):
        table = read_table(path)
        counts[path] = len(table)
        if len(table):  # tells another model's samples before anything is written
            read_row(table, 0, split, layout, path)
    count = sum(counts.values())
    source = args.input.resolve().parent / "empty_encodings"
    empty = {}
    if not (args.output / source.name).exists() and (split == "train" or source.exists()):
        empty = dataset.read_empty(source, layout)

    made_from = {
        "split": split,
        "per_shard": PER_SHARD,
        "shapes": layout.shapes,
        "files": [[path.name, path.stat().st_size, rows] for path, rows in counts.items()],
    }
    with common.growing(final, made_from) as folder:
        if empty:
            dataset.write_empty(args.output / source.name, empty)

        def write_shard(first: int) -> None:
            path = dataset.shard_path(folder / "set", first // PER_SHARD)
            if not path.exists():
                wanted = range(first, first + PER_SHARD)
                dataset.write(path, read_samples(counts, wanted, split, layout))

        firsts = range(0, count, PER_SHARD)
        written = common.each(write_shard, firsts, THREADS)
        for _ in progress(written, total=len(firsts), desc=f"converting {split}", unit=" shards"):
            pass
    print(f"{final}: {count:,} samples")
    return 0
