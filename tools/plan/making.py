"""How a plan is made: the net is traced, its memory and its steps are counted."""

from functools import cache
from math import ceil, gcd
from types import SimpleNamespace

from flux_ref import config, config_file, schedule
from flux_ref.benchmark import closed
from flux_ref.benchmark.facts import TARGET, TRAIN_SAMPLES, VAL_SAMPLES
from flux_ref.config import Config
from flux_ref.formats import shards
from flux_ref.optim import bytes_per_parameter
from flux_ref.precision import policy
from flux_ref.precision.layers import MULTIPLE
from tools.plan import footprint, memory, step_time
from tools.plan.memory import Instant
from tools.plan.reference_samples import samples_to_target
from tools.plan.step_time import Machine
from tools.shared import flops
from tools.shared.communication import Layout
from tools.shared.hardware import Assumed, Gpu

GB = 1e9
LARGEST = 4096  # micro-batch that is tried


def make(cfg: Config, name: str, gpus: int, gpu: Gpu, assumed: Assumed, price: float = 0.0) -> SimpleNamespace:
    """Everything that is printed, by name: sizes in bytes, times in seconds.

    Raises: Refusal if the config does not fit the number of GPUs.
    """
    config_file.validate_world(cfg, gpus)
    rows = config.micro_batch(cfg, gpus)
    machine = Machine(gpu, assumed, gpus)
    layout = footprint.layout(cfg, gpus, gpu.node)
    footprints = footprint.trace(cfg, gpu.arch, rows)
    instant = memory.fullest(memory.instants(cfg, layout, footprints, gpus, rows, captures(cfg, gpu)))
    times = step_time.step(cfg, layout, footprints, machine, rows)
    batch = cfg.train.global_batch
    rate = batch / times.step
    count = val_count(cfg)
    evaluation = step_time.evaluation(cfg, layout, footprints, machine, rows, count) if count else 0.0
    reference = samples_to_target(cfg) if count else None
    samples = reference or cfg.train.max_samples
    every = schedule.steps_for(cfg.eval.every_samples, batch) * batch
    evaluations = ceil(samples / every) if count and every else 0
    train = samples / rate + evaluations * evaluation
    largest, dividing = largest_rows(cfg, layout, machine)
    sample = shards.layout(cfg.model).stride
    plan = SimpleNamespace(
        config=cfg.name,
        gpu=name,
        gpus=gpus,
        precision=cfg.precision.preset if policy.narrowest(cfg) else cfg.parallel.dtype,
        rows=rows,  # micro-batch
        rank_rows=batch // gpus,
        shards=layout.shards,
        replicas=layout.replicas,
        instant=instant,
        total=needed(instant, assumed),
        card=gpu.memory_gb * GB,
        fits=needed(instant, assumed) <= gpu.memory_gb * GB,
        pinned=memory.pinned(cfg, layout, gpus, rows) if captures(cfg, gpu) else 0,
        largest_rows=largest,
        dividing_rows=dividing,
        assumed=assumed,
        times=times,
        samples_per_s=rate,
        mfu=flops.per_sample(cfg.model) * rate / gpus / (gpu.bf16_tflops * 1e12),
        evaluation=evaluation,
        evaluations=evaluations,
        samples=samples,
        goal=f"to {TARGET} like the reference" if reference else "to train.max_samples, as no reference point fits",
        train=train,
        cost=price * gpus * train / 3600,
        counted="" if cfg.data.train_count else " of the benchmark's samples, as data.train_count and val_count are 0",
        disk=sample * ((cfg.data.train_count or TRAIN_SAMPLES) + count),
        read_per_node=sample * rate / ceil(gpus / gpu.node),  # bytes per second
        checkpoint=bytes_per_parameter(cfg.optim) * layout.parameters,
    )
    plan.warnings = warnings(cfg, plan)
    return plan


def captures(cfg: Config, gpu: Gpu) -> bool:
    """Whether steps are captured as graphs. AMD's cards do so only when asked to."""
    return cfg.graph.enabled == "on" or (cfg.graph.enabled == "auto" and gpu.arch.startswith("sm"))


def val_count(cfg: Config) -> int:
    """Samples of an evaluation; 0 without a validation set."""
    return (cfg.data.val_count or VAL_SAMPLES) if cfg.data.val else 0


def needed(instant: Instant, assumed: Assumed) -> float:
    """Bytes on a card: tensors, the assumed margin between them, and what is assumed to lie outside of tensors."""
    return instant.total * (1 + assumed.margin) + assumed.outside_gb * GB


def largest_rows(cfg: Config, layout: Layout, machine: Machine) -> tuple[int, int]:
    """The largest micro-batch that training takes and a card holds, and the largest that divides a rank's batch.

    The line between two sizes meets the card's memory near the answer, so few sizes are traced.
    """
    tokens = (cfg.model.text_tokens, cfg.model.image_tokens)
    step = MULTIPLE // gcd(*tokens, MULTIPLE) if policy.narrowest(cfg) else 1  # see policy.require_rows

    @cache
    def spare(count: int) -> float:
        """Bytes of the card that micro-batches of so many steps of rows leave."""
        found = footprint.trace(cfg, machine.gpu.arch, count * step)
        captured = captures(cfg, machine.gpu)
        instant = memory.fullest(memory.instants(cfg, layout, found, machine.gpus, count * step, captured))
        return machine.gpu.memory_gb * GB - needed(instant, machine.assumed)

    low, high = 1, LARGEST // step
    if spare(low) < 0:
        return 0, 0
    if spare(high) >= 0:
        low = high
    while high - low > 1:  # low fits, high does not
        guess = low + int((high - low) * spare(low) / (spare(low) - spare(high)))
        guess = min(max(guess, low + 1), high - 1)
        if spare(guess) < 0:
            high = guess
        else:
            low = guess
    batch = cfg.train.global_batch // machine.gpus
    return low * step, max((size for size in range(step, low * step + 1, step) if batch % size == 0), default=0)


def warnings(cfg: Config, plan: SimpleNamespace) -> list[str]:
    """What is worth a second look, one line each."""
    lines = []
    if not plan.fits:
        remedy = f"train.micro_batch={plan.dividing_rows} fits" if plan.dividing_rows else "no micro-batch fits"
        drawing = plan.instant.parts.get("drawing", 0.0)
        if drawing > GB:
            remedy += f"; sample.every_samples=0 frees {drawing / GB:.0f} GB"
        if cfg.parallel.kept_regions:
            remedy += "; parallel.kept_regions=0 keeps no more than two regions gathered"
        lines.append(f"memory: {plan.total / GB:.0f} GB do not fit {plan.card / GB:g} GB; {remedy}")
    count = val_count(cfg)
    departures = closed.departures(cfg, cfg.data.train_count or TRAIN_SAMPLES, count)
    if len(departures) <= closed.FEW:  # else it is no benchmark run, and nobody takes it for one
        lines += [f"no benchmark result: {text}" for text in departures]
    if cfg.parallel.dtype == "fp32":
        lines.append("parallel.dtype=fp32: times are those of bf16; fp32 takes longer")
    padding = -count % (plan.gpus * cfg.eval.batch)
    if padding:
        lines.append(f"validation: {padding:,} of {count + padding:,} rows are padding; eval.batch decides")
    return lines
