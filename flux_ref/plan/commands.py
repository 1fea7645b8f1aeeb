"""What a run would take, before it is run: memory, time, communication, disk and cost. Needs no GPU.

    python -m flux_ref.plan CONFIG --gpus 512 --gpu mi300x [--price-per-gpu-hour 2.5] [--section.key=value ...]

Exit codes: 0 done, 2 refused.
"""

import argparse
import textwrap
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from flux_ref import config_file
from flux_ref.benchmark import hardware
from flux_ref.benchmark.facts import TARGET
from flux_ref.run import json_option
from flux_ref.run.attempt import attempt
from flux_ref.run.options import Options, between

GB = 1e9
MOST_GPUS = 16_384  # a plan lists all ranks
COLUMNS = 80
COLLECTIVES = {"all_gather": "gather weights", "reduce_scatter": "reduce gradients", "all_reduce": "sum replicas"}


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the config. Raises: Refusal."""
    parser = Options("python -m flux_ref.plan", __doc__)
    add = parser.add_argument
    add("config", metavar="CONFIG")
    add("--gpus", type=between(1, MOST_GPUS), required=True, metavar="N")
    add("--gpu", required=True, metavar="NAME", help="a card of flux_ref/benchmark/hardware.toml or of --hardware")
    add("--price-per-gpu-hour", type=between(0, 1e9, float), default=0.0, metavar="PRICE")
    add("--hardware", type=Path, metavar="FILE", help="figures of your own; they take the place of the table's")
    json_option.json_option(parser)
    return parser.parse_known_args(argv)


def run(argv: list[str]) -> int:
    args, overrides = parse(argv)
    cfg = config_file.load(args.config, overrides)
    gpu, assumed = hardware.load(args.gpu, args.hardware)
    from flux_ref.plan import making  # brings torch

    plan = making.make(cfg, args.gpu, args.gpus, gpu, assumed, args.price_per_gpu_hour)
    figures = vars(plan) | {"moment": asdict(plan.moment), "times": asdict(plan.times), "assumed": asdict(assumed)}
    json_option.show(table(plan), figures | {"overrides": overrides}, args.json)
    return 0


def table(plan: SimpleNamespace) -> str:
    """The plan for a terminal of 80 columns."""
    times, total = plan.times, plan.moment.total
    lines = [
        f"{plan.config} on {plan.gpus} x {plan.gpu}: micro-batch {plan.rows}, {plan.replicas} x {plan.shards} shards",
        f"memory of a rank, at its fullest moment: {plan.moment.name}",
        *(f"  {part:<20}{_gb(size)}  {size / total:4.0%}" for part, size in plan.moment.parts.items()),
        f"  {'all tensors':<20}{_gb(total)}        {plan.in_graph / GB:.1f} GB of it in the pool of graphs",
        f"  {'on the card':<20}{_gb(plan.total)}  of {plan.card / GB:g} GB, with assumed margin and context",
        f"  largest micro-batch that fits: {plan.largest_rows}",
        f"step {times.step * 1e3:.0f} ms: {times.compute * 1e3:.0f} compute, {times.optimizer * 1e3:.1f} of it the"
        f" optimizer; {times.exposed * 1e3:.0f} waiting for links",
    ]
    for name, words in COLLECTIVES.items():
        if times.sent[name]:
            lines.append(f"  {words:<20}{_gb(times.sent[name])}  sent per rank, {getattr(times, name) * 1e3:.0f} ms")
    if times.communication:
        hidden = max(0.0, times.communication - times.exposed)
        lines.append(f"  {hidden / times.communication:.0%} of communication hides behind compute")
    lines.append(
        f"{plan.samples_per_s:,.0f} samples/s, {plan.samples_per_s / plan.gpus:.1f} per GPU, MFU {plan.mfu:.0%} of"
        f" bf16; an evaluation {plan.evaluation:.1f} s"
    )
    if plan.train is None:
        lines.append("time to target: unknown; no reference convergence point is like this config")
    else:
        cost = f", cost {plan.cost:,.0f}" if plan.cost else ""
        lines.append(f"to {TARGET}: {plan.samples / 1e6:.2f} M samples (reference), {plan.evaluations} evaluations")
        lines.append(f"  {plan.train / 60:.1f} min, {plan.gpus * plan.train / 3600:,.0f} GPU hours{cost}")
    lines += [
        f"data {plan.disk / 1e12:.2f} TB; read {plan.read_per_node / GB:.2f} GB/s per node",
        f"checkpoint {plan.checkpoint / GB:.0f} GB: {plan.checkpoint_copy:.1f} s stop, {plan.checkpoint_write:.0f} s"
        " behind the training",
        f"initialisation {plan.init:.0f} s and compilation, which is not counted",
        "compute: from shares of peak figures; bench.plan_check tells how far off",
        *(f"WARNING {text}" for text in plan.warnings),
    ]
    return "\n".join(part for line in lines for part in _wrapped(line))


def _gb(size: float) -> str:
    return f"{size / GB:8.2f} GB"


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, COLUMNS, subsequent_indent="    ", replace_whitespace=False)


def main(argv: list[str]) -> int:
    return attempt("plan", lambda: run(argv))
