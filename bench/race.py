"""Our model against other implementations of it, step by step in turn; bench/README.md explains every figure.

    python -m bench.race                                    configs/tiny.toml against diffusers and torchtitan, eager
    python -m bench.race --compile                          the blocks of both sides compiled
    python -m bench.race --pair --parallel.dtype=fp32       one double and one single block of schnell's width
    python -m bench.race --config FILE --peers NAME[,NAME] --json bench/results/NAME.json

--steps N (20) timed after --warmup N (3); --section.key=value overrides the config as in train.py. A peer that cannot
take part is reported with the reason; the exit code is 2 if none could.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import argparse
import sys

from bench import common, peers
from bench.common import Clock
from flux_ref import config_file, ranks
from flux_ref.errors import Fault, Refusal
from flux_ref.run import cli, json_option
from flux_ref.run.options import listed

PAIR = "configs/schnell_gbs512.toml"
PAIR_OVERRIDES = ("model.double_blocks=1", "model.single_blocks=1", "train.global_batch=1", "train.micro_batch=1")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the config. Raises: Refusal."""
    parser = common.options("bench.race", __doc__, steps=20, warmup=3)
    parser.add_argument("--peers", type=listed(), default=list(peers.PEERS))
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--pair", action="store_true")
    args, overrides = parser.parse_known_args(argv)
    overrides = ["--parallel.activation_budget=1.0", f"--parallel.compile={str(args.compile).lower()}", *overrides]
    if args.pair:
        args.config = PAIR
        overrides = [f"--{text}" for text in PAIR_OVERRIDES] + overrides
    return args, overrides


def main(argv: list[str]) -> int:
    args, overrides = parse(argv)
    cfg = config_file.load(args.config, overrides)
    world = ranks.start(cfg.parallel)
    if world.size > 1:
        raise Refusal(f"bench.race compares unsharded models in one process; this is one of {world.size}")
    clock = Clock(world.device)
    report = common.environment("bench.race", cfg, world, argv)
    report["peers"], report["refused"] = {}, {}
    for name in args.peers:
        try:
            peers.require([name], cfg)
            report["peers"][name] = peers.race(name, cfg, clock, args.steps, args.warmup)
        except (Refusal, Fault) as error:
            report["refused"][name] = str(error)
    if not report["peers"]:
        raise Refusal("; ".join(report["refused"].values()))
    json_option.show(table(report), report, args.json)
    return 0


def table(report: dict) -> str:
    """The report for the terminal."""
    way = "compiled" if report["config"]["parallel.compile"] else "eager"
    lines = [report["command"], f"  {report['device']}, {report['threads']} threads, torch {report['torch']}"]
    lines.append(f"  {report['parameters']:,} parameters, {report['config']['parallel.dtype']}, {way}")
    lines += [f"  {name} {found['version']}: {peers.summary(found)}" for name, found in report["peers"].items()]
    lines += [f"  {name}: {reason}" for name, reason in report["refused"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    cli.leave(cli.run("bench.race", __doc__, main, sys.argv[1:]))
