"""What the benchmarks share: their options, their reports, a clock."""

import os
import platform
import re
import shlex
import time
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from math import prod
from pathlib import Path
from pprint import pformat
from typing import Any

import torch

from bench.fake_ranks import fake_world
from flux_ref import config, config_file, graphs, ranks
from flux_ref.cli import Options
from flux_ref.config import Config
from flux_ref.model import parameter_table
from flux_ref.precision.fp8 import architecture
from flux_ref.ranks import World, device_name
from flux_ref.report import commit
from flux_ref.sharding import choose_compile_cache
from tools import figures
from tools.figures import between

ALONE = "one rank: no gathers and no reductions, only FSDP2's casts and copies"  # what its figures leave out
END = "end"
MOST = 10**9
CPUINFO = Path("/proc/cpuinfo")  # Linux


def options(name: str, text: str) -> Options:
    """A parser with --config and --json."""
    parser = Options(f"python -m {name}", text)
    parser.add_argument("--config", default="configs/tiny.toml")
    figures.json_option(parser)
    return parser


def step_options(name: str, text: str) -> Options:
    """A parser with --steps and --warmup, too."""
    parser = options(name, text)
    parser.add_argument("--steps", type=between(1, MOST), default=20)
    parser.add_argument("--warmup", type=between(0, MOST), default=3)
    return parser


def head(program: str, argv: list[str], device: torch.device) -> dict:
    """What is needed to repeat or to doubt the figures of a report. program: as it is called without torchrun."""
    if "RANK" in os.environ:
        program = program.replace("python", f"torchrun --nproc-per-node {os.environ['WORLD_SIZE']}", 1)
    return {
        "command": f"{program} {shlex.join(argv)}".strip(),
        "commit": commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": cpu_name() if device.type == "cpu" else device_name(device),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],  # of the minute before: others at work
    }


def run(parser: Options, argv: list[str], measure: Callable[[Config, World, Namespace], dict]) -> int:
    """A benchmark of a config on this process's ranks; rank 0 gives the report. Collective. Raises: Refusal.

    argv: the options of the parser, and overrides of the config. The terminal leaves the config out.
    """
    args, overrides = parser.parse_known_args(argv)
    cfg = config_file.load(args.config, overrides)
    with ExitStack() as stack:
        if count := getattr(args, "fake_ranks", None):
            world = stack.enter_context(fake_world(count, replicate=cfg.parallel.replicate))
        else:
            world = ranks.start(cfg.parallel, cfg.data.kind == "toy")
        choose_compile_cache(cfg, world)
        report = head(parser.prog, argv, world.device) if world.rank == 0 else {}  # git is asked on one rank only
        report |= {
            "arch": architecture(world.device),
            "steps_run": graphs.mode(cfg, world.device),
            "ranks": world.size,
            "parameters": sum(prod(shape) for shape in parameter_table(cfg.model).values()),
            "config": config.flat(cfg),
            "left_out": ALONE if world.size == 1 else None,
        }
        report |= measure(cfg, world, args)
    ranks.stop()
    if world.rank == 0:
        shown = {name: value for name, value in report.items() if name != "config"}
        figures.show(pformat(shown, width=120, compact=True, sort_dicts=False), report, args.json)
    return 0


def cpu_name() -> str:
    """The model of this machine's CPU, as Linux knows it."""
    line = re.search(r"model name\s*: (.+)", CPUINFO.read_text()) if CPUINFO.exists() else None
    return line.group(1) if line else platform.processor() or platform.machine()


class Clock:
    """Labelled marks in time: device events on an accelerator, the host's clock on the CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list[tuple[str, Any]] = []  # label, and the host's seconds or the device's event

    def start(self) -> None:
        """Forget all marks. sync: the device is idle when this returns."""
        torch.get_device_module(self.device).synchronize()
        self.marks = []

    def mark(self, label: str) -> None:
        """From here on the time belongs to `label`; END closes a step."""
        moment: Any = time.perf_counter()
        if self.device.type != "cpu":
            moment = torch.Event(self.device.type, enable_timing=True)
            moment.record()
        self.marks.append((label, moment))

    def steps(self) -> list[dict[str, float]]:
        """Milliseconds by label of each step since `start`. sync: waits for the device."""
        torch.get_device_module(self.device).synchronize()
        steps = []
        spent = defaultdict[str, float](float)
        for (label, begin), (following, end) in pairwise(self.marks):
            if label != END:
                spent[label] += (end - begin) * 1e3 if self.device.type == "cpu" else begin.elapsed_time(end)
            if following == END:
                steps.append(dict(spent))
                spent.clear()
        return steps
