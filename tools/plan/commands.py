"""What a run would take, before it is run: memory, time, communication, disk and cost. Needs no GPU.

    python -m tools.plan CONFIG --gpus 512 --gpu mi300x [--price-per-gpu-hour 2.5] [--section.key=value ...]

Exit codes: 0 done, 1 the config does not fit the card, 2 refused.
"""

import textwrap

from flux_ref import config_file, errors
from flux_ref.config import EvalConfig
from flux_ref.errors import Options, Refusal, between
from flux_ref.progress import duration
from tools.plan import hardware, plan
from tools.plan.plan import GB, Plan
from tools.plan.public import PLANNED
from tools.plan.step_time import Machine

TB = 1e12
MOST_GPUS = 16_384  # a plan lists all ranks
COLUMNS = 80


def run(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("python -m tools.plan", __doc__)
    add = parser.add_argument
    add("config", metavar="CONFIG")
    add("--gpus", type=between(1, MOST_GPUS), required=True, metavar="N")
    add("--gpu", required=True, metavar="NAME", help="a card of tools/plan/hardware.toml")
    add("--price-per-gpu-hour", type=between(0, 1e9, float), default=0.0, metavar="PRICE")
    args, overrides = parser.parse_known_args(argv)
    cfg = config_file.load(args.config, overrides)
    precision = PLANNED.get(cfg.precision.preset)
    if not precision or cfg.precision.rules or cfg.precision.switch:
        known = ", ".join(PLANNED)
        raise Refusal(f"a plan knows the rates of {known}; set precision.preset so, without precision.rules and switch")
    gpu, assumed = hardware.load(args.gpu, precision)
    one = plan.make(cfg, Machine(gpu, assumed, args.gpus))
    lines = [
        f"{cfg.name} on {args.gpus} x {args.gpu}: {one.precision}, micro-batch {one.rows}, "
        f"{one.layout.replicas} x {one.layout.shards} shards",
        *memory(one),
    ]
    if one.fits:
        lines += time(one)
        lines += total(one, args.price_per_gpu_hour)
        lines.append(
            f"shares of {args.gpu}'s peaks in {precision}: {assumed.gemm_share:g} of arithmetic, "
            f"{assumed.memory_share:g} of bandwidth; {assumed.source}; times may be off by a factor of "
            f"{1 + assumed.range:g}"
        )
    else:
        lines.append("no times: this config does not fit the card")
    lines.append(f"data {one.disk / TB:.2f} TB; checkpoint {one.checkpoint / GB:.0f} GB")
    lines += [f"WARNING {warning}" for warning in one.warnings]
    for line in lines:
        print(textwrap.fill(line, COLUMNS, subsequent_indent="    ", replace_whitespace=False))
    return 0 if one.fits else 1


def memory(one: Plan) -> list[str]:
    """What a rank holds, by part."""
    lines = [f"memory of a rank, at its fullest instant: {one.instant.name}"]
    for part, size in one.instant.parts.items():
        lines.append(f"  {part:<20}{size / GB:8.2f} GB")
    lines.append(f"  on the card         {one.total / GB:8.2f} GB  of {one.card / GB:g} GB, with margin and context")
    lines.append(
        f"  largest micro-batch that fits: {one.largest_rows}; that also divides a rank's samples: {one.dividing_rows}"
    )
    return lines


def time(one: Plan) -> list[str]:
    """A step, and its communication."""
    times = one.times
    off = 1 + one.machine.assumed.range
    lines = [
        f"step {times.step:.3g} s ({times.step / off:.3g} to {times.step * off:.3g}): {times.compute:.3g} compute, "
        f"{times.optimizer:.2g} of it the optimizer; {times.step - times.compute:z.3f} waiting for links"
    ]
    links = {
        "all_gather": ("gather weights", times.all_gather),
        "reduce_scatter": ("reduce gradients", times.reduce_scatter),
        "all_reduce": ("sum replicas", times.all_reduce),
    }
    for collective, (name, seconds) in links.items():
        sent = times.sent[collective] / GB
        lines.append(f"  {name:<20}{sent:8.2f} GB  sent per rank, {seconds:.2g} s")
    return lines


def total(one: Plan, price: float) -> list[str]:
    """The whole run. price: of a GPU for an hour."""
    off = 1 + one.machine.assumed.range
    gpus = one.machine.gpus
    hours = gpus * one.train / 3600
    goal = f"to {EvalConfig.target} like the reference"
    if not one.reaches_target:
        goal = "to train.max_samples, as no reference point fits"
    cost = f", cost {price * hours:,.0f}" if price else ""
    return [
        f"{one.samples_per_s:,.0f} samples/s, {one.samples_per_s / gpus:,.1f} per GPU, MFU {one.mfu:.0%} of bf16; "
        f"an evaluation {one.evaluation:.1f} s",
        f"{goal}: {one.samples:,.0f} samples, {one.evaluations} evaluations",
        f"  {duration(one.train)} ({duration(one.train / off)} to {duration(one.train * off)}), "
        f"{hours:,.0f} GPU hours{cost}",
    ]


def main(argv: list[str]) -> int:
    return errors.run("plan", run, argv)
