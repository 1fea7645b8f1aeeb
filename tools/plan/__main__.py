"""What a run would take, before it is run: memory, time, communication, disk and cost. Needs no GPU.

    python -m tools.plan CONFIG --gpus 512 --gpu mi300x [--price-per-gpu-hour 2.5] [--layouts]
        [--section.key=value ...]
    python -m tools.plan CONFIG --gpus 8 --measured FILE [--step REPORT] ...

--measured takes the rates that tools.preflight --json wrote on these machines in place of a card's datasheet and of
shares that were fitted elsewhere. --step shows the parts of a report of bench.step --profile beside the plan.
--layouts searches train.micro_batch, compute.activation_memory_budget and parallel.kept_regions for the fastest steps
that fit the card. Where the config itself does not fit, the search runs by itself.

Exit codes: 0 done, 1 the config does not fit the card, 2 refused.
"""

import sys
import textwrap
from pathlib import Path

from flux_ref import cli, config_file, dataset
from flux_ref.cli import Options, Refusal
from flux_ref.config import EvalConfig
from flux_ref.mlperf_closed import TRAIN_SAMPLES
from tools import flops_and_bytes
from tools.figures import between, read_json, table
from tools.plan import plan, step_time
from tools.plan.memory import checkpoint_bytes
from tools.plan.plan import GB, Plan
from tools.plan.public import PLANNED
from tools.plan.step_time import Machine

LAYOUT = ("micro_batch", "activation_memory_budget", "kept_regions", "GB", "s of a step")


def main(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("python -m tools.plan", __doc__)
    add = parser.add_argument
    add("config")
    add("--gpus", type=between(1, 16_384), required=True)
    card = parser.add_mutually_exclusive_group(required=True)
    card.add_argument("--gpu", help="a card of tools/plan/hardware.toml")
    card.add_argument("--measured", type=Path)
    add("--step", type=Path)
    add("--price-per-gpu-hour", type=between(0, 1e9, float), default=0.0)
    add("--layouts", action="store_true")
    args, overrides = parser.parse_known_args(argv)
    cfg = config_file.load(args.config, overrides)
    precision = PLANNED.get(cfg.precision.preset)
    if not precision or cfg.precision.rules or cfg.precision.switch:
        raise Refusal(
            f"a plan knows the rates of {', '.join(PLANNED)}; "
            "set precision.preset so, without precision.rules and switch"
        )

    rates = step_time.measured(args.measured, args.gpus) if args.measured else step_time.load(args.gpu, precision)
    machine = Machine(*rates, args.gpus)
    one = plan.make(cfg, machine)
    label = cfg.precision.preset if precision == "fp8" else cfg.compute.dtype
    fits = one.total <= one.card
    disk = dataset.sample_layout(cfg.model).stride * (
        (cfg.data.expected_train_samples or TRAIN_SAMPLES) + one.val_samples
    )

    lines = [
        f"{cfg.name} on {args.gpus} x {args.gpu or machine.gpu.arch}: {label}, micro-batch {one.layout.rows}, "
        f"{one.layout.replicas} x {one.layout.shards} shards",
        *memory(one),
        *(time(one, args.price_per_gpu_hour) if fits else ["no times: this config does not fit the card"]),
        *(beside(one, read_json(args.step)) if args.step else []),
        f"data {disk / 1e12:.2f} TB; checkpoint {checkpoint_bytes(cfg) * one.layout.parameters / GB:.0f} GB",
        *(f"WARNING {warning}" for warning in plan.warnings(one)),
        *(layouts(plan.fastest(cfg, machine)) if args.layouts or not fits else []),
    ]
    for line in lines:
        print(textwrap.fill(line, 80, subsequent_indent="    "))
    return 0 if fits else 1


def memory(one: Plan) -> list[str]:
    """What a rank holds, by part."""
    parts = one.instant.parts | {"graphs": one.graphs}
    return [
        f"memory of a rank, at its fullest instant: {one.instant.name}",
        *(f"  {part:<20}{size / GB:8.2f} GB" for part, size in parts.items()),
        f"  on the card         {one.total / GB:8.2f} GB  of {one.card / GB:g} GB, with margin and context",
    ]


def beside(one: Plan, report: dict) -> list[str]:
    """The parts of a plan and of a report of bench.step in turn. Raises: Refusal."""
    times = one.times
    works = [work for unit in one.layout.units for work in one.footprints[unit.kind]]
    products = one.layout.micros * sum(map(one.machine.multiplying, works))
    elementwise = one.layout.micros * sum(one.machine.moving(work.moved) for work in works)
    planned = {
        "step": times.step,
        "products": products,
        "elementwise": elementwise,
        "copies": times.compute - times.optimizer - products - elementwise,  # of weights and gradients, by FSDP2
        "links": times.all_gather + times.reduce_scatter + times.all_reduce,  # they work while the card computes
        "optimizer": times.optimizer,
    }
    try:
        measured = {"step": report["step_ms"]["median"], **report["parts_ms"]}
        return [
            f"  {part:<12}{1e3 * seconds:9.1f} ms planned {measured[part]:9.1f} ms measured"
            for part, seconds in planned.items()
        ]
    except (KeyError, TypeError) as error:
        raise Refusal(f"--step: the report lacks {error}; write it with bench.step --profile --json") from None


def layouts(found: list[Plan]) -> list[str]:
    """A table of the first of some plans."""
    rows = [
        [
            f"{one.layout.rows}",
            f"{one.cfg.compute.activation_memory_budget}",
            f"{one.cfg.parallel.kept_regions}",
            f"{one.total / GB:.1f}",
            f"{one.times.step:.4g}",
        ]
        for one in found[:3]
    ]
    return [f"{len(found)} layouts leave {plan.SPARE / GB:g} GB free; the fastest:", *table(LAYOUT, rows)]


def time(one: Plan, price: float) -> list[str]:
    """A step, its communication, and the whole run. price: of a GPU for an hour."""
    times = one.times
    machine = one.machine
    assumed = machine.assumed
    off = 1 + assumed.range
    rate = one.cfg.train.global_batch / times.step
    mfu = flops_and_bytes.per_sample(one.cfg.model) * rate / machine.gpus / (machine.gpu.bf16_tflops * 1e12)
    whole = one.train / 3600
    hours = machine.gpus * whole
    reached = f"{EvalConfig.target} like the reference"
    goal = reached if one.reaches_target else "train.max_samples, as no reference point fits"
    cost = f", cost {price * hours:,.0f}" if price else ""
    return [
        f"step {times.step:.3g} s ({times.step / off:.3g} to {times.step * off:.3g}): {times.compute:.3g} compute, "
        f"{times.optimizer:.2g} of it the optimizer; {times.step - times.compute:z.3f} waiting for links",
        f"  links: {times.all_gather:.2g} s gather weights, {times.reduce_scatter:.2g} s reduce gradients, "
        f"{times.all_reduce:.2g} s sum replicas",
        *([f"  without graphs the host needs {one.host:.2g} s for a step"] if one.host else []),
        f"{rate:,.0f} samples/s, {rate / machine.gpus:,.1f} per GPU, MFU {mfu:.0%} of bf16; "
        f"an evaluation {one.evaluation:.1f} s",
        f"to {goal}: {one.samples:,.0f} samples, {one.evaluations} evaluations",
        f"  {whole:,.1f} hours ({whole / off:,.1f} to {whole * off:,.1f}), {hours:,.0f} GPU hours{cost}",
        f"shares of the card's peaks: {assumed.gemm_share:g} of its arithmetic, {assumed.memory_share:g} of bandwidth; "
        f"{assumed.source}; times may be off by a factor of {off:g}",
    ]


if __name__ == "__main__":
    sys.exit(cli.run("plan", main, sys.argv[1:]))
