"""What a run would take, before it is run: memory, time, communication, disk and cost. Needs no GPU.

    python -m tools.plan CONFIG --gpus 512 --gpu mi300x [--price-per-gpu-hour 2.5] [--section.key=value ...]
    python -m tools.plan configs/*.toml --gpus 64 --gpu mi325x      a table, a row for each config

Exit codes: 0 done, 1 a config does not fit the card, 2 refused.
"""

import argparse
import textwrap
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

from flux_ref import config_file
from flux_ref.errors import Refusal
from flux_ref.formats.outside import printable
from flux_ref.run.attempt import attempt
from flux_ref.run.forecast import duration
from flux_ref.run.options import Options, between
from tools.plan import making
from tools.shared import hardware, json_option, public_systems

GB = 1e9
MOST_GPUS = 16_384  # a plan lists all ranks
COLUMNS = 80
COLLECTIVES = {"all_gather": "gather weights", "reduce_scatter": "reduce gradients", "all_reduce": "sum replicas"}
# Presets, as hardware.toml knows them; fp32 is planned as bf16.
PLANNED = {"bf16": "bf16", "fp8": "fp8", "fp8_delayed": "fp8"}
HEADS = f"{'config':<16}{'precision':<12}{'micro-batch':>11}{'card GB':>9}{'step ms':>10}  time"
TIMED = ("times", "samples_per_s", "mfu", "evaluation", "train", "cost", "read_per_node")


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
    args, overrides = parse(argv)
    if len(args.configs) == 1:
        plan = of_file(args.configs[0], args, overrides)
        json_option.show(wrapped(table(plan)), figures(plan) | {"overrides": overrides}, args.json)
        return 0 if plan.fits else 1
    plans = []
    refused = []
    for path in args.configs:
        try:
            plans.append(of_file(path, args, overrides))
        except Refusal as refusal:
            refused.append(f"{path}: {refusal}")
    content = {"plans": [figures(plan) for plan in plans], "refused": refused, "overrides": overrides}
    json_option.show("\n".join([wrapped(overview(plans)), *refused]), content, args.json)
    if refused:
        return Refusal.exit_code
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
    for name in ("moment", "times", "assumed"):
        found[name] = asdict(found[name])
    found["nearest"] = plan.nearest and vars(plan.nearest)
    return found if plan.fits else found | dict.fromkeys(TIMED)


def overview(plans: list[SimpleNamespace]) -> list[str]:
    """A row for each plan, and what public systems say of them."""
    lines = [HEADS]
    for plan in plans:
        row = f"{plan.config[:15]:<16}{plan.precision:<12}{plan.rows:>11}{plan.total / GB:>9.0f}"
        if plan.fits:
            lines.append(f"{row}{_ms(plan.times.step):>10}  {duration(plan.train)}")
        else:
            lines.append(f"{row}  does not fit {plan.card / GB:g} GB")
    return lines + list(dict.fromkeys(line for plan in plans for line in sources(plan)))


def table(plan: SimpleNamespace) -> list[str]:
    """The plan in lines."""
    total = plan.moment.total
    lines = [
        f"{plan.config} on {plan.gpus} x {plan.gpu}: {plan.precision}, micro-batch {plan.rows},"
        f" {plan.replicas} x {plan.shards} shards",
        f"memory of a rank, at its fullest moment: {plan.moment.name}",
    ]
    for part, size in plan.moment.parts.items():
        lines.append(f"  {part:<20}{_gb(size)}  {size / total:4.0%}")
    lines += [
        f"  {'all tensors':<20}{_gb(total)}",
        f"  {'on the card':<20}{_gb(plan.total)}  of {plan.card / GB:g} GB, with assumed margin and context",
        f"  {'pinned on the host':<20}{_gb(plan.pinned)}  at most, by the captured graphs of a rank",
        f"  largest micro-batch that fits: {plan.largest_rows}; that also divides a rank's {plan.rank_rows} samples:"
        f" {plan.dividing_rows}",
    ]
    lines += _pace(plan) if plan.fits else ["no times: this config does not fit the card"]
    lines += [f"data {plan.disk / 1e12:.2f} TB{plan.counted}; checkpoint {plan.checkpoint / GB:.0f} GB"]
    return lines + sources(plan) + [f"WARNING {text}" for text in plan.warnings]


def _pace(plan: SimpleNamespace) -> list[str]:
    times = plan.times
    off = 1 + plan.assumed.range
    rate = plan.samples_per_s
    lines = [
        f"step {_ms(times.step)} ms ({_ms(times.step / off)} to {_ms(times.step * off)}): {_ms(times.compute)} compute,"
        f" {_ms(times.optimizer)} of it the optimizer; {_ms(times.exposed)} waiting for links"
    ]
    for name, words in COLLECTIVES.items():
        if times.sent[name]:
            lines.append(f"  {words:<20}{_gb(times.sent[name])}  sent per rank, {_ms(getattr(times, name))} ms")
    lines += [
        f"{rate:,.0f} samples/s, {rate / plan.gpus:,.1f} per GPU, MFU {plan.mfu:.0%} of bf16; an evaluation"
        f" {plan.evaluation:.1f} s; reads {plan.read_per_node / GB:.2f} GB/s per node",
        f"{plan.goal}: {plan.samples:,.0f} samples, {plan.evaluations} evaluations",
        f"  {duration(plan.train)} ({duration(plan.train / off)} to {duration(plan.train * off)}),"
        f" {plan.gpus * plan.train / 3600:,.0f} GPU hours",
    ]
    if plan.cost:
        lines[-1] += f", cost {plan.cost:,.0f}"
    return lines


def sources(plan: SimpleNamespace) -> list[str]:
    """Where the times come from, and the nearest public system with the error of this method."""
    near = plan.nearest
    own = plan.assumed
    precision = PLANNED.get(plan.precision, plan.precision)
    lines = [
        f"shares of {plan.gpu}'s peaks in {precision}: {own.gemm_share:g} of arithmetic, {own.memory_share:g} of"
        f" bandwidth; {printable(own.source)}; times may be off by a factor of {1 + own.range:g}"
    ]
    if not near or (near.gpu, near.precision) != (plan.gpu, precision):
        lines.append(f"no public rate of FLUX.1 on {plan.gpu} in {precision} is known")
    if near:
        error = near.planned_s / near.step_s - 1
        lines.append(
            f"nearest public system: {near.system}, {near.gpus} x {near.gpu} in {near.precision}, micro-batch"
            f" {near.micro_batch} ({near.source}): {_ms(near.step_s)} ms; this method gives {_ms(near.planned_s)} ms,"
            f" {error:+z.0%}"
        )
        if near.outlier:
            lines[-1] += f"; an outlier: {near.outlier}"
    return lines


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.01 or not seconds else f"{seconds * 1e3:.2g}"


def _gb(size: float) -> str:
    return f"{size / GB:8.2f} GB"


def wrapped(lines: list[str]) -> str:
    """Lines as a terminal of 80 columns shows them."""
    return "\n".join(textwrap.fill(line, COLUMNS, subsequent_indent="    ", replace_whitespace=False) for line in lines)


def main(argv: list[str]) -> int:
    return attempt("plan", lambda: run(argv))
