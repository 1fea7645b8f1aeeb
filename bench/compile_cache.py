"""How much of the compile time a second start with parallel.compile_cache needs; bench/README.md explains it.

    python -m bench.compile_cache --rounds 3 --json bench/results/NAME.json

Each round makes a new file: one process compiles and writes the file, and the next process reads the file.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch

from bench import common
from flux_ref import config, config_file, ranks
from flux_ref.errors import Fault
from flux_ref.run import cli, compile_cache
from flux_ref.run.options import between
from flux_ref.step import State
from flux_ref.steps import Steps


def main(argv: list[str]) -> int:
    """The exit code. Raises: Refusal, Fault."""
    parser = common.options("bench.compile_cache", __doc__)
    parser.add_argument("--rounds", type=between(1, 100), default=3)
    parser.add_argument("--start", help="measure one start with this file, and print it as JSON")
    args, overrides = parser.parse_known_args(argv)
    compiled = ["--parallel.compile=true", *overrides]
    if args.start:
        print(json.dumps(start(args.config, [*compiled, f"--parallel.compile_cache={args.start}"])))
        return 0
    cfg = config_file.load(args.config, compiled)
    report = common.head("bench.compile_cache", argv) | {"config": config.flat(cfg), "first": [], "second": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for which in ("first", "second"):
                report[which].append(started([*argv, f"--start={folder}/cache"]))
    for figure in ("wall_s", "cpu_s"):
        ratios = [b[figure] / a[figure] for a, b in zip(report["first"], report["second"])]
        report[f"{figure[:-2]}_ratio"] = {"median": median(ratios), "max": max(ratios)}
    common.give(report, args.json)
    return 0


def started(argv: list[str]) -> dict[str, object]:
    """What `start` measures in a process of its own. Raises: Fault."""
    command = [sys.executable, "-m", "bench.compile_cache", *argv]
    process = subprocess.run(command, capture_output=True, text=True, cwd=common.ROOT)
    if process.returncode:
        raise Fault(f"a start ended with {process.returncode}: {process.stderr.strip()[-300:]}")
    return json.loads(process.stdout.splitlines()[-1])


def start(path: str, overrides: list[str]) -> dict[str, object]:
    """One start: seconds beyond those that the same steps take once they are compiled."""
    cfg = config_file.load(path, overrides)
    world = ranks.start(cfg.parallel)
    with ExitStack() as stack:
        compile_cache.own_folder(cfg, world, stack)
        steps = Steps(State.build(cfg, world, cfg.train.seed), cfg, world)
        stack.callback(steps.close)
        wall_s, cpu_s, line = spent(lambda: compile_cache.warm_up(steps, cfg, world))
        again_s, again_cpu_s, _ = spent(steps.warm_up)
        file_mb = Path(cfg.parallel.compile_cache).stat().st_size / 1e6
    figures = {"wall_s": wall_s - again_s, "cpu_s": cpu_s - again_cpu_s, "file_mb": file_mb}
    return figures | {"graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"], "line": line.rpartition("/")[2]}


def spent(task: Callable[[], object]) -> tuple[float, float, object]:
    """Seconds, CPU seconds with those of compilers in other processes, and what the task returns."""

    def cpu_s() -> float:
        uses = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        return sum(use.ru_utime + use.ru_stime for use in uses)

    begin, begin_cpu = time.perf_counter(), cpu_s()
    result = task()
    return time.perf_counter() - begin, cpu_s() - begin_cpu, result


if __name__ == "__main__":
    cli.leave(cli.run("bench.compile_cache", __doc__, main, sys.argv[1:]))
