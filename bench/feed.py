"""How fast samples come from the disk into a batch, against a bare read; see bench/README.md.

    python -m bench.feed --json bench/results/NAME.json             1,920 samples of full size, 4.2 GB
    python -m bench.feed --samples 10000 --folder /mnt/nvme

--samples N (1920) per pass. The contenders take turns for --rounds N (5), with --workers LIST (1,2,4).
--flat N (20000) samples over which memory is watched. --folder DIR (the system's folder for temporary files) needs
2.2 MB per sample. Linux only.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from tqdm import tqdm

from bench import common
from bench.common import quartiles, rss_mb
from flux_ref import config_file, rng
from flux_ref.config import Config
from flux_ref.data import TrainSet
from flux_ref.errors import Refusal
from flux_ref.formats import shard_writer, shards
from flux_ref.run import cli
from flux_ref.run.options import Options, between, listed
from tools.shared import json_option

BATCH = 32
PER_SHARD = 40


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises: Refusal."""
    parser = Options("python -m bench.feed", __doc__)
    parser.add_argument("--samples", type=between(2 * BATCH, common.MOST), default=1920)
    parser.add_argument("--rounds", type=between(2, common.MOST), default=5)
    parser.add_argument("--workers", type=listed(between(1, 1024)), default=[1, 2, 4])
    parser.add_argument("--flat", type=between(20 * BATCH, common.MOST), default=20_000)
    parser.add_argument("--config", help="whose model's sizes to use (default: FLUX.1-schnell's)")
    parser.add_argument("--folder", type=Path)
    json_option.json_option(parser)
    args = parser.parse_args(argv)
    if args.samples % BATCH:
        raise Refusal(f"--samples={args.samples} must be a multiple of {BATCH}")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    cfg = config_file.load(args.config) if args.config else Config()
    with tempfile.TemporaryDirectory(prefix="bench_feed_", dir=args.folder) as folder:
        root = Path(folder)
        make(root, cfg, args.samples)
        report = common.head("bench.feed", argv) | {"numpy": np.__version__, "file_system": file_system(root)}
        report |= {"sample_bytes": shards.layout(cfg.model).stride, "samples": args.samples, "batch": BATCH}
        report |= Race(root, cfg, args).run()
    common.give(report, args.json)
    return 0


def make(root: Path, cfg: Config, count: int) -> None:
    """root/train and root/empty_encodings, of random finite values."""
    layout, rng = shards.layout(cfg.model), np.random.default_rng(0)
    members = {name: rng.integers(0, 0x4000, shape, np.uint16) for name, shape in layout.shapes.items()}
    samples = (shard_writer.Sample(members) for _ in tqdm(range(count), desc="making samples", leave=False))
    shard_writer.write(root / "train", samples, "train", PER_SHARD)
    (root / "empty_encodings").mkdir()
    for name in ("t5", "clip"):
        np.save(root / "empty_encodings" / f"{name}_empty.npy", members[name])


class Pass(NamedTuple):
    """One pass over the data: seconds, and seconds of work by all threads."""

    s: float
    cpu_s: float


Contender = Callable[[int], Pass]  # of the number of workers


class Race:
    """The contenders take turns; who goes first changes from round to round."""

    def __init__(self, root: Path, cfg: Config, args: argparse.Namespace):
        self.args, self.folder = args, root / "train"
        values = {"data__kind": "embeddings", "data__train": str(self.folder), "data__train_count": 0}
        self.cfg = config_file.replace(cfg, train__global_batch=BATCH, **values)
        self.set = TrainSet(self.cfg, 0, 1, pin=torch.accelerator.is_available())
        self.set.open()
        # A flat buffer as large as those of the feed, so that all contenders fill the same amount of memory.
        self.flat = np.zeros((BATCH * self.cfg.data.prefetch, self.set.shards.layout.stride), np.uint8)
        self.order = rng.order(self.cfg.train.seed, 0, args.samples)
        ways = (self.pread, self.unscanned, self.read, self.feed)
        self.contenders: dict[str, Contender] = {way.__name__: way for way in ways}

    def run(self) -> dict:
        """Everything that is reported."""
        rates = {"warm": self.rounds(self.warm), "cold": self.rounds(self.set.shards.evict)}
        return {"rounds": self.args.rounds, "rates": rates, "flat": self.flatness()}

    def rounds(self, before: Callable[[], None]) -> dict:
        """{contender: {workers: figures}}; `before` runs ahead of every pass."""
        found: dict[str, dict[int, list[Pass]]] = {name: {w: [] for w in self.args.workers} for name in self.contenders}
        for number in range(self.args.rounds):
            names = list(self.contenders)
            for name in names if number % 2 else names[::-1]:
                for workers in self.args.workers:
                    before()
                    found[name][workers].append(self.contenders[name](workers))
        return {
            name: {str(w): self.figures(passes, found["pread"][1 if 1 in ways else w]) for w, passes in ways.items()}
            for name, ways in found.items()
        }

    def figures(self, passes: list[Pass], bare: list[Pass]) -> dict:
        """Medians; share: of the rate of a bare read by one worker in the same round."""
        count = self.args.samples
        shares = [one.s / own.s for one, own in zip(bare, passes)]
        return {
            "ms_per_sample": 1e3 * statistics.median(one.s for one in passes) / count,
            "cpu_ms_per_sample": 1e3 * statistics.median(one.cpu_s for one in passes) / count,
            "samples_per_s": count / statistics.median(one.s for one in passes),
            "share_of_pread": statistics.median(shares),
            "share_quartiles": quartiles(shares),
        }

    def warm(self) -> None:
        """Bring all of it into the page cache."""
        for path in self.set.shards.paths:
            path.read_bytes()

    def timed(self, work: Iterator[None]) -> Pass:
        """Exhaust an iterator."""
        begin, cpu = time.perf_counter(), time.process_time()
        for _ in work:
            pass
        return Pass(time.perf_counter() - begin, time.process_time() - cpu)

    def shared(self, one: Callable[[int, int], object], workers: int) -> Pass:
        """one(position, row) of every sample by so many threads."""
        rows = len(self.flat)

        def share(worker: int) -> None:
            for position in range(worker, self.args.samples, workers):
                one(int(self.order[position]), position % rows)

        with ThreadPoolExecutor(workers) as pool:
            return self.timed(pool.map(share, range(workers)))

    def pread(self, workers: int) -> Pass:
        """The same bytes in the same order, and nothing else."""
        held, rows = self.set.shards, [memoryview(row) for row in self.flat]
        stride = held.layout.stride

        def one(sample: int, row: int) -> None:
            shard, position = divmod(sample, PER_SHARD)
            os.preadv(held.shards[shard].descriptor, [rows[row]], position * stride)

        return self.shared(one, workers)

    def read(self, workers: int) -> Pass:
        """Our reader: headers and every value checked, members in their rows; no draws."""
        rows = [
            {name: buffer.rows[name][i] for name in shards.MEMBERS} for buffer in self.set.buffers for i in range(BATCH)
        ]
        return self.shared(lambda sample, row: self.set.shards.read(sample, rows[row]), workers)

    def unscanned(self, workers: int) -> Pass:
        """The same but for the look at every value for NaN, to see what that costs."""
        with mock.patch.object(shards, "_not_finite", lambda bits: False):
            return self.read(workers)

    def feed(self, workers: int) -> Pass:
        """Batches as training takes them: read, checked and with their draws."""
        return self.timed(self.batches(workers, self.args.samples // BATCH))

    def batches(self, workers: int, count: int) -> Iterator[None]:
        """Take batches from the feed."""
        self.set.cfg = config_file.replace(self.cfg, data__workers=workers)
        with contextlib.closing(self.set.feed(0)) as feed:
            for _ in range(count):
                feed.give_back(feed.take())
                yield

    def flatness(self) -> dict:
        """Resident memory while the feed hands out --flat samples; the first tenth is a warm-up."""
        sizes, count = [], self.args.flat // BATCH
        steps = tqdm(self.batches(2, count), total=count, desc="watching memory", unit=" batches", leave=False)
        for number, _ in enumerate(steps):
            if number >= count // 10:
                sizes.append(rss_mb())
        slope = statistics.linear_regression(range(len(sizes)), sizes).slope / BATCH
        return {"samples": self.args.flat, "first_mb": sizes[0], "last_mb": sizes[-1], "kb_per_1000": 1e6 * slope}


def file_system(path: Path) -> str:
    """The kind of the file system that holds a path, from the longest mount point above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max((m for m in mounts if path.resolve().is_relative_to(m[0])), key=lambda m: len(m[0]))[1]


if __name__ == "__main__":
    cli.leave(cli.run("bench.feed", __doc__, main, sys.argv[1:]))
