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
            members = ((Path(member.name).name.partition("."), member) for member in archive if member.isreg())
            for key, group in groupby(members, lambda pair: pair[0][0]):
                kinds, contents = [], {}
                for (_, _, kind), member in group:
                    kinds += [kind] * (kind in KINDS)
                    contents[kind] = archive.extractfile(member).read() if kind in KINDS else b""
                archive.members = []  # which it would keep for ever
                if kinds:
                    yield _checked(key, kinds, contents, layout, f"shard {path}, key {key!r}")
                    bar.update()
            archive.fileobj.seek(archive.offset)
            rest = archive.fileobj.read(RECORD + END_BYTES)
    except (tarfile.TarError, OSError) as error:
        raise Refusal(f"shard {path} is no whole tar file: {error}") from None
    if len(rest) < END_BYTES or any(rest):
        raise Refusal(f"shard {path} is truncated or damaged at byte {archive.offset}; copy it again")


def _checked(key: str, kinds: list[str], contents: dict[str, bytes], layout: Layout, where: str) -> shard_writer.Blobs:
    if sorted(kinds) != sorted(KINDS):
        raise Refusal(f"{where} has the members {', '.join(kinds)}; want each of {', '.join(KINDS)} once")
    if not key.isprintable() or len(key.encode()) > MAX_KEY:
        raise Refusal(f"{where}: a key has at most {MAX_KEY} printable characters")
    blobs = {member: contents[f"{member}.bytes"] for member in MEMBERS}
    for member, blob in blobs.items():
        if blob[:NPY_HEADER] != layout.npy_headers[member] or len(blob) != NPY_HEADER + layout.payload_bytes[member]:
            raise Refusal(f"{where}: {member} is no .npy file of uint16 {layout.shapes[member]}; give its --config")
    try:
        meta = shards.parse_meta(key, contents["json"], where)
    except BadSample as error:
        raise Refusal(str(error)) from None
    return key, blobs, meta.timestep, meta.caption
