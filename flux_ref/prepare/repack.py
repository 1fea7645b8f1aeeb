"""Bringing shards that another tool wrote into the layout of shards.py.

    python -m flux_ref.prepare repack SRC DST

SRC holds tars in WebDataset's order: the members of a sample follow each other and share the name up to the first
dot. Their order inside the sample does not matter. Other members are left out. DST appears once it is whole.
"""

import argparse
import tarfile
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from tqdm import tqdm

from flux_ref.errors import Refusal
from flux_ref.formats import files, shard_writer, shards
from flux_ref.formats.shards import END_BYTES, MEMBERS, NPY_HEADER, RECORD, BadSample, Layout
from flux_ref.prepare import options
from flux_ref.run.progress import progress

KINDS = ("json", *(f"{member}.bytes" for member in MEMBERS))
MAX_KEY = 80  # bytes, so that every member's name fits into a tar header


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("src", type=Path, metavar="SRC", help="folder of *.tar shards of one split")
    add("dst", type=Path, metavar="DST", help="folder to make")
    add("--per-shard", type=options.number, default=shard_writer.PER_SHARD, metavar="N", help="samples (%(default)s)")
    add("--config", metavar="FILE", help="expect the sizes of this config's model (FLUX.1-schnell's)")


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code. Raises: Refusal; OSError."""
    layout, paths = shards.layout(options.config(args.config).model), sorted(args.src.glob("*.tar"))
    if not paths:
        raise Refusal(f"{args.src} holds no *.tar shard")
    if args.dst.exists():
        raise Refusal(f"{args.dst} exists; remove it or choose another folder")
    with files.whole(args.dst) as partial, progress(desc="repacking", unit=" samples") as bar:
        samples = (sample for path in paths for sample in _samples(path, layout, bar))
        count = shard_writer.write_blobs(partial, samples, args.per_shard)
        if not count:
            raise Refusal(f"{args.src} holds no sample of {', '.join(KINDS)}")
    print(f"{args.dst}: {count} samples")
    return 0


def _samples(path: Path, layout: Layout, bar: tqdm) -> Iterator[shard_writer.Blobs]:
    """The samples of a tar. Raises: Refusal."""
    try:
        with tarfile.open(path, "r:") as archive:
            named = ((*Path(member.name).name.partition(".")[::2], member) for member in archive if member.isreg())
            wanted = (entry for entry in named if entry[1] in KINDS)
            for key, group in groupby(wanted, lambda entry: entry[0]):
                contents = [(kind, archive.extractfile(member).read()) for _, kind, member in group]
                archive.members = []  # which it would keep for ever
                yield _checked(key, contents, layout, f"shard {path}, key {key!r}")
                bar.update()
            archive.fileobj.seek(archive.offset)
            rest = archive.fileobj.read(RECORD + END_BYTES)
    except (tarfile.TarError, OSError) as error:
        raise Refusal(f"shard {path} is no whole tar file: {error}") from None
    if len(rest) < END_BYTES or any(rest):
        raise Refusal(f"shard {path} is truncated or damaged at byte {archive.offset}; copy it again")


def _checked(key: str, contents: list[tuple[str, bytes]], layout: Layout, where: str) -> shard_writer.Blobs:
    kinds, files_by_kind = [kind for kind, _ in contents], dict(contents)
    if sorted(kinds) != sorted(KINDS):
        raise Refusal(f"{where} has the members {', '.join(kinds)}; want each of {', '.join(KINDS)} once")
    if not key.isprintable() or len(key.encode()) > MAX_KEY:
        raise Refusal(f"{where}: a key has at most {MAX_KEY} printable characters")
    blobs = {member: files_by_kind[f"{member}.bytes"] for member in MEMBERS}
    for member, blob in blobs.items():
        if blob[:NPY_HEADER] != layout.npy_headers[member] or len(blob) != NPY_HEADER + layout.payload_bytes[member]:
            raise Refusal(f"{where}: {member} is no .npy file of uint16 {layout.shapes[member]}; give its --config")
    try:
        meta = shards.parse_meta(key, files_by_kind["json"], where)
    except BadSample as error:
        raise Refusal(str(error)) from None
    return key, blobs, meta.timestep, meta.caption
