"""Checking a data set before a job relies on it.   python -m tools.prepare verify DIR [--fast] [--config FILE]

DIR holds shards of the layout in dataset.py, or train/ and val/ with such shards. Every sample is read by the reader of
training; its values must be plausible. Then come the numbers of samples, repeated keys, missing shards and the
encodings of the empty caption. --fast reads names, sizes and the first and last sample of each shard.
Nothing is written. Exit codes: 0 no problem, 1 a problem, 2 refused.
"""

import argparse
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from flux_ref import dataset
from flux_ref.cli import Stop, printable, progress
from flux_ref.dataset import MEMBERS, Meta, SampleLayout, ShardSet
from flux_ref.schedule import TIMESTEPS
from tools.prepare import common

SHOWN = 20  # of the problems
THREADS = min(8, os.cpu_count() or 1)
# Far beyond real data, yet random bf16 are sure to leave these ranges. T5's outputs lie in -7 .. 3 (black-forest-labs/
# flux issue 472), CLIP's in the tens; a latent's standard deviation is 1 / flow.SCALE = 2.8. Diffusers clamps logvar
# to -30 .. 20, BFL's autoencoder does not.
PLAUSIBLE = dict.fromkeys(MEMBERS, (-1e3, 1e3)) | {"logvar": (-100.0, 20.0)}


@dataclass
class Report:
    """What shards hold. seen: each sample that was read, and its place. problems: lines."""

    samples: int = 0
    seen: list[tuple[Meta, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@contextmanager
def noting(problems: list[str]) -> Iterator[None]:
    """What ends the block is a problem."""
    try:
        yield
    except (Stop, OSError) as error:
        problems.append(str(error))


def look(path: Path, fast: bool, layout: SampleLayout) -> Report:
    """Read a shard's samples. fast: the first and last one only."""
    report = Report()
    rows = layout.arrays()
    with noting(report.problems):
        shard = ShardSet([path], layout)
        shard.open()
        report.samples = len(shard)
        positions = sorted({0, len(shard) - 1}) if fast else range(len(shard))
        for position in positions:
            where = f"{path}, sample {position}"
            with noting(report.problems):
                report.seen.append((shard.read(position, rows), where))
                for name in MEMBERS:
                    if what := implausible(name, rows[name]):
                        report.problems.append(f"{where}: {what}")
    return report


def implausible(name: str, bits: np.ndarray) -> str:
    """What is wrong with the values of a member, given as bf16 bits; "" if nothing is."""
    values = dataset.from_bf16_bits(bits)
    least, most = PLAUSIBLE[name]
    for value in (values.max(), values.min()):
        if not least <= value <= most:
            return f"{name} holds {value:.3g}, want values from {least:g} to {most:g}"
    return "" if values.any() else f"{name} is all zeros"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("dir", type=Path, metavar="DIR", help="folder of *.tar shards, or of train/, val/ and empty_encodings/")
    common.add_config(parser)
    add("--fast", action="store_true", help="read only names, sizes and the first and last sample of each shard")


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code. Raises: Refusal; OSError; KeyboardInterrupt."""
    cfg = args.config
    layout = dataset.sample_layout(cfg.model)
    wanted = {"train": cfg.data.expected_train_samples, "val": cfg.data.expected_val_samples}
    folders = {name: args.dir / name for name in wanted if (args.dir / name).is_dir()}
    alone = "val" if args.dir.resolve().name == "val" else "train"
    problems: list[str] = []
    lines = []
    for split, folder in (folders or {alone: args.dir}).items():
        paths = []
        with noting(problems):
            paths = dataset.paths_of(folder)

        for number, path in enumerate(paths):
            found = re.search(r"([0-9]+)\.tar$", path.name)
            if found and int(found[1]) != number:
                problems.append(f"{folder}: shard {number} is missing, {path.name} comes in its place")
                break  # the numbers of the others tell no more

        samples = 0
        seen = []
        reports = common.each(lambda path: look(path, args.fast, layout), paths, THREADS)
        for report in progress(reports, total=len(paths), desc=split, unit=" shards", leave=False):
            samples += report.samples
            seen += report.seen
            problems += report.problems
        if wanted[split] not in (0, samples):
            problems.append(f"{folder} holds {samples:,} samples, want {wanted[split]:,}")

        places: dict[str, str] = {}  # of each key, the first sample that has it
        for meta, where in seen:
            other = places.setdefault(meta.key, where)
            if other != where:
                problems.append(f"{where}: its key {meta.key} is that of {other}, too")

        # A validation set of any size has each timestep equally often, give or take one.
        turns = Counter(meta.timestep for meta, _ in seen)
        is_equal = turns.keys() == {*range(TIMESTEPS)} and max(turns.values()) <= min(turns.values()) + 1
        if split == "val" and len(seen) == samples and not is_equal:
            problems.append(f"{folder}: want timesteps 0 to {TIMESTEPS - 1} equally often, found {dict(turns)}")
        lines.append(f"{split}: {samples:,} samples in {len(paths)} shards")

    empty = args.dir / "empty_encodings"
    if not empty.is_dir():
        empty = args.dir.resolve().parent / empty.name
    with noting(problems):
        dataset.read_empty(empty, layout)

    result = f"FAIL, {len(problems):,} problems" if problems else "PASS"
    print(*map(printable, problems[:SHOWN]), *lines, result, sep="\n")
    return int(bool(problems))
