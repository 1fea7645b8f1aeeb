"""How a plan is made: the net is traced, its memory and its steps are counted."""

from bisect import bisect
from dataclasses import dataclass, replace
from math import ceil, gcd

import numpy as np
from mlperf_logging.rcp_checker.rcp_checker import RCP_Checker

from flux_ref import config, config_file, mlperf_closed, schedule
from flux_ref.cli import progress
from flux_ref.config import Config
from flux_ref.mlperf_closed import TRAIN_SAMPLES, VAL_SAMPLES, is_benchmark
from flux_ref.precision.policy import MULTIPLE
from flux_ref.precision.recipe import PrecisionRecipe
from tools.flops_and_bytes import FsdpLayout
from tools.plan import memory, region_costs, step_time
from tools.plan.memory import Instant
from tools.plan.region_costs import Footprints
from tools.plan.step_time import Machine, Times


def samples_to_target(cfg: Config) -> float:
    """Mean samples at the config's batch; 0 for a batch above all points, and for another model or target.

    Points that converge more slowly than their neighbours do not count, and a batch below all points gets the value of
    the smallest, as in the official checker.
    """
    if not is_benchmark(cfg):
        return 0.0
    points = RCP_Checker("training", cfg.mllog.ruleset, "flux1", verbose=False).pruned_rcp_data.values()
    batches, means = zip(*sorted((point["BS"], point["RCP Mean"]) for point in points))
    return float(np.interp(cfg.train.global_batch, batches, means, right=0))


GB = 1e9
SPARE = 4 * GB  # of a card, beside what a plan assumes to lie outside of tensors
BUDGETS = (1.0, 0.9, 0.5)  # compute.activation_memory_budget; others give nearly the plans of these


@dataclass(frozen=True)
class Plan:
    """What a run takes: sizes in bytes, times in seconds. Times may be 1 + assumed.range times as long."""

    cfg: Config
    machine: Machine
    layout: FsdpLayout
    instant: Instant
    graphs: float  # of captured steps, outside of tensors
    total: float  # on a card
    times: Times
    footprints: Footprints
    host: float  # seconds in which a rank's Python starts a step's kernels, 0 with graphs
    reaches_target: bool  # samples are what the reference needs, else train.max_samples
    samples: float
    val_samples: int
    evaluation: float
    evaluations: int

    @property
    def card(self) -> float:
        return self.machine.gpu.memory_gb * GB

    @property
    def train(self) -> float:
        """Seconds of the whole run."""
        return self.samples / self.cfg.train.global_batch * self.times.step + self.evaluations * self.evaluation


def make(cfg: Config, machine: Machine, footprints: Footprints | None = None) -> Plan:
    """footprints: of the config's net, if they are known. Raises: Refusal if the config does not fit the GPUs."""
    config_file.validate_world(cfg, machine.gpus)
    footprints = footprints or region_costs.trace(cfg, machine.gpu.arch, config.micro_batch(cfg, machine.gpus))
    layout = region_costs.node_layout(cfg, machine.gpus, machine.gpu.node)
    instant = memory.fullest(cfg, layout, footprints)
    times = step_time.times(cfg, layout, footprints, machine)
    assumed = machine.assumed
    enabled = cfg.compute.cuda_graphs
    nodes = memory.graph_nodes(cfg, layout, footprints)
    graphs = host = 0.0
    if enabled == "on" or (enabled == "auto" and machine.gpu.arch.startswith("sm")):  # as graphs.obstacle
        nodes += sum(footprints[unit.kind].forward.kernels for unit in layout.units)  # of a validation batch
        graphs = len(PrecisionRecipe(cfg).phases) * nodes * assumed.graph_node_kb * 1e3
    else:
        host = (
            layout.micros * len(layout.units) * assumed.host_ms_per_region / 1e3
            + nodes * assumed.host_us_per_kernel / 1e6
        )
        times = replace(times, step=max(times.step, host))

    val_samples = (cfg.data.expected_val_samples or VAL_SAMPLES) if cfg.data.val else 0
    reference = samples_to_target(cfg) if val_samples else 0.0
    samples = reference or cfg.train.max_samples
    every = schedule.steps_for(cfg.eval.every_samples, cfg.train.global_batch) * cfg.train.global_batch
    return Plan(
        cfg=cfg,
        machine=machine,
        layout=layout,
        instant=instant,
        graphs=graphs,
        total=instant.total * (1 + assumed.margin) + graphs + assumed.outside_gb * GB,
        times=times,
        footprints=footprints,
        host=host,
        reaches_target=bool(reference),
        samples=samples,
        val_samples=val_samples,
        evaluation=ceil(val_samples / (machine.gpus * cfg.eval.batch)) * times.validation,
        evaluations=ceil(samples / every) if val_samples and every else 0,
    )


def fastest(cfg: Config, machine: Machine) -> list[Plan]:
    """The plans that leave SPARE bytes of the card, the fastest first.

    One for each micro-batch that divides a rank's samples and each activation budget: it keeps the most regions.
    """
    tokens = (cfg.model.text_tokens, cfg.model.image_tokens)
    step = MULTIPLE // gcd(*tokens, MULTIPLE) if not cfg.precision.is_plain else 1  # see policy.require_rows
    batch = config.rank_batch(cfg, machine.gpus)
    found: list[Plan] = []
    sizes = [rows for rows in range(step, batch + 1, step) if batch % rows == 0]
    for rows in progress(sizes, desc="micro-batches", leave=False):
        fitting: list[Plan] = []
        for budget in BUDGETS if cfg.compute.compile else BUDGETS[:1]:
            own = config_file.replace(cfg, train__micro_batch=rows, compute__activation_memory_budget=budget)
            fitting += _keeping_most(own, machine)
        if found and not fitting:
            break  # nor does a larger micro-batch fit; a smaller one may have too large graphs
        found += fitting
    return sorted(found, key=lambda one: one.times.step)


def _keeping_most(cfg: Config, machine: Machine) -> list[Plan]:
    """The plan that keeps the most regions and leaves SPARE bytes; none if even without kept regions it does not."""
    footprints = region_costs.trace(cfg, machine.gpu.arch, cfg.train.micro_batch)

    def keeping(kept: int) -> Plan:
        return make(config_file.replace(cfg, parallel__kept_regions=kept), machine, footprints)

    kept = [*range(len(keeping(0).layout.units) - 1), -1]
    count = bisect(kept, keeping(0).card - SPARE, key=lambda one: keeping(one).total)
    return [keeping(kept[count - 1])] if count else []


def warnings(one: Plan) -> list[str]:
    """What is worth a second look, one line each."""
    cfg = one.cfg
    train_samples = cfg.data.expected_train_samples or TRAIN_SAMPLES
    departures = mlperf_closed.departures(cfg, {"train_samples": train_samples, "val_samples": one.val_samples})
    # Who departs more often does not take a run for a benchmark result.
    lines = [f"no benchmark result: {text}" for text in departures] if len(departures) < 5 else []
    if one.host >= one.times.step:
        lines.append("the host is slower than the card: set parallel.region_blocks=2 or 4, or compute.cuda_graphs=on")
    if cfg.compute.dtype == "fp32":
        lines.append("compute.dtype=fp32: times are those of bf16; fp32 takes longer")
    padding = -one.val_samples % (one.machine.gpus * cfg.eval.batch)
    if padding:
        lines.append(f"validation: {padding:,} of {one.val_samples + padding:,} rows are padding; eval.batch decides")
    return lines
