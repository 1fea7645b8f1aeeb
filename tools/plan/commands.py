"""What a run would take, before it is run: memory, time, communication, disk and cost. Needs no GPU.

    python -m tools.plan CONFIG --gpus 512 --gpu mi300x [--price-per-gpu-hour 2.5] [--section.key=value ...]
    python -m tools.plan configs/schnell_*.toml --gpus 64 --gpu mi325x      a table, a row for each config

Exit codes: 0 done, 1 a config does not fit the card, 2 refused.
"""

import argparse
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from flux_ref import config_file, errors
from flux_ref.errors import Refusal
from flux_ref.formats.outside import printable
from flux_ref.progress import progress
from flux_ref.run.forecast import duration
from flux_ref.run.options import Options, between
from tools.plan import making
from tools.shared import hardware, json_option, public_systems

GB = 1e9
TB = 1e12
MOST_GPUS = 16_384  # a plan lists all ranks
COLUMNS = 80
HEADS = "config           precision   micro-batch  card GB    step s  time"
ROW = "{config:<16.15} {precision:<11} {rows:>11} {total_gb:>8.0f} "
MEMORY = """\
{config} on {gpus} x {gpu}: {precision}, micro-batch {rows}, {replicas} x {shards} shards
memory of a rank, at its fullest instant: {instant.name}"""
CARD = """\
  on the card         {total_gb:8.2f} GB  of {card_gb:g} GB, with assumed margin and context
  pinned on the host  {pinned_gb:8.2f} GB  at most, by the captured graphs of a rank
  largest micro-batch that fits: {largest_rows}; that also divides a rank's {rank_rows} samples: {dividing_rows}"""
STEP = """\
step {times.step:.3g} s ({least_step_s:.3g} to {most_step_s:.3g}): {times.compute:.3g} compute, {times.optimizer:.2g} \
of it the optimizer; {times.exposed:.3f} waiting for links
  gather weights      {gathered_gb:8.2f} GB  sent per rank, {times.all_gather:.2g} s
  reduce gradients    {reduced_gb:8.2f} GB  sent per rank, {times.reduce_scatter:.2g} s
  sum replicas        {summed_gb:8.2f} GB  sent per rank, {times.all_reduce:.2g} s
{samples_per_s:,.0f} samples/s, {per_gpu:,.1f} per GPU, MFU {mfu:.0%} of bf16; an evaluation {evaluation:.1f} s; \
reads {read_gb:.2f} GB/s per node
{goal}: {samples:,.0f} samples, {evaluations} evaluations
  {time} ({least_time} to {most_time}), {gpu_hours:,.0f} GPU hours{priced}"""
DISK = "data {disk_tb:.2f} TB{counted}; checkpoint {checkpoint_gb:.0f} GB"
SHARES = """\
shares of {gpu}'s peaks in {precision}: {own.gemm_share:g} of arithmetic, {own.memory_share:g} of bandwidth; {source}; \
times may be off by a factor of {factor:g}"""
NEAREST = """\
nearest public system: {system}, {gpus} x {gpu} in {precision}, micro-batch {micro_batch} ({source}): {step_s:.3g} s; \
this method gives {planned_s:.3g} s, {error:+z.0%}{why}"""
# Presets, as hardware.toml knows them; fp32 is planned as bf16.
PLANNED = {"bf16": "bf16", "fp8": "fp8", "fp8_delayed": "fp8"}
TIMED = ("times", "samples_per_s", "mfu", "evaluation", "train", "cost", "read_per_node")


@contextmanager
def naming(path: str) -> Iterator[None]:
    """A Refusal of the block names the config in this file."""
    try:
        yield
    except Refusal as refusal:
        raise Refusal(str(refusal) if path in str(refusal) else f"{path}: {refusal}") from None


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the config. Raises: Refusal."""
    parser = Options("python -m tools.plan", __doc__)
    add = parser.add_argument
    add("configs", nargs="+", metavar="CONFIG")
    add("--gpus", type=between(1, MOST_GPUS), required=True, metavar="N")
    add("--gpu", required=True, metavar="NAME", help="a card of tools/shared/hardware.toml or of --hardware")
    add("--price-per-gpu-hour", type=between(0, 1e9, float), default=0.0, metavar="PRICE")
    add("--hardware", type=Path, metavar="FILE", help="figures of your own; they take the place of the table's")
    json_option.json_option(parser)
    return parser.parse_known_args(argv)


def run(argv: list[str]) -> int:
    """Raises: Refusal."""
    args, overrides = parse(argv)
    plans = []
    for path in progress(args.configs, desc="planning", unit=" configs", disable=None, leave=False):  # for people only
        with naming(path):
            plans.append(of_file(path, args, overrides))
    if len(plans) == 1:
        lines = table(plans[0])
        content = figures(plans[0])
    else:
        lines = overview(plans)
        content = {"plans": [figures(plan) for plan in plans]}
    shown = [textwrap.fill(line, COLUMNS, subsequent_indent="    ", replace_whitespace=False) for line in lines]
    json_option.show("\n".join(shown), content | {"overrides": overrides}, args.json)
    return 0 if all(plan.fits for plan in plans) else 1


def of_file(path: str, args: argparse.Namespace, overrides: list[str]) -> SimpleNamespace:
    """The plan of a config. Raises: Refusal."""
    cfg = config_file.load(path, overrides)
    precision = PLANNED.get(cfg.precision.preset)
    if not precision or cfg.precision.rules or cfg.precision.switch:
        known = ", ".join(PLANNED)
        raise Refusal(f"a plan knows the rates of {known}; set precision.preset so, without precision.rules and switch")
    gpu, assumed = hardware.load(args.gpu, args.hardware, precision)
    plan = making.make(cfg, args.gpu, args.gpus, gpu, assumed, args.price_per_gpu_hour)
    plan.nearest = public_systems.nearest(args.gpu, gpu.arch, precision, args.gpus, plan.rows)
    return plan


def figures(plan: SimpleNamespace) -> dict[str, object]:
    """A plan for JSON. Times may be 1 + assumed.range times as long, or as short."""
    found = dict(vars(plan))
    for name in ("instant", "times", "assumed"):
        found[name] = asdict(found[name])
    found["nearest"] = plan.nearest and vars(plan.nearest)
    return found if plan.fits else found | dict.fromkeys(TIMED)


def values(plan: SimpleNamespace) -> dict[str, object]:
    """The figures of a plan in the units of the lines above."""
    sent = plan.times.sent
    off = 1 + plan.assumed.range
    return vars(plan) | {
        "total_gb": plan.total / GB,
        "card_gb": plan.card / GB,
        "pinned_gb": plan.pinned / GB,
        "gathered_gb": sent["all_gather"] / GB,
        "reduced_gb": sent["reduce_scatter"] / GB,
        "summed_gb": sent["all_reduce"] / GB,
        "read_gb": plan.read_per_node / GB,
        "checkpoint_gb": plan.checkpoint / GB,
        "disk_tb": plan.disk / TB,
        "least_step_s": plan.times.step / off,
        "most_step_s": plan.times.step * off,
        "per_gpu": plan.samples_per_s / plan.gpus,
        "time": duration(plan.train),
        "least_time": duration(plan.train / off),
        "most_time": duration(plan.train * off),
        "gpu_hours": plan.gpus * plan.train / 3600,
        "priced": f", cost {plan.cost:,.0f}" if plan.cost else "; --price-per-gpu-hour=X adds their cost",
    }


def overview(plans: list[SimpleNamespace]) -> list[str]:
    """A row for each plan, and what public systems say of them."""
    lines = [HEADS]
    for plan in plans:
        time = f"{plan.times.step:>9.3g}  {duration(plan.train)}" if plan.fits else "  does not fit"
        lines.append(ROW.format(**values(plan)) + time)
    return lines + list(dict.fromkeys(line for plan in plans for line in sources(plan)))


def table(plan: SimpleNamespace) -> list[str]:
    """The plan in lines."""
    known = values(plan)
    parts = [f"  {part:<20}{size / GB:8.2f} GB" for part, size in plan.instant.parts.items()]
    pace = STEP.format(**known) if plan.fits else "no times: this config does not fit the card"
    text = "\n".join([MEMORY.format(**known), *parts, CARD.format(**known), pace, DISK.format(**known)])
    return [*text.split("\n"), *sources(plan), *(f"WARNING {warning}" for warning in plan.warnings)]


def sources(plan: SimpleNamespace) -> list[str]:
    """Where the times come from, and the nearest public system with the error of this method."""
    near = plan.nearest
    own = plan.assumed
    precision = PLANNED.get(plan.precision, plan.precision)
    source = printable(own.source)
    lines = [SHARES.format(gpu=plan.gpu, precision=precision, own=own, source=source, factor=1 + own.range)]
    if not near or (near.gpu, near.precision) != (plan.gpu, precision):
        lines.append(f"no public rate of FLUX.1 on {plan.gpu} in {precision} is known")
    if near:
        why = f"; an outlier: {near.outlier}" if near.outlier else ""
        lines.append(NEAREST.format(**vars(near), error=near.planned_s / near.step_s - 1, why=why))
    return lines


def main(argv: list[str]) -> int:
    return errors.run("plan", run, argv)
