"""What saving checkpoints costs: time of a step and memory; bench/README.md explains every figure.

    python -m bench.checkpoint                              configs/tiny.toml, a save every 5 steps
    python -m bench.checkpoint --every 20 --rounds 30 --json bench/results/NAME.json

Training with saves and without takes turns, --rounds N (20) pairs of --steps N (10) steps each. --folder DIR is on the
disk to write to, else the system's temporary folder.
Batches are synthetic; --section.key=value overrides the config as in train.py.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from bench import common
from bench.common import Clock, quartiles
from bench.step import run_steps
from flux_ref import config, config_file, config_rules, ranks, sharding
from flux_ref.checkpoint import Saver, rows_of
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files
from flux_ref.formats.checkpoint_reader import Checkpoint
from flux_ref.ranks import World
from flux_ref.run import cli
from flux_ref.run.options import between
from flux_ref.step import State
from flux_ref.steps import Steps

FACTS = {"train_samples": 0, "val_samples": 0}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the config. Raises: Refusal."""
    parser = common.options("bench.checkpoint", __doc__, steps=10, every=5)
    parser.add_argument("--rounds", type=between(2, common.MOST), default=20)
    parser.add_argument("--folder", type=Path)
    args, overrides = parser.parse_known_args(argv)
    if args.steps % args.every:
        raise Refusal(f"--steps={args.steps} must be a multiple of --every={args.every}")
    return args, overrides


def measure(cfg: Config, world: World, args: argparse.Namespace) -> dict:
    """Everything that is reported. Collective."""
    config_rules.validate_world(cfg, world.size)
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=args.folder) as folder:
        folder = ranks.gather_objects(folder)[0]  # one for all ranks
        figures = Bench(config_file.replace(cfg, run__dir=folder), world, args).measure()
        ranks.gather_objects(None)  # no rank takes its folder away before all are done
    return figures


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
        self.steps(saving=True)
        buffers = sum(rows.local.nbytes for rows in self.saver.host.values())
        state = sum(rows.local.nbytes for rows in rows_of(self.state).values())
        memory = {"buffer_mb": buffers / 1e6, "share_of_state": buffers / state}
        return {"every": self.args.every, "memory": memory, "race": self.race(), "alone": self.alone()}

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
        """Saves while nothing else runs, each after one step, and the threads and open files that stay behind."""
        seconds, before = [], (threading.active_count(), open_files())
        for _ in range(self.args.rounds):
            run_steps(self.eager, None, self.clock, 1)
            begin = time.perf_counter()
            self.saver.save(self.state, {})
            self.saver.finish()
            seconds.append(time.perf_counter() - begin)
        newest = Checkpoint(checkpoint_files.found(config.run_dir(self.cfg))[-1])
        mb = sum(entry.bytes for entry in newest.files.values()) / 1e6
        median = statistics.median(seconds)
        left = {"threads": threading.active_count() - before[0], "open_files": open_files() - before[1]}
        return {"mb": mb, "s": median, "s_quartiles": quartiles(seconds), "mb_per_s": mb / median} | left


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if common.STATM.exists() else 0


def main(argv: list[str]) -> int:
    return common.run("bench.checkpoint", argv, parse, measure)


if __name__ == "__main__":
    cli.leave(cli.run("bench.checkpoint", __doc__, main, sys.argv[1:]))
