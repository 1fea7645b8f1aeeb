"""How fast samples come from the disk into a batch, against a bare read and webdataset; see bench/README.md.

    python -m bench.feed                                            1,920 samples of full size, 4.2 GB
    python -m bench.feed --webdataset --json bench/results/NAME.json
    python -m bench.feed --samples 10000 --folder /mnt/nvme

--samples N (1920) per pass. The contenders take turns for --rounds N (5), with --workers LIST (1,2,4).
--flat N (20000) samples over which memory is watched. --folder DIR (the system's folder for temporary files) needs
2.2 MB per sample. Linux only.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import argparse
import contextlib
import gc
import importlib.metadata
import importlib.util
import io
import os
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
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
from flux_ref.run import cli, json_option
from flux_ref.run.options import Options, between, listed

BATCH = 32
PER_SHARD = 40  # so that every process of the peers has shards of its own
GPUS, PER_GPU = 8, 40  # samples/s that a node of fast ones takes
AHEAD = 2  # batches that each worker of a torch DataLoader reads ahead


def parse(argv: list[str]) -> argparse.Namespace:
    """Raises: Refusal."""
    parser = Options("python -m bench.feed", __doc__)
    parser.add_argument("--samples", type=between(2 * BATCH, common.MOST), default=1920)
    parser.add_argument("--rounds", type=between(2, common.MOST), default=5)
    parser.add_argument("--workers", type=listed(between(1, 1024)), default=[1, 2, 4])
    parser.add_argument("--flat", type=int, default=20_000)
    parser.add_argument("--webdataset", action="store_true")
    parser.add_argument("--config", help="whose model's sizes to use (default: FLUX.1-schnell's)")
    parser.add_argument("--folder", type=Path)
    json_option.json_option(parser)
    args = parser.parse_args(argv)
    if args.samples % BATCH:
        raise Refusal(f"--samples={args.samples} must be a multiple of {BATCH}")
    if args.flat and args.flat < 20 * BATCH:
        raise Refusal(f"--flat={args.flat} must be 0 or at least {20 * BATCH}")
    if args.webdataset and importlib.util.find_spec("webdataset") is None:
        raise Refusal("--webdataset needs a package; pip install webdataset")
    return args


def main(argv: list[str]) -> int:
    args = parse(argv)
    cfg = config_file.load(args.config) if args.config else Config()
    stride = shards.layout(cfg.model).stride
    with tempfile.TemporaryDirectory(prefix="bench_feed_", dir=args.folder) as folder:
        free = shutil.disk_usage(folder).free
        if free < 2 * args.samples * stride:
            raise Refusal(f"{folder} has {free / 1e9:.1f} GB free, want {2e-9 * args.samples * stride:.1f}")
        root = Path(folder)
        make(root, cfg, args.samples)
        report = common.head("bench.feed", argv) | {"numpy": np.__version__, "file_system": file_system(root)}
        if args.webdataset:
            report["webdataset"] = importlib.metadata.version("webdataset")
        report |= {"sample_bytes": stride, "samples": args.samples, "batch": BATCH}
        report |= Race(root, cfg, args).run()
    json_option.show(table(report), report, args.json)
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


@dataclass(frozen=True)
class Pass:
    """One pass over the data: seconds, and seconds of work by all threads and processes."""

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
        ways = (self.pread, self.unscanned, self.read, self.feed, *([self.webdataset] if args.webdataset else []))
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
            with path.open("rb", buffering=0) as file:
                while file.readinto(self.flat):
                    pass

    def timed(self, work: Iterator[None]) -> Pass:
        """Exhaust an iterator. cpu_s counts processes too, once they have ended."""
        begin, cpu = time.perf_counter(), cpu_seconds()
        for _ in work:
            pass
        seconds = time.perf_counter() - begin
        return Pass(seconds, cpu_seconds() - cpu)

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

    def webdataset(self, workers: int) -> Pass:
        """webdataset's own loader in processes: shards in order, no draws, numpy's own parser for the members.

        The work of its processes is known when they have ended.
        """
        import webdataset as wds

        cpu, ahead, count = cpu_seconds(), workers * AHEAD, self.args.samples // BATCH
        files = wds.WebDataset(sorted(map(str, self.folder.glob("*.tar"))), shardshuffle=False, empty_check=False)
        collate = torch.utils.data.default_collate
        samples = files.repeat().map(decode).batched(BATCH, partial=False, collation_fn=collate)
        batches = iter(wds.WebLoader(samples, batch_size=None, num_workers=workers, prefetch_factor=AHEAD))
        for _ in range(ahead):  # what was read ahead does not count
            next(batches)
        timed = self.timed(next(batches) for _ in range(count))
        del batches
        gc.collect()
        return Pass(timed.s, (cpu_seconds() - cpu) * count / (ahead + count + ahead))  # as much lies ahead at the end

    def flatness(self) -> dict:
        """Resident memory while the feed hands out --flat samples; the first tenth is a warm-up."""
        if not self.args.flat:
            return {}
        sizes, count = [], self.args.flat // BATCH
        steps = tqdm(self.batches(2, count), total=count, desc="watching memory", unit=" batches", leave=False)
        for number, _ in enumerate(steps):
            if number >= count // 10:
                sizes.append(rss_mb())
        slope = statistics.linear_regression(range(len(sizes)), sizes).slope / BATCH
        return {"samples": self.args.flat, "first_mb": sizes[0], "last_mb": sizes[-1], "kb_per_1000": 1e6 * slope}


def cpu_seconds() -> float:
    """Of this process and of its ended children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def decode(sample: dict) -> dict[str, torch.Tensor]:
    """The members of a sample from webdataset."""
    return {name: torch.from_numpy(np.load(io.BytesIO(sample[f"{name}.bytes"]))) for name in shards.MEMBERS}


def file_system(path: Path) -> str:
    """The kind of the file system that holds a path, from the longest mount point above it."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    return max((m for m in mounts if path.resolve().is_relative_to(m[0])), key=lambda m: len(m[0]))[1]


def table(report: dict) -> str:
    """The report for the terminal."""
    mb, need = report["sample_bytes"] / 1e6, GPUS * PER_GPU
    load = f"{report['file_system']}, load {report['load_average']:.1f}"
    rows = [
        f"commit    {report['commit'] or 'unknown'}",
        f"machine   {report['cores']} cores, {report['device']}, {load}",
    ]
    rows.append(f"data      {report['samples']} samples of {mb:.2f} MB")
    for cache, contenders in report["rates"].items():
        for name, ways in contenders.items():
            for workers, found in ways.items():
                rate, cpu_ms = found["samples_per_s"], found["cpu_ms_per_sample"]
                rows.append(
                    f"{cache}  {name:<11} {workers} worker{'s' if workers != '1' else ' '}  {rate:7.0f} samples/s"
                    f"  {rate * mb / 1e3:5.2f} GB/s  {found['ms_per_sample']:.3f} ms, {cpu_ms:.3f} of work"
                    f"  {100 * found['share_of_pread']:4.0f} % of a bare read"
                )
    cores = need * next(iter(report["rates"]["warm"]["feed"].values()))["cpu_ms_per_sample"] / 1e3
    gb = f"{need * mb / 1e3:.2f} GB/s from storage"
    rows.append(f"{GPUS} GPUs at {PER_GPU} samples/s each: {gb} and {cores:.2f} cores")
    if flat := report["flat"]:
        sizes = f"{flat['first_mb']:.1f} to {flat['last_mb']:.1f} MB resident over {flat['samples']} samples"
        rows.append(f"memory    {sizes}, {flat['kb_per_1000']:+.1f} kB per 1,000")
    return "\n  ".join([report["command"], *rows])


if __name__ == "__main__":
    cli.leave(cli.run("bench.feed", __doc__, main, sys.argv[1:]))
