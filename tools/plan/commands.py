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
from flux_ref.run.options import Options, between
from tools.plan import making
from tools.shared import hardware, json_option, public_systems

GB = 1e9
MOST_GPUS = 16_384  # a plan lists all ranks
COLUMNS = 80
COLLECTIVES = {"all_gather": "gather weights", "reduce_scatter": "reduce gradients", "all_reduce": "sum replicas"}
# Presets, as hardware.toml knows them; fp32 is planned as bf16.
PLANNED = {"bf16": "bf16", "fp8": "fp8", "fp8_delayed": "fp8"}
SPANS = ((2 * 86400, 86400, "days"), (7200, 3600, "h"), (120, 60, "min"))  # from, unit, its name
HEADS = f"{'config':<16}{'precision':<12}{'micro-batch':>11}{'card GB':>9}{'step ms':>10}  time (range)"
TIMED = ("times", "samples_per_s", "mfu", "evaluation", "train", "cost", "read_per_node", "init", "checkpoint_write")


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
    plans = []
    refused = []
    alone = len(args.configs) == 1
    for path in args.configs:
        try:
            plans.append(of_file(path, args, overrides))
        except Refusal as refusal:
            if alone:
                raise
            refused.append(f"{path}: {refusal}")
    every = {"plans": [figures(plan) for plan in plans], "refused": refused}
    text = table(plans[0]) if alone else "\n".join([*overview(plans), *refused])
    json_option.show(text, (every["plans"][0] if alone else every) | {"overrides": overrides}, args.json)
    return 2 if refused else 0 if all(plan.fits for plan in plans) else 1


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
    parts = {name: asdict(getattr(plan, name)) for name in ("moment", "times", "assumed")}
    parts |= {"nearest": plan.nearest and vars(plan.nearest)} | ({} if plan.fits else dict.fromkeys(TIMED))
    return vars(plan) | parts


def overview(plans: list[SimpleNamespace]) -> list[str]:
    """A row for each plan, and what public systems say of them."""
    lines = [HEADS]
    for plan in plans:
        lines.append(f"{plan.config[:15]:<16}{plan.precision:<12}{plan.rows:>11}{plan.total / GB:>9.0f}")
        times = f"{_ms(plan.times.step):>10}  {span(plan.train, 1 + plan.assumed.range)}"
        lines[-1] += times if plan.fits else f"  does not fit {plan.card / GB:g} GB"
    said = dict.fromkeys(line for plan in plans for line in sources(plan))
    return lines + [part for line in said for part in _wrapped(line)]


def table(plan: SimpleNamespace) -> str:
    """The plan for a terminal of 80 columns."""
    total = plan.moment.total
    lines = [
        f"{plan.config} on {plan.gpus} x {plan.gpu}: {plan.precision}, micro-batch {plan.rows},"
        f" {plan.replicas} x {plan.shards} shards",
        f"memory of a rank, at its fullest moment: {plan.moment.name}",
        *(f"  {part:<20}{_gb(size)}  {size / total:4.0%}" for part, size in plan.moment.parts.items()),
        f"  {'all tensors':<20}{_gb(total)}        {plan.in_graph / GB:.1f} GB of it in the pool of graphs",
        f"  {'on the card':<20}{_gb(plan.total)}  of {plan.card / GB:g} GB, with assumed margin and context",
        *([f"  {'pinned on the host':<20}{_gb(plan.pinned)}  at most, by the graphs of a rank"] * bool(plan.pinned)),
        f"  largest micro-batch that fits: {plan.largest_rows}; that also divides a rank's {plan.rank_rows} samples:"
        f" {plan.dividing_rows}",
        *(_pace(plan) if plan.fits else ["no times: this config does not fit the card"]),
        *sources(plan),
        *(f"WARNING {text}" for text in plan.warnings),
    ]
    return "\n".join(part for line in lines for part in _wrapped(line))


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
    taken = sorted(filter(None, plan.public_samples))
    public = f"; public runs took {taken[0] / 1e6:.1f} to {taken[-1] / 1e6:.1f} M samples" if taken else ""
    return [
        *lines,
        f"{rate:,.0f} samples/s ({rate / off:,.0f} to {rate * off:,.0f}), {rate / plan.gpus:,.1f} per GPU, MFU"
        f" {plan.mfu:.0%} of bf16; an evaluation {plan.evaluation:.1f} s",
        f"{plan.goal}: {plan.samples:,.0f} samples, {plan.evaluations} evaluations{public}",
        f"  {span(plan.train, off)}, {plan.gpus * plan.train / 3600:,.0f} GPU hours"
        + (f", cost {plan.cost:,.0f} ({plan.cost / off:,.0f} to {plan.cost * off:,.0f})" if plan.cost else ""),
        f"data {plan.disk / 1e12:.2f} TB{plan.counted}; read {plan.read_per_node / GB:.2f} GB/s per node",
        f"checkpoint {plan.checkpoint / GB:.0f} GB: {plan.checkpoint_copy:.1f} s stop, {plan.checkpoint_write:.0f} s"
        " behind the training",
        f"initialisation {plan.init:.0f} s and compilation, which is not counted",
    ]


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
        error = round(near.planned_s / near.step_s - 1, 2) + 0.0  # no -0
        lines.append(
            f"nearest public system: {near.system}, {near.gpus} x {near.gpu} in {near.precision}, micro-batch"
            f" {near.micro_batch} ({near.source}): {_ms(near.step_s)} ms; this method gives {_ms(near.planned_s)} ms,"
            f" {error:+.0%}{'; an outlier: ' * bool(near.outlier)}{near.outlier}"
        )
    return lines


def span(seconds: float, off: float) -> str:
    """A time in the unit that suits it, with its range: 13.2 (10.2 to 17.2) h."""
    if seconds < 1:
        return "under 1 s"
    unit, name = next(((unit, name) for least, unit, name in SPANS if seconds >= least), (1, "s"))
    return f"{seconds / unit:.3g} ({seconds / off / unit:.3g} to {seconds * off / unit:.3g}) {name}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.01 or not seconds else f"{seconds * 1e3:.2g}"


def _gb(size: float) -> str:
    return f"{size / GB:8.2f} GB"


def _wrapped(line: str) -> list[str]:
    return textwrap.wrap(line, COLUMNS, subsequent_indent="    ", replace_whitespace=False)


def main(argv: list[str]) -> int:
    return attempt("plan", lambda: run(argv))
