"""The training step counted for a GPU that is not there: kernels, bytes, products, and the time by a stated roofline.

    python -m bench.static --arch sm90                                  # configs/schnell_gbs512.toml at micro-batch 32
    python -m bench.static --arch gfx942 --micro-batches 8,32 --presets bf16,fp8_delayed --json bench/results/NAME.json
    python -m bench.static --arch sm90 --binaries                       # registers and spills of the large kernels
    python -m bench.static --compare OLD.json NEW.json
    python -m bench.static --arch sm90 --limits bench/static/limits.json
    python -m bench.static --arch sm90 --measured SWEEP.json COUNTED.json   # profiles against counts

Needs a build of torch with Triton, and no GPU. --ranks N (8) shard the weights. A roofline gives the time: bytes by
--memory-tb-s, products by --bf16-tflops and --fp8-tflops, attention by --attention-tflops. Defaults are shares of the
datasheet. Communication between GPUs, launches and gaps are not in it. --section.key=value overrides the config.
Exit codes: 0 done, 2 refused, 3 a count is above its limit.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from bench import common
from bench.static import measured, parts, report
from bench.static.absent_gpu import GPUS, AbsentGpu
from flux_ref import config_file
from flux_ref.errors import Fault, Refusal
from flux_ref.run import cli
from flux_ref.run.options import between, listed
from tools.shared import json_option

SLACK = 1.02  # a count above its limit times this fails


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the config. Raises: Refusal."""
    parser = common.options("bench.static", __doc__, ranks=8)
    parser.set_defaults(config="configs/schnell_gbs512.toml")
    parser.add_argument("--arch", choices=tuple(GPUS))
    parser.add_argument("--micro-batches", type=listed(between(1, common.MOST)), default=[32])
    parser.add_argument("--presets", type=listed(), default=["bf16"])
    for name in report.SHARES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=between(0.001, common.MOST, float))
    parser.add_argument("--binaries", action="store_true")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("OLD", "NEW"))
    parser.add_argument("--limits", type=Path)
    parser.add_argument("--measured", nargs=2, type=Path, metavar=("SWEEP", "COUNTED"))
    args, overrides = parser.parse_known_args(argv)
    if not args.compare and not args.arch:
        raise Refusal("bench.static needs --arch sm90, sm100, gfx942 or gfx950, or --compare OLD NEW")
    return args, overrides


def read(path: Path) -> dict:
    """A report of --json. Raises: Refusal."""
    try:
        found = json.loads(path.read_text())
    except ValueError as error:
        raise Refusal(f"{path} is no JSON: {error}; give a file that --json has written") from None
    if not isinstance(found, dict) or not isinstance(found.get("runs"), list):
        raise Refusal(f"{path} has no list of runs; give a file that --json has written")
    return found


def main(argv: list[str]) -> int:
    args, overrides = parse(argv)
    if args.compare:
        print(report.compare(*(read(path)["runs"] for path in args.compare)))
        return 0
    if args.measured:
        print(measured.compare(args.arch, *map(read, args.measured)))
        return 0
    cfg = config_file.load(args.config, overrides)
    gpu, runs = AbsentGpu(args.arch), []
    rates = report.rates(GPUS[args.arch].card, args)
    for preset in args.presets:
        for rows in args.micro_batches:
            one = replace(
                cfg,
                train=replace(cfg.train, micro_batch=rows, global_batch=rows * args.ranks),
                precision=replace(cfg.precision, preset=preset),
            )
            found = parts.counts(gpu, one, args.ranks)
            runs.append(report.run(args.arch, one, found, rates, rows))
            print(report.table(runs[-1]), flush=True)
            for line in report.flagged(gpu, found) if args.binaries else ():
                print(f"    {line}", flush=True)
    json_option.give(common.head("bench.static", argv) | {"rates": rates, "runs": runs}, args.json)
    high = report.above(read(args.limits)["runs"], runs, SLACK) if args.limits else []
    if high:
        raise Fault("\n".join(high), alone=True)
    return 0


if __name__ == "__main__":
    cli.leave(cli.run("bench.static", __doc__, main, sys.argv[1:]))
