"""Checking a data set before a job relies on it.   python -m tools.prepare verify DIR [--fast] [--workers K] ...

DIR holds shards of the layout in shards.py, or train/, val/ and empty_encodings/. Every sample is read by the reader
of training; its values must be plausible. Then come totals, repeated keys and the SHA-256 of every file. The first pass
that finds no problem writes DIR/manifest.sha256, which `sha256sum -c` takes. Later passes compare with the manifest;
nothing else is ever written. --fast reads names, sizes and the first and last sample of each shard, as a run does.
Exit codes: 0 no problem, 1 a problem, 2 DIR or its manifest cannot be read.
"""

import argparse
import hashlib
import os
import re
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flux_ref.errors import Refusal
from flux_ref.formats import files, outside, shards
from flux_ref.formats.energon import META
from flux_ref.formats.shards import MEMBERS, BadSample, Layout, Shard
from flux_ref.run.progress import progress
from flux_ref.schedule import TIMESTEPS
from tools.prepare import manifest, options, pool
from tools.prepare.manifest import MANIFEST

EMPTY = "empty_encodings"
SPLITS = ("train", "val")
SHOWN = 20  # lines per kind of problem
OTHER_BYTES = 2**36  # of a file that is no shard
WANTED = {  # the timesteps of each split, in words and as values
    "train": ("none", (None,)),
    "val": (f"0 to {TIMESTEPS - 1}", range(TIMESTEPS)),
    "any": (f"none or 0 to {TIMESTEPS - 1}", (None, *range(TIMESTEPS))),
}
# Far beyond real data, yet random bf16 are sure to leave these ranges. T5's outputs lie in -7 .. 3 (black-forest-labs/
# flux issue 472), CLIP's in the tens; a latent's standard deviation is 1 / latents.SCALE = 2.8. Diffusers clamps logvar
# to -30 .. 20, BFL's autoencoder does not.
PLAUSIBLE = {"t5": (-1e3, 1e3), "clip": (-1e3, 1e3), "mean": (-1e3, 1e3), "logvar": (-100.0, 20.0)}


class Problems(list):
    """What is wrong: pairs of a kind and a line."""

    def add(self, kind: str, where: object, what: str = "") -> None:
        """where: a place, or an error whose message says all."""
        line = f"{where}: {what}" if what else str(where)
        self.append((kind, outside.printable(line)))


@dataclass
class Report:
    """What a file holds. split: train, val or any; "" for a file that is no shard."""

    path: Path
    split: str
    bytes: int = 0
    samples: int = 0
    sha256: str = ""  # "" if not all was read
    keys: list[tuple[int, str]] = field(default_factory=list)  # position and key of the samples that were read
    timesteps: Counter[int | None] = field(default_factory=Counter)
    problems: Problems = field(default_factory=Problems)


# One file


def look(path: Path, split: str, fast: bool, layout: Layout, advance: pool.Advance) -> Report:
    """Look at one file. fast: at its first and last sample only. advance: gets the number of bytes read."""
    report = Report(path, split)
    try:
        if not path.is_file():  # a FIFO would wait for ever
            raise Refusal(f"{path} is no file")
        report.bytes = path.stat().st_size
        with ExitStack() as opened:
            shard = _opened(report, layout, opened) if split else None
            if fast:
                for position in sorted({0, report.samples - 1}) if shard else ():
                    _look_at_sample(report, shard, position, layout.rows())
            else:
                _read(report, shard, layout, advance)
    except (Refusal, OSError) as error:
        report.problems.add("unreadable", error)
    return report


def _opened(report: Report, layout: Layout, opened: ExitStack) -> Shard | None:
    """The shard, if its samples can be found."""
    try:
        shard = Shard(report.path, layout)
        shard.open()
        opened.callback(shard.close)
        report.samples = shard.count
        shard.require_end()
    except (Refusal, BadSample) as error:
        report.problems.add("layout", error)
    return shard if report.samples else None


def _read(report: Report, shard: Shard | None, layout: Layout, advance: pool.Advance) -> None:
    """Read all bytes of a file, and all samples if it is a shard. Raises: Refusal; OSError."""
    if not shard and report.bytes > OTHER_BYTES:
        raise Refusal(f"{report.path} has {report.bytes:,} bytes, which no file beside sound shards has")
    rows = layout.rows()
    digest = hashlib.sha256()
    chunk = memoryview(bytearray(layout.stride))  # of a shard a sample
    position = 0
    with report.path.open("rb", buffering=0) as file:
        while count := file.readinto(chunk):
            digest.update(chunk[:count])
            if position < report.samples:  # its bytes are in the page cache now
                _look_at_sample(report, shard, position, rows)
            position += 1
            advance(count)
    report.sha256 = digest.hexdigest()


def _look_at_sample(report: Report, shard: Shard, position: int, rows: dict[str, np.ndarray]) -> None:
    try:
        meta = shard.read(position, rows)
    except BadSample as error:
        report.problems.add("bad sample", error)
        return
    where = f"{shard.where(position)}, key {meta.key}"
    for name in MEMBERS:
        if problem := implausible(name, rows[name]):
            report.problems.add("values", where, problem)
    words, wanted = WANTED[report.split]
    if meta.timestep in wanted:
        report.timesteps[meta.timestep] += 1
    else:
        report.problems.add("timestep", where, f"has timestep {meta.timestep}, want {words}")
    report.keys.append((position, meta.key))


def implausible(name: str, bits: np.ndarray) -> str:
    """What is wrong with the values of a member, given as bf16 bits; "" if nothing is."""
    # The largest positive value has the largest bits as a signed number, the lowest negative one as an unsigned number.
    extremes = shards.from_bf16_bits(np.array([bits.view(np.int16).max(), bits.max()]).astype(np.uint16))
    least, most = PLAUSIBLE[name]
    worst = next((value for value in extremes if not least <= value <= most), None)
    if worst is not None:
        return f"{name} holds {worst:.3g}, want values from {least:g} to {most:g}"
    return "" if extremes.any() else f"{name} is all zeros"


# All files


def _folders(root: Path, problems: Problems) -> dict[str, Path]:
    """The folders of shards, by what they hold: train, val or any. Raises: Refusal."""
    if not root.is_dir():
        raise Refusal(f"{root} is no folder")
    inside = {name: root / name for name in SPLITS if (root / name).is_dir()}
    if not inside or any(root.glob("*.tar")):
        name = root.resolve().name
        return {name if name in SPLITS else "any": root}
    for name in SPLITS if (root / META).is_dir() else (*SPLITS, EMPTY):  # Energon's folders have EMPTY beside them
        if not (root / name).is_dir():
            problems.add("missing", root / name, "there is no such folder; a single set is verified by its own path")
    return inside


def _shards(folder: Path, problems: Problems) -> list[Path]:
    """The shards of a folder, after a look at the numbers in their names."""
    paths = sorted(folder.glob("*.tar"))
    if not paths:
        problems.add("missing", folder, "holds no *.tar shard")
    ends = [re.search(r"([0-9]+)\.tar$", path.name) for path in paths]
    for path, end in zip(paths, ends):
        if not end:
            problems.add("file name", path, "does not end with a number")
    numbers = {int(end[1]) for end in ends if end}
    for number in sorted(numbers):
        if number and number - 1 not in numbers:
            problems.add("missing", folder, f"there is no shard {number - 1}, although there is shard {number}")
    return paths


def _others(root: Path, known: set[Path], problems: Problems) -> list[Path]:
    """All other files, because the manifest covers them too. Raises: OSError."""
    others = []
    for path in manifest.walk(root):
        is_manifest = path.parent == root and MANIFEST in path.name
        if path not in known and not is_manifest and not path.is_dir():  # links to folders are not followed
            others.append(path)
        if not manifest.fits(str(path.relative_to(root))):
            problems.add("file name", path, f"does not fit into a line of {MANIFEST}")
    return others


def _check_keys(reports: list[Report], problems: Problems) -> None:
    """A key comes once. A running number may come again in another split."""
    first: dict[tuple[str, str], str] = {}
    for report in reports:
        for position, key in report.keys:
            split = report.split if key.isascii() and key.isdecimal() else ""
            place = f"{report.path}, sample {position}, key {key}"
            other = first.setdefault((split, key), place)
            if other != place:
                problems.add("repeated key", place, f"so is the key of {other}")


def _sum_up(folder: Path, split: str, reports: list[Report], args: argparse.Namespace, problems: Problems) -> str:
    """The line about a folder of shards."""
    reports = [report for report in reports if report.split == split]
    samples = sum(report.samples for report in reports)
    size = sum(report.bytes for report in reports)
    line = f"{split}: {samples:,} samples in {len(reports)} shards, {size:,} bytes"
    expect = getattr(options.config(args.config).data, f"{split}_count", 0)
    if expect not in (0, samples):
        problems.add("sample count", folder, f"holds {samples:,} samples, want {expect:,}")
    if split != "val":
        return line
    timesteps = sum((report.timesteps for report in reports), Counter())
    counts = [timesteps[k] for k in range(TIMESTEPS)]
    if max(counts) > min(counts) + 1 and not args.fast:
        problems.add("timestep counts", folder, f"timesteps 0 to {TIMESTEPS - 1} come {counts} times")
    return f"{line}; timesteps 0 to {TIMESTEPS - 1}: {counts}"


def _check_empty(folder: Path, layout: Layout, problems: Problems) -> None:
    try:
        for name, bits in shards.read_empty(folder, layout).items():
            if problem := implausible(name, bits):
                problems.add("empty encoding", folder / f"{name}_empty.npy", problem)
    except Refusal as error:
        problems.add("empty encoding", error)


def _check_manifest(root: Path, listed: dict[str, str], sums: dict[str, str], problems: Problems) -> None:
    """Compare with what the manifest lists. sums: the SHA-256 of each file, "" if unknown."""
    for name in sorted(listed.keys() | sums.keys()):
        path = root / name
        if name not in sums:
            problems.add("manifest", path, f"is missing, {MANIFEST} has it")
        elif name not in listed:
            if path.suffix in (".tar", ".npy"):
                problems.add("manifest", path, f"is not in {MANIFEST}")
        elif sums[name] not in ("", listed[name]):
            problems.add("manifest", path, f"has changed, its SHA-256 is not that of {MANIFEST}")


# The command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dir", type=Path, metavar="DIR", help="folder of *.tar shards, or of train/, val/ and empty_encodings/")
    add("--config", metavar="FILE", help="expect this config's sizes and numbers of samples (FLUX.1-schnell's)")
    add("--fast", action="store_true", help="read only names, sizes and the first and last sample of each shard")
    workers = min(8, os.cpu_count() or 1)
    add("--workers", type=options.number, default=workers, metavar="K", help="threads (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code. Raises: Refusal; OSError; KeyboardInterrupt."""
    began = time.monotonic()
    problems = Problems()
    layout = shards.layout(options.config(args.config).model)
    folders = _folders(args.dir, problems)
    path = args.dir / MANIFEST
    listed = manifest.read(path) if path.exists() else None  # before the hours that reading all files may take
    splits = {}
    for split, folder in folders.items():
        splits |= dict.fromkeys(_shards(folder, problems), split)
    splits |= dict.fromkeys(_others(args.dir, set(splits), problems), "")

    def look_at(path: Path, advance: pool.Advance) -> Report:
        return look(path, splits[path], args.fast, layout, advance)

    total = sum(path.stat().st_size for path in splits if path.is_file())
    with progress(total=total, desc="verifying", unit="B", unit_scale=True, leave=False, disable=args.fast) as bar:
        reports = pool.run(look_at, list(splits), 1 if args.fast else args.workers, bar)
    for report in reports:
        problems.extend(report.problems)
    _check_keys(reports, problems)
    lines = [_sum_up(folder, split, reports, args, problems) for split, folder in folders.items()]
    if (args.dir / EMPTY).is_dir():
        _check_empty(args.dir / EMPTY, layout, problems)
    sums = {report.path.relative_to(args.dir).as_posix(): report.sha256 for report in reports}
    if listed is not None:
        _check_manifest(args.dir, listed, sums, problems)
    elif not args.fast and not problems:
        try:
            files.write_whole(path, manifest.written(sums))
        except OSError as error:
            lines.append(f"{path} cannot be written: {error.strerror}")
    seconds = time.monotonic() - began
    size = sum(report.bytes for report in reports)
    speed = "first and last samples" if args.fast else f"{size / seconds / 1e6:,.0f} MB/s"
    lines.append(f"problems: {_print(problems)}")
    lines.append(f"{'FAIL' if problems else 'PASS'} in {seconds:.1f} s, {speed}")
    print("\n".join(lines))
    return int(bool(problems))


def _print(problems: Problems) -> str:
    """Print the problems, SHOWN of each kind at most. Returns their numbers by kind."""
    counts = Counter(kind for kind, _ in problems)
    for kind, count in counts.items():
        print("\n".join([line for own, line in problems if own == kind][:SHOWN]))
        if count > SHOWN:
            print(f"... and {count - SHOWN:,} more of this kind: {kind}")
    return ", ".join(f"{kind} {count:,}" for kind, count in counts.items()) or "none"
