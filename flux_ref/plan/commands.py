"""What a run would take, before it is run: memory, time, communication, disk and cost. Needs no GPU.

    python -m flux_ref.plan CONFIG --gpus 512 --gpu mi300x [--price-per-gpu-hour 2.5] [--section.key=value ...]

--hardware FILE      figures of your own over those of flux_ref/hardware.toml, which lists the GPUs and their sources
--calibrate FILE     compute times from a report of bench.whole or bench.sweep instead of shares of peak figures
--json[=FILE.json]   all figures, printed in place of the table or written beside it
Exit codes: 0 done, 2 refused.
"""

import argparse
import json
import math
import textwrap
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

from flux_ref import config, config_file, config_rules, schedule
from flux_ref.benchmark import convergence, flops, hardware
from flux_ref.benchmark.communication import Layout
from flux_ref.benchmark.facts import TARGET, TRAIN_SAMPLES, VAL_SAMPLES
from flux_ref.benchmark.hardware import Assumed, Calibration, Gpu
from flux_ref.checkpoint import BYTES_PER_PARAMETER
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import shards
from flux_ref.plan import footprint, memory, step_time
from flux_ref.plan.footprint import Footprint
from flux_ref.plan.memory import Moment
from flux_ref.plan.step_time import Machine, Times
from flux_ref.run import json_option

GB = 1e9
INIT_BUDGET_S = 1800  # closed division, before the clock starts
LARGEST = 4096  # micro-batch that is looked at
MOST_GPUS = 16_384  # a plan lists all ranks
SAME = ("parallel.compile", "parallel.activation_budget", "parallel.recompute", "parallel.dtype", "fp8.recipe")


@dataclass(frozen=True)
class Plan:
    """All that is printed. Times in seconds, sizes in bytes unless the name says otherwise."""

    config: str
    gpu: str
    gpus: int
    rows: int  # micro-batch
    shards: int
    replicas: int
    moment: Moment
    total: float  # with the margin and what lies outside of tensors
    card: float
    in_graph: float
    largest_rows: int
    times: Times
    samples_per_s: float
    mfu: float
    evaluation: float
    evaluations: int | None
    samples: float | None
    train: float | None
    cost: float | None
    disk: float
    read_per_node: float
    checkpoint: float
    checkpoint_copy: float
    checkpoint_write: float
    init: float
    calibrated: str
    warnings: list[str]


def make(
    cfg: Config, name: str, gpus: int, gpu: Gpu, assumed: Assumed, measured: list[Calibration] = (), price: float = 0.0
) -> Plan:
    """Raises: Refusal if the config does not fit the number of GPUs, or the measurements not the config."""
    config_rules.validate_world(cfg, gpus)
    if cfg.fp8.recipe != "off" and not gpu.fp8_tflops:
        raise Refusal(f"fp8.recipe={cfg.fp8.recipe} needs FP8 matrix units, {name} has none; set fp8.recipe=off")
    rows, machine = config.micro_batch(cfg, gpus), Machine(gpu, assumed, gpus)
    layout = footprint.layout(cfg, gpus, gpu.node)
    found = footprint.trace(cfg, gpu.arch, rows)
    moment = memory.fullest(memory.moments(cfg, layout, found, gpus, rows))
    slower, calibrated = _calibrated(cfg, layout, machine, measured)
    times = step_time.step(cfg, layout, found, machine, rows, slower)
    rate = cfg.train.global_batch / times.step
    evaluation = step_time.evaluation(cfg, layout, found, machine, rows, cfg.data.val_count or VAL_SAMPLES, slower)
    samples = _samples(cfg)
    every = schedule.steps_for(cfg.eval.every_samples, cfg.train.global_batch) * cfg.train.global_batch
    evaluations = samples and ceil(samples / every)
    train = samples and samples / rate + evaluations * evaluation
    checkpoint, sample = BYTES_PER_PARAMETER * layout.parameters, shards.layout(cfg.model).stride
    nodes, total = ceil(gpus / gpu.node), needed(moment, assumed)
    plan = Plan(
        config=cfg.name,
        gpu=name,
        gpus=gpus,
        rows=rows,
        shards=layout.shards,
        replicas=layout.replicas,
        moment=moment,
        total=total,
        card=gpu.memory_gb * GB,
        in_graph=moment.total - sum(moment.parts[part] for part in ("weights", "moments", "buffers")),
        largest_rows=largest_rows(cfg, layout, found, gpus, gpu, assumed, rows),
        times=times,
        samples_per_s=rate,
        mfu=flops.per_sample(cfg.model) * rate / gpus / (gpu.bf16_tflops * 1e12),
        evaluation=evaluation,
        evaluations=evaluations,
        samples=samples,
        train=train,
        cost=train and price * gpus * train / 3600,
        disk=sample * ((cfg.data.train_count or TRAIN_SAMPLES) + (cfg.data.val_count or VAL_SAMPLES)),
        read_per_node=sample * rate / nodes,
        checkpoint=checkpoint,
        checkpoint_copy=BYTES_PER_PARAMETER * sum(u.shard for u in layout.units) / (gpu.host_gb_s * GB),
        checkpoint_write=checkpoint / (nodes * assumed.storage_gb_s * GB),
        init=sum(u.shard for u in layout.units) / assumed.draws_per_s + cfg.train.synthetic_steps * times.step,
        calibrated=calibrated,
        warnings=[],
    )
    plan.warnings.extend(warnings(cfg, plan, gpu))
    return plan


def needed(moment: Moment, assumed: Assumed) -> float:
    """Bytes on a card, with what is assumed to lie between and beside the tensors."""
    return moment.total * (1 + assumed.margin) + assumed.outside_gb * GB


def largest_rows(
    cfg: Config, layout: Layout, found: dict[str, Footprint], gpus: int, gpu: Gpu, assumed: Assumed, rows: int
) -> int:
    """The largest micro-batch that fits a card, the global batch left aside; 0 if none does.

    Looked for as if memory grew in proportion to the samples, and then counted; it may be one too low.
    """

    def fits(candidate: int, exact: bool = False) -> bool:
        own = footprint.trace(cfg, gpu.arch, candidate) if exact else footprint.at(found, candidate / rows)
        moment = memory.fullest(memory.moments(cfg, layout, own, gpus, candidate))
        return needed(moment, assumed) <= gpu.memory_gb * GB

    step = 1
    if cfg.fp8.recipe != "off":  # see rules.validate_world
        tokens = math.gcd(cfg.model.text_tokens, cfg.model.image_tokens)
        step = 16 // math.gcd(tokens, 16)
    low, high = 0, LARGEST // step
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle * step) else (low, middle - 1)
    while low and not fits(low * step, exact=True):
        low -= max(1, low // 32)
    return max(0, low) * step


def _samples(cfg: Config) -> float | None:
    """What the reference needs to the target at this batch; None if that is not known."""
    if cfg.model != config.ModelConfig() or cfg.eval.target != TARGET:
        return None
    return convergence.samples_to_target(cfg.mllog.ruleset, cfg.train.global_batch)


def _calibrated(cfg: Config, layout: Layout, machine: Machine, measured: list[Calibration]) -> tuple[float, str]:
    """(measured compute over ours, where from); (1, "") without measurements. Raises: Refusal if none is alike."""
    if not measured:
        return 1.0, ""
    own = config.flat(cfg)
    keys = (*SAME, *(key for key in own if key.startswith("model.")))
    alike = [m for m in measured if all(json.loads(json.dumps(own[k])) == m.config.get(k) for k in keys)]
    if not alike:
        differ = [f"{k}={m.config.get(k)}" for m in measured for k in keys if own[k] != m.config.get(k)][:3]
        raise Refusal(
            f"no run in {measured[0].source} is like this config: it has {', '.join(differ)};"
            " measure it with python -m bench.whole --config CONFIG"
        )
    rows = config.micro_batch(cfg, machine.gpus)
    best = min(alike, key=lambda m: abs(math.log(m.micro_batch / rows)))
    found = footprint.trace(cfg, machine.gpu.arch, best.micro_batch)
    ours = sum(
        machine.seconds(work)
        for unit in layout.units
        for work in (found[unit.kind].forward_work, found[unit.kind].backward_work)
    )
    ratio = (best.forward_s + best.backward_s) / ours
    return ratio, f"{best.source}: {best.device}, micro-batch {best.micro_batch}, {ratio:.2f} times our compute"


def warnings(cfg: Config, plan: Plan, gpu: Gpu) -> list[str]:
    """What is worth a second look, one line each."""
    found = []
    if plan.total > plan.card:
        remedy = f"micro-batches of {plan.largest_rows} fit" if plan.largest_rows else "no micro-batch fits"
        found.append(f"memory: {plan.total / GB:.0f} GB do not fit {gpu.memory_gb:g} GB; {remedy}")
    if cfg.model == config.ModelConfig():
        found += convergence.unlike_reference(cfg)
    chunk = plan.gpus * cfg.eval.batch
    padding = -(cfg.data.val_count or VAL_SAMPLES) % chunk
    if padding:
        count = cfg.data.val_count or VAL_SAMPLES
        found.append(
            f"validation: {padding:,} of {count + padding:,} rows are padding, {padding / (count + padding):.0%} of its"
            " time; eval.batch decides"
        )
    if count_idle := _idle(cfg, plan.gpus):
        found.append(f"validation: {count_idle} of {plan.gpus} ranks get no sample; lower eval.batch")
    if plan.gpus % gpu.node and plan.gpus > gpu.node:
        found.append(f"{plan.gpus} GPUs are no whole nodes of {gpu.node}: shards then lie across nodes")
    if plan.init > INIT_BUDGET_S and cfg.mllog.submission_division == "closed":
        found.append(
            f"initialisation: {plan.init / 60:.0f} min without compilation, the closed division allows"
            f" {INIT_BUDGET_S // 60}"
        )
    if plan.times.exposed > 0.2 * plan.times.step:
        found.append(
            f"communication: {plan.times.exposed / plan.times.step:.0%} of the step waits for it; larger micro-batches,"
            " parallel.reduce_dtype=bf16 or reshard_after_forward=false would hide more"
        )
    return found


def _idle(cfg: Config, gpus: int) -> int:
    """Ranks for which validation holds nothing but padding."""
    return max(0, gpus - ceil((cfg.data.val_count or VAL_SAMPLES) / cfg.eval.batch))


def table(plan: Plan) -> str:
    """One screen of 80 columns."""
    times, total = plan.times, plan.moment.total

    def gb(size: float) -> str:
        return f"{size / GB:8.2f} GB"

    lines = [
        f"{plan.config} on {plan.gpus} x {plan.gpu}: micro-batch {plan.rows}, {plan.replicas} x {plan.shards} shards",
        f"memory of a rank, at its fullest moment: {plan.moment.name}",
    ]
    lines += [f"  {part:<20}{gb(size)}  {size / total:4.0%}" for part, size in plan.moment.parts.items()]
    lines += [
        f"  {'all tensors':<20}{gb(total)}        {plan.in_graph / GB:.1f} GB of it in the pool of graphs",
        f"  {'on the card':<20}{gb(plan.total)}  of {plan.card / GB:g} GB, with assumed margin and context",
        f"  largest micro-batch that fits: {plan.largest_rows}",
        f"step {times.step * 1e3:.0f} ms: {times.compute * 1e3:.0f} compute, {times.optimizer * 1e3:.1f} of it the"
        f" optimizer; {times.exposed * 1e3:.0f} waiting for links",
    ]
    names = (("all_gather", "gather weights"), ("reduce_scatter", "reduce gradients"), ("all_reduce", "sum replicas"))
    for name, words in names:
        if times.sent[name]:
            lines.append(f"  {words:<20}{gb(times.sent[name])}  sent per rank, {getattr(times, name) * 1e3:.0f} ms")
    hidden = times.communication - times.exposed
    if times.communication:
        lines.append(f"  {max(0.0, hidden) / times.communication:.0%} of communication hides behind compute")
    lines.append(
        f"{plan.samples_per_s:,.0f} samples/s, {plan.samples_per_s / plan.gpus:.1f} per GPU, MFU {plan.mfu:.0%} of"
        f" bf16; an evaluation {plan.evaluation:.1f} s"
    )
    if plan.train is None:
        lines.append("time to target: unknown; no reference convergence point is like this")
    else:
        cost = f", cost {plan.cost:,.0f}" if plan.cost else ""
        lines.append(f"to {TARGET}: {plan.samples / 1e6:.2f} M samples (reference), {plan.evaluations} evaluations")
        lines.append(f"  {plan.train / 60:.1f} min, {plan.gpus * plan.train / 3600:,.0f} GPU hours{cost}")
    lines += [
        f"data {plan.disk / 1e12:.2f} TB; read {plan.read_per_node / GB:.2f} GB/s per node",
        f"checkpoint {plan.checkpoint / GB:.0f} GB: {plan.checkpoint_copy:.1f} s stop, {plan.checkpoint_write:.0f} s"
        " behind the training",
        f"initialisation {plan.init:.0f} s and compilation, which is not counted",
        f"compute: {plan.calibrated or 'from shares of peak figures; --validate tells how far off'}",
    ]
    lines += [f"WARNING {text}" for text in plan.warnings]
    return "\n".join(part for text in lines for part in wrap(text))


def wrap(text: str) -> list[str]:
    """A line in pieces of 80 columns."""
    return textwrap.wrap(text, 80, subsequent_indent="    ", replace_whitespace=False, drop_whitespace=True) or [""]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the overrides of the config. Raises: Refusal."""
    parser = argparse.ArgumentParser(
        "plan", usage="see --help", add_help=False, allow_abbrev=False, exit_on_error=False
    )
    parser.add_argument("config", nargs="?", default="")
    parser.add_argument("--gpus", type=int, default=0)
    parser.add_argument("--gpu", default="")
    parser.add_argument("--price-per-gpu-hour", type=float, default=0.0)
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--calibrate", type=Path)
    json_option.json_option(parser)
    try:
        args, overrides = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise Refusal(f"{error}; see --help") from None
    if not args.config or not 1 <= args.gpus <= MOST_GPUS or not args.gpu:
        raise Refusal(f"a plan needs CONFIG, --gpus N from 1 to {MOST_GPUS} and --gpu NAME; see --help")
    if not 0 <= args.price_per_gpu_hour < math.inf:
        raise Refusal(f"--price-per-gpu-hour={args.price_per_gpu_hour} must be a number that is not negative")
    return args, overrides


def main(argv: list[str]) -> int:
    args, overrides = parse(argv)
    cfg = config_file.load(args.config, overrides)
    gpu, assumed = hardware.load(args.gpu, args.hardware)
    measured = hardware.calibration(args.calibrate) if args.calibrate else []
    plan = make(cfg, args.gpu, args.gpus, gpu, assumed, measured, args.price_per_gpu_hour)
    json_option.show(table(plan), asdict(plan) | {"assumed": asdict(assumed), "overrides": overrides}, args.json)
    return 0
