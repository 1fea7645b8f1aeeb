"""How a plan is made: the net is traced, its memory and its steps are counted."""

from bisect import bisect
from dataclasses import dataclass
from math import ceil, gcd

from flux_ref import config, config_file, schedule
from flux_ref.benchmark import closed
from flux_ref.benchmark.closed import TRAIN_SAMPLES, VAL_SAMPLES
from flux_ref.config import Config
from flux_ref.precision import policy
from flux_ref.precision.policy import MULTIPLE
from tools.plan import footprint, memory, step_time
from tools.plan.memory import Instant
from tools.plan.reference_samples import samples_to_target
from tools.plan.step_time import Machine, Times
from tools.shared.communication import Layout

GB = 1e9


@dataclass(frozen=True)
class Plan:
    """What a run takes: sizes in bytes, times in seconds. Times may be 1 + assumed.range times as long."""

    cfg: Config
    machine: Machine
    layout: Layout
    rows: int  # of a micro-batch
    instant: Instant
    total: float  # on a card
    largest_rows: int
    times: Times
    reaches_target: bool  # samples are what the reference needs, else train.max_samples
    samples: float
    val_count: int
    evaluation: float
    evaluations: int

    @property
    def card(self) -> float:
        return self.machine.gpu.memory_gb * GB

    @property
    def train(self) -> float:
        """Seconds of the whole run."""
        return self.samples / self.cfg.train.global_batch * self.times.step + self.evaluations * self.evaluation


def make(cfg: Config, machine: Machine) -> Plan:
    """Raises: Refusal if the config does not fit the number of GPUs."""
    config_file.validate_world(cfg, machine.gpus)
    gpus = machine.gpus
    rows = config.micro_batch(cfg, gpus)
    layout = footprint.layout(cfg, gpus, machine.gpu.node)
    footprints = footprint.trace(cfg, machine.gpu.arch, rows)
    instant = memory.fullest(cfg, layout, footprints, gpus, rows)
    times = step_time.times(cfg, layout, footprints, machine, rows)

    val_count = (cfg.data.val_count or VAL_SAMPLES) if cfg.data.val else 0
    reference = samples_to_target(cfg) if val_count else None
    samples = reference or cfg.train.max_samples
    every = schedule.steps_for(cfg.eval.every_samples, cfg.train.global_batch) * cfg.train.global_batch
    return Plan(
        cfg=cfg,
        machine=machine,
        layout=layout,
        rows=rows,
        instant=instant,
        total=needed(instant, machine),
        largest_rows=largest_rows(cfg, layout, machine),
        times=times,
        reaches_target=bool(reference),
        samples=samples,
        val_count=val_count,
        evaluation=ceil(val_count / (gpus * cfg.eval.batch)) * times.validation,
        evaluations=ceil(samples / every) if val_count and every else 0,
    )


def needed(instant: Instant, machine: Machine) -> float:
    """Bytes on a card: tensors, the assumed margin between them, and what is assumed to lie outside of tensors."""
    return instant.total * (1 + machine.assumed.margin) + machine.assumed.outside_gb * GB


def largest_rows(cfg: Config, layout: Layout, machine: Machine) -> int:
    """The largest micro-batch that divides a rank's samples and that a card holds; 0 if there is none."""
    tokens = (cfg.model.text_tokens, cfg.model.image_tokens)
    step = MULTIPLE // gcd(*tokens, MULTIPLE) if policy.narrowest(cfg) else 1  # see policy.require_rows
    batch = cfg.train.global_batch // machine.gpus

    def total(rows: int) -> float:
        found = footprint.trace(cfg, machine.gpu.arch, rows)
        return needed(memory.fullest(cfg, layout, found, machine.gpus, rows), machine)

    sizes = [0, *(rows for rows in range(step, batch + 1, step) if batch % rows == 0)]
    return sizes[bisect(sizes, machine.gpu.memory_gb * GB, lo=1, key=total) - 1]


def warnings(one: Plan) -> list[str]:
    """What is worth a second look, one line each."""
    cfg = one.cfg
    lines = []
    if one.total > one.card:
        remedy = f"train.micro_batch={one.largest_rows} fits" if one.largest_rows else "no micro-batch fits"
        if cfg.parallel.kept_regions < 0:
            remedy += "; parallel.kept_regions=0 gathers two regions in place of all"
        lines.append(f"memory: {one.total / GB:.0f} GB do not fit {one.card / GB:g} GB; {remedy}")

    departures = closed.departures(cfg, cfg.data.train_count or TRAIN_SAMPLES, one.val_count)
    if len(departures) < 5:  # else it is no benchmark run, and nobody takes it for one
        lines += [f"no benchmark result: {text}" for text in departures]
    if cfg.parallel.dtype == "fp32":
        lines.append("parallel.dtype=fp32: times are those of bf16; fp32 takes longer")
    padding = -one.val_count % (one.machine.gpus * cfg.eval.batch)
    if padding:
        lines.append(f"validation: {padding:,} of {one.val_count + padding:,} rows are padding; eval.batch decides")
    return lines
