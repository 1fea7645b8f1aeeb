"""How a plan is made: the net is traced, its memory and its steps are counted."""

from dataclasses import dataclass, field
from functools import cache
from math import ceil, gcd

from flux_ref import config, config_file, schedule, shards
from flux_ref.benchmark import closed
from flux_ref.benchmark.closed import TRAIN_SAMPLES, VAL_SAMPLES
from flux_ref.config import Config
from flux_ref.optim import bytes_per_parameter
from flux_ref.precision import policy
from flux_ref.precision.policy import MULTIPLE
from tools.plan import footprint, memory, step_time
from tools.plan.hardware import Assumed
from tools.plan.memory import Instant
from tools.plan.reference_samples import samples_to_target
from tools.plan.step_time import Machine, Times
from tools.shared import flops
from tools.shared.communication import Layout

GB = 1e9
LARGEST = 4096  # micro-batch that is tried


@dataclass
class Plan:
    """What a run takes: sizes in bytes, times in seconds. Times may be 1 + assumed.range times as long."""

    machine: Machine
    layout: Layout
    precision: str
    rows: int  # of a micro-batch
    instant: Instant
    total: float  # on a card
    largest_rows: int
    dividing_rows: int
    times: Times
    samples_per_s: float
    mfu: float
    reaches_target: bool  # samples are what the reference needs, else train.max_samples
    samples: float
    evaluation: float
    evaluations: int
    disk: float
    checkpoint: float
    train: float
    warnings: list[str] = field(default_factory=list)

    @property
    def card(self) -> float:
        return self.machine.gpu.memory_gb * GB

    @property
    def fits(self) -> bool:
        return self.total <= self.card


def make(cfg: Config, machine: Machine) -> Plan:
    """Raises: Refusal if the config does not fit the number of GPUs."""
    config_file.validate_world(cfg, machine.gpus)
    gpu, gpus = machine.gpu, machine.gpus
    batch = cfg.train.global_batch
    rows = config.micro_batch(cfg, gpus)
    layout = footprint.layout(cfg, gpus, gpu.node)
    footprints = footprint.trace(cfg, gpu.arch, rows)
    instant = memory.fullest(cfg, layout, footprints, gpus, rows)
    times = step_time.times(cfg, layout, footprints, machine, rows)
    count = (cfg.data.val_count or VAL_SAMPLES) if cfg.data.val else 0
    evaluation = ceil(count / (gpus * cfg.eval.batch)) * times.validation
    reference = samples_to_target(cfg) if count else None
    samples = reference or cfg.train.max_samples
    every = schedule.steps_for(cfg.eval.every_samples, batch) * batch
    evaluations = ceil(samples / every) if count and every else 0
    largest, dividing = largest_rows(cfg, layout, machine)
    plan = Plan(
        machine=machine,
        layout=layout,
        precision=cfg.precision.preset if policy.narrowest(cfg) else cfg.parallel.dtype,
        rows=rows,
        instant=instant,
        total=needed(instant, machine.assumed),
        largest_rows=largest,
        dividing_rows=dividing,
        times=times,
        samples_per_s=batch / times.step,
        mfu=flops.per_sample(cfg.model) * batch / times.step / gpus / (gpu.bf16_tflops * 1e12),
        reaches_target=bool(reference),
        samples=samples,
        evaluation=evaluation,
        evaluations=evaluations,
        disk=shards.layout(cfg.model).stride * ((cfg.data.train_count or TRAIN_SAMPLES) + count),
        checkpoint=bytes_per_parameter(cfg.optim) * layout.parameters,
        train=samples / batch * times.step + evaluations * evaluation,
    )
    plan.warnings = warnings(cfg, plan, count)
    return plan


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
        instant = memory.fullest(cfg, layout, found, machine.gpus, count * step)
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


def warnings(cfg: Config, plan: Plan, count: int) -> list[str]:
    """What is worth a second look, one line each. count: validation samples."""
    lines = []
    if not plan.fits:
        remedy = f"train.micro_batch={plan.dividing_rows} fits" if plan.dividing_rows else "no micro-batch fits"
        if cfg.parallel.kept_regions < 0:
            remedy += "; parallel.kept_regions=0 gathers two regions in place of all"
        lines.append(f"memory: {plan.total / GB:.0f} GB do not fit {plan.card / GB:g} GB; {remedy}")
    departures = closed.departures(cfg, cfg.data.train_count or TRAIN_SAMPLES, count)
    if len(departures) <= closed.FEW:  # else it is no benchmark run, and nobody takes it for one
        lines += [f"no benchmark result: {text}" for text in departures]
    if cfg.parallel.dtype == "fp32":
        lines.append("parallel.dtype=fp32: times are those of bf16; fp32 takes longer")
    padding = -count % (plan.machine.gpus * cfg.eval.batch)
    if padding:
        lines.append(f"validation: {padding:,} of {count + padding:,} rows are padding; eval.batch decides")
    return lines
