"""The training step counted for a GPU that is not there: kernels, bytes, products, and the time by a stated roofline.

    python -m bench.static --arch sm90                                  # configs/schnell_gbs512.toml at micro-batch 32
    python -m bench.static --arch gfx942 --micro-batches 8,32 --presets bf16,fp8_delayed --json bench/results/NAME.json
    python -m bench.static --arch sm90 --parallel.activation_budget=1.0 --limits    # against static/limits.json

Needs a build of torch with Triton, and no GPU. --ranks N (8) shard the weights. A roofline gives the time: bytes,
products and attention at shares of the datasheet's rates. Communication between GPUs, launches and gaps are not in it.
--section.key=value overrides the config.
Exit codes: 0 done, 2 refused, 3 a count is above its limit.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from bench import common
from bench.static import parts, report
from bench.static.absent_gpu import GPUS, AbsentGpu
from flux_ref import config_file
from flux_ref.errors import Fault
from flux_ref.run import cli
from flux_ref.run.options import between, listed
from tools.shared import json_option

LIMITS = Path(__file__).with_name("limits.json")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the config. Raises: Refusal."""
    parser = common.options("bench.static", __doc__, ranks=8)
    parser.set_defaults(config="configs/schnell_gbs512.toml")
    parser.add_argument("--arch", choices=tuple(GPUS), required=True)
    parser.add_argument("--micro-batches", type=listed(between(1, common.MOST)), default=[32])
    parser.add_argument("--presets", type=listed(), default=["bf16"])
    parser.add_argument("--limits", action="store_true")
    return parser.parse_known_args(argv)


def main(argv: list[str]) -> int:
    args, overrides = parse(argv)
    cfg = config_file.load(args.config, overrides)
    gpu = AbsentGpu(args.arch)
    rates = report.rates(GPUS[args.arch].card)
    runs = []
    for preset in args.presets:
        for rows in args.micro_batches:
            train = replace(cfg.train, micro_batch=rows, global_batch=rows * args.ranks)
            one = replace(cfg, train=train, precision=replace(cfg.precision, preset=preset))
            found = parts.counts(gpu, one, args.ranks)
            runs.append(report.run(args.arch, one, found, rates, rows))
            print(report.table(runs[-1]), flush=True)
    json_option.give(common.head("bench.static", argv) | {"rates": {args.arch: rates}, "runs": runs}, args.json)
    high = report.above(json.loads(LIMITS.read_text())["runs"], runs) if args.limits else []
    if high:
        raise Fault("\n".join(high), alone=True)
    return 0


if __name__ == "__main__":
    cli.leave(cli.run("bench.static", __doc__, main, sys.argv[1:]))
