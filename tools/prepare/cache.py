"""The compiler's cache for one config and kind of device, made before the first run.

    torchrun --nproc-per-node 8 -m tools.prepare cache [--ranks 64] CONFIG --parallel.compile_cache=FILE ...

Each device has code of its own, so start as many ranks as a node will have. No data is read.
"""

import argparse
from contextlib import ExitStack

from flux_ref import config, config_file, config_rules, ranks
from flux_ref.errors import Refusal
from flux_ref.run import cli, compile_cache
from flux_ref.step import State
from flux_ref.step_runner import StepRunner
from tools.prepare.options import number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=number, help="ranks of the later run (default: those of this command)")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="CONFIG --section.key=value ... as for train.py")


def run(args: argparse.Namespace) -> int:
    """The subcommand; returns the exit code."""
    return cli.run("prepare", "", lambda argv: _make(argv, args.ranks), args.arguments)


def _make(argv: list[str], later: int | None) -> int:
    cfg = config_file.load(*cli.config_and_overrides(argv, default="configs/tiny.toml"))
    if not cfg.parallel.compile_cache:
        raise Refusal("parallel.compile_cache is empty; name the file to make: --parallel.compile_cache=FILE")
    world = ranks.start(config.ParallelConfig(replicate=1))
    later = later or world.size
    config_rules.validate_world(cfg, later)
    # One region of each kind and length is enough: equal regions share one graph.
    rows = config.micro_batch(cfg, later)
    region = cfg.parallel.region_blocks
    double, single = (min(n, region + n % region) for n in (cfg.model.double_blocks, cfg.model.single_blocks))
    cfg = config_file.replace(cfg, model__double_blocks=double, model__single_blocks=single)
    cfg = config_file.replace(cfg, train__global_batch=rows * world.size, train__micro_batch=0)
    with ExitStack() as stack:
        compile_cache.own_folder(cfg, world, stack)
        state = State.build(cfg, world, cfg.train.seed)
        line = compile_cache.warm_up(StepRunner(state, cfg, world), cfg, world)
    if world.rank == 0:
        print(line)
    return 0
