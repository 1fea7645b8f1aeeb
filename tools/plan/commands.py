"""What a run would take, before it is run: memory, time, communication, disk and cost. Needs no GPU.

    python -m tools.plan CONFIG --gpus 512 --gpu mi300x [--price-per-gpu-hour 2.5] [--section.key=value ...]
    python -m tools.plan configs/schnell_*.toml --gpus 64 --gpu mi325x      a table, a row for each config

Exit codes: 0 done, 1 a config does not fit the card, 2 refused.
"""

import argparse
import textwrap
from dataclasses import asdict
from pathlib import Path

from flux_ref import config_file, errors
from flux_ref.benchmark.facts import TARGET
from flux_ref.errors import Options, Refusal, between, printable
from flux_ref.progress import progress
from flux_ref.run.forecast import duration
from tools.plan import hardware, plan, public
from tools.plan.plan import Plan
from tools.plan.public import PLANNED
from tools.plan.step_time import Machine
from tools.shared import json_option

GB = 1e9
TB = 1e12
MOST_GPUS = 16_384  # a plan lists all ranks
COLUMNS = 80
TIMED = ("times", "samples_per_s", "mfu", "evaluation", "train", "cost")  # null where a config does not fit


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the config. Raises: Refusal."""
    parser = Options("python -m tools.plan", __doc__)
    add = parser.add_argument
    add("configs", nargs="+", metavar="CONFIG")
    add("--gpus", type=between(1, MOST_GPUS), required=True, metavar="N")
    add("--gpu", required=True, metavar="NAME", help="a card of tools/plan/hardware.toml or of --hardware")
    add("--price-per-gpu-hour", type=between(0, 1e9, float), default=0.0, metavar="PRICE")
    add("--hardware", type=Path, metavar="FILE", help="figures of your own; they take the place of the table's")
    json_option.json_option(parser)
    return parser.parse_known_args(argv)


def run(argv: list[str]) -> int:
    """Raises: Refusal."""
    args, overrides = parse(argv)
    plans = []
    for path in progress(args.configs, desc="planning", unit=" configs", disable=None, leave=False):  # for people only
        try:
            plans.append(of_file(path, args, overrides))
        except Refusal as refusal:
            raise Refusal(str(refusal) if path in str(refusal) else f"{path}: {refusal}") from None
    found = [asdict(one) | ({} if one.fits else dict.fromkeys(TIMED)) for one in plans]
    lines = table(plans[0]) if len(plans) == 1 else overview(plans)
    figures = found[0] if len(plans) == 1 else {"plans": found}
    shown = [textwrap.fill(line, COLUMNS, subsequent_indent="    ", replace_whitespace=False) for line in lines]
    json_option.show("\n".join(shown), figures | {"overrides": overrides}, args.json)
    return 0 if all(one.fits for one in plans) else 1


def of_file(path: str, args: argparse.Namespace, overrides: list[str]) -> Plan:
    """The plan of a config. Raises: Refusal."""
    cfg = config_file.load(path, overrides)
    precision = PLANNED.get(cfg.precision.preset)
    if not precision or cfg.precision.rules or cfg.precision.switch:
        known = ", ".join(PLANNED)
        raise Refusal(f"a plan knows the rates of {known}; set precision.preset so, without precision.rules and switch")
    gpu, assumed = hardware.load(args.gpu, args.hardware, precision)
    found = plan.make(cfg, args.gpu, Machine(gpu, assumed, args.gpus), args.price_per_gpu_hour)
    found.nearest = public.nearest(args.gpu, gpu.arch, precision, args.gpus, found.rows)
    if found.nearest:
        found.nearest_planned_s = public.planned_s(found.nearest)
    return found


def overview(plans: list[Plan]) -> list[str]:
    """A row for each plan, and what public systems say of them."""
    lines = [f"{'config':<16} {'precision':<11} micro-batch  card GB    step s  time"]
    for one in plans:
        time = f"{one.times.step:>9.3g}  {duration(one.train)}" if one.fits else "  does not fit"
        lines.append(f"{one.config:<16.15} {one.precision:<11} {one.rows:>11} {one.total / GB:>8.0f} {time}")
    return lines + list(dict.fromkeys(line for one in plans for line in sources(one)))


def table(one: Plan) -> list[str]:
    """The plan in lines."""
    mesh = f"{one.replicas} x {one.shards} shards"
    lines = [
        f"{one.config} on {one.gpus} x {one.gpu}: {one.precision}, micro-batch {one.rows}, {mesh}",
        f"memory of a rank, at its fullest instant: {one.instant.name}",
        *(f"  {part:<20}{size / GB:8.2f} GB" for part, size in one.instant.parts.items()),
        f"  on the card         {one.total / GB:8.2f} GB  of {one.card / GB:g} GB, with assumed margin and context",
        f"  largest micro-batch that fits: {one.largest_rows}; that also divides a rank's {one.rank_rows} samples: "
        f"{one.dividing_rows}",
        *(pace(one) if one.fits else ["no times: this config does not fit the card"]),
        f"data {one.disk / TB:.2f} TB; checkpoint {one.checkpoint / GB:.0f} GB",
    ]
    return [*lines, *sources(one), *(f"WARNING {warning}" for warning in one.warnings)]


def pace(one: Plan) -> list[str]:
    """Times, communication and cost."""
    times = one.times
    off = 1 + one.assumed.range
    cost = f", cost {one.cost:,.0f}" if one.cost else "; --price-per-gpu-hour=X adds their cost"
    goal = (
        f"to {TARGET} like the reference" if one.reaches_target else "to train.max_samples, as no reference point fits"
    )
    links = {
        "gather weights": ("all_gather", times.all_gather),
        "reduce gradients": ("reduce_scatter", times.reduce_scatter),
        "sum replicas": ("all_reduce", times.all_reduce),
    }
    return [
        f"step {times.step:.3g} s ({times.step / off:.3g} to {times.step * off:.3g}): {times.compute:.3g} compute, "
        f"{times.optimizer:.2g} of it the optimizer; {times.step - times.compute:z.3f} waiting for links",
        *(
            f"  {name:<20}{times.sent[collective] / GB:8.2f} GB  sent per rank, {seconds:.2g} s"
            for name, (collective, seconds) in links.items()
        ),
        f"{one.samples_per_s:,.0f} samples/s, {one.samples_per_s / one.gpus:,.1f} per GPU, MFU {one.mfu:.0%} of bf16; "
        f"an evaluation {one.evaluation:.1f} s",
        f"{goal}: {one.samples:,.0f} samples, {one.evaluations} evaluations",
        f"  {duration(one.train)} ({duration(one.train / off)} to {duration(one.train * off)}), "
        f"{one.gpus * one.train / 3600:,.0f} GPU hours{cost}",
    ]


def sources(one: Plan) -> list[str]:
    """Where the times come from, and the nearest public system with the error of this method."""
    near = one.nearest
    own = one.assumed
    precision = PLANNED.get(one.precision, one.precision)
    lines = [
        f"shares of {one.gpu}'s peaks in {precision}: {own.gemm_share:g} of arithmetic, {own.memory_share:g} of "
        f"bandwidth; {printable(own.source)}; times may be off by a factor of {1 + own.range:g}"
    ]
    if not near or (near.gpu, near.precision) != (one.gpu, precision):
        lines.append(f"no public rate of FLUX.1 on {one.gpu} in {precision} is known")
    if near:
        why = f"; an outlier: {near.outlier}" if near.outlier else ""
        planned_s = one.nearest_planned_s
        lines.append(
            f"nearest public system: {near.system}, {near.gpus} x {near.gpu} in {near.precision}, micro-batch "
            f"{near.micro_batch} ({near.source}): {near.step_s:.3g} s; this method gives {planned_s:.3g} s, "
            f"{planned_s / near.step_s - 1:+z.0%}{why}"
        )
    return lines


def main(argv: list[str]) -> int:
    return errors.run("plan", run, argv)
