"""What saving checkpoints costs: time of a step, memory, and whether anything leaks; bench/README.md explains it.

    python -m bench.checkpoint                              configs/tiny.toml, a save every 5 steps
    python -m bench.checkpoint --every 20 --rounds 30 --json bench/results/NAME.json

Training with saves and without takes turns, --rounds N (20) pairs of --steps N (10) steps each; --saves N (200) tells
how often to save while watching for leaks; --folder DIR the disk to write to, else the system's temporary folder.
Batches are synthetic; --section.key=value overrides the config as in train.py.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import argparse
import gc
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bench import common
from bench.common import Clock, quartiles, rss_mb
from bench.step import run_steps
from flux_ref import config, config_file, config_rules, ranks, sharding
from flux_ref.checkpoint import Saver, rows_of
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files
from flux_ref.ranks import World
from flux_ref.run import cli, json_option
from flux_ref.run.options import between
from flux_ref.step import State
from flux_ref.steps import Steps

FACTS = {"train_samples": 0, "val_samples": 0}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the config. Raises: Refusal."""
    parser = common.options("bench.checkpoint", __doc__, steps=10, every=5)
    parser.add_argument("--rounds", type=between(2, common.MOST), default=20)
    parser.add_argument("--saves", type=between(2, common.MOST), default=200)
    parser.add_argument("--folder", type=Path)
    args, overrides = parser.parse_known_args(argv)
    if args.steps % args.every:
        raise Refusal(f"--steps={args.steps} must be a multiple of --every={args.every}")
    return args, overrides


def main(argv: list[str]) -> int:
    args, overrides = parse(argv)
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=args.folder) as folder:
        cfg = config_file.load(args.config, overrides)
        world = ranks.start(cfg.parallel)
        config_rules.validate_world(cfg, world.size)
        folder = ranks.gather_objects(folder)[0]  # one for all ranks
        report = common.environment("bench.checkpoint", cfg, world, argv)
        report |= Bench(config_file.replace(cfg, run__dir=folder), world, args).measure()
        ranks.gather_objects(None)  # no rank takes its folder away before all are done
    if world.rank == 0:
        json_option.show(table(report), report, args.json)
    return 0


@dataclass(frozen=True)
class Block:
    """What a block of steps took: seconds, seconds of all threads' work, and seconds in each call of `save`."""

    s: float
    cpu_s: float
    waits: list[float]


class Bench:
    """A run on synthetic batches, saved as train.py saves it."""

    def __init__(self, cfg: Config, world: World, args: argparse.Namespace):
        self.cfg, self.args, self.clock = cfg, args, Clock(world.device)
        net = sharding.build(cfg, world, cfg.train.seed)
        self.state = State.of(net, cfg, world)
        self.eager = Steps(self.state, cfg, world)  # never captured
        self.eager.warm_up()
        self.saver = Saver(cfg, world, FACTS, lambda text: None)

    def measure(self) -> dict:
        """Everything that is reported. Collective."""
        before = rss_mb()
        self.steps(saving=True)
        buffers = sum(rows.local.nbytes for rows in self.saver.host.values())
        state = sum(rows.local.nbytes for rows in rows_of(self.state).values())
        memory = {"buffer_mb": buffers / 1e6, "share_of_state": buffers / state}
        memory |= {"first_save_mb": before and rss_mb() - before}
        report = {"every": self.args.every, "race": self.race(), "alone": self.alone()}
        return report | {"memory": memory, "leak": self.leak()}

    def steps(self, saving: bool) -> Block:
        """A block of steps, with or without saves; each save has --every steps to run behind."""
        self.clock.start()
        begin, cpu, waits = time.perf_counter(), time.process_time(), []
        for _ in range(self.args.steps // self.args.every):
            if saving:
                call = time.perf_counter()
                self.saver.save(self.state, {})
                waits.append(time.perf_counter() - call)
            run_steps(self.eager, None, self.clock, self.args.every)
        self.saver.wait()
        return Block(time.perf_counter() - begin, time.process_time() - cpu, waits)

    def race(self) -> dict:
        """Blocks with and without saves in alternation, and who goes first as well; ratios are those of pairs."""
        blocks: dict[bool, list[Block]] = {True: [], False: []}
        for number in range(self.args.rounds):
            for saving in (number % 2 == 0, number % 2 == 1):
                blocks[saving].append(self.steps(saving))
        self.saver.finish()
        ratios = [with_saves.s / without.s for with_saves, without in zip(blocks[True], blocks[False])]
        cpu = [with_saves.cpu_s - without.cpu_s for with_saves, without in zip(blocks[True], blocks[False])]
        step_ms = {
            name: 1e3 * statistics.median(block.s for block in blocks[saving]) / self.args.steps
            for name, saving in (("with", True), ("without", False))
        }
        wait_ms = 1e3 * statistics.median(wait for block in blocks[True] for wait in block.waits)
        cpu_ms = 1e3 * statistics.median(cpu) * self.args.every / self.args.steps
        report = {"rounds": self.args.rounds, "steps": self.args.steps, "ratio": statistics.median(ratios)}
        report |= {"ratio_quartiles": quartiles(ratios), "step_ms": step_ms}
        return report | {"wait_ms": wait_ms, "cpu_ms_per_save": cpu_ms}

    def alone(self) -> dict:
        """Saves while nothing else runs: the latest moment at which one is on the disk."""
        seconds = [self.save_now() for _ in range(self.args.rounds)]
        newest = checkpoint_files.Checkpoint(checkpoint_files.found(config.run_dir(self.cfg))[-1])
        mb = sum(entry.bytes for entry in newest.files.values()) / 1e6
        median = statistics.median(seconds)
        return {"mb": mb, "s": median, "s_quartiles": quartiles(seconds), "mb_per_s": mb / median}

    def save_now(self) -> float:
        """Seconds of one save, after one step, until it is on the disk."""
        run_steps(self.eager, None, self.clock, 1)
        begin = time.perf_counter()
        self.saver.save(self.state, {})
        self.saver.finish()
        return time.perf_counter() - begin

    def leak(self) -> dict:
        """Resident memory, threads and open files over many saves; the first quarter is a warm-up."""
        sizes = []
        for number in range(self.args.saves):
            if number == self.args.saves // 4:
                threads, files, sizes = threading.active_count(), open_files(), []
            self.save_now()
            gc.collect()
            sizes.append(rss_mb())
        return {
            "saves": self.args.saves,
            "rss_mb": {"first": sizes[0], "last": sizes[-1], "least": min(sizes), "most": max(sizes)},
            "kb_per_save": 1e3 * statistics.linear_regression(range(len(sizes)), sizes).slope,
            "threads": threading.active_count() - threads,
            "open_files": open_files() - files,
        }


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if common.STATM.exists() else 0


def table(report: dict) -> str:
    """The report for the terminal."""
    race, alone, memory, leak = (report[key] for key in ("race", "alone", "memory", "leak"))
    low, high = race["ratio_quartiles"]
    rows = common.machine(report) | {
        "step": f"{race['ratio']:.4f} times a step without saves, one every {report['every']} steps (quartiles"
        f" {low:.4f} to {high:.4f} of {race['rounds']} pairs; {race['step_ms']['with']:.1f} /"
        f" {race['step_ms']['without']:.1f} ms)",
        "a save": f"training waits {race['wait_ms']:.1f} ms; {race['cpu_ms_per_save']:.0f} ms of work by all threads",
        "save": f"{alone['mb']:.1f} MB in {alone['s']:.3f} s with training at rest, {alone['mb_per_s']:.0f} MB/s",
        "memory": f"{memory['buffer_mb']:.1f} MB of host buffers, {memory['share_of_state']:.2f} times the state",
        "leak": f"{leak['kb_per_save']:+.1f} kB per save over {leak['saves']} saves, {leak['rss_mb']['first']:.1f} to"
        f" {leak['rss_mb']['last']:.1f} MB resident; {leak['threads']:+d} threads, {leak['open_files']:+d} files",
    }
    return common.rows_below(report["command"], rows)


if __name__ == "__main__":
    cli.leave(cli.run("bench.checkpoint", __doc__, main, sys.argv[1:]))
