"""Public rates of FLUX.1 training (public_systems.csv), and the step that tools.plan gives for each system.

A system is planned as flux_ref would run on its cards at its batch: FSDP2 over a node, replicas across nodes, compiled,
gathered weights kept, gradients reduced in bf16. The systems themselves ran other software. Where a system is
tensor-parallel or recomputes blocks, the time for these is added.
"""

import csv
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path

from flux_ref import config_file
from flux_ref.config import Config
from tools.plan import footprint, hardware, step_time
from tools.plan.footprint import Footprint
from tools.plan.hardware import Assumed, Gpu
from tools.plan.step_time import Machine
from tools.shared.communication import Layout

TABLE = Path(__file__).with_name("public_systems.csv")
# Presets, as hardware.toml knows them; fp32 is planned as bf16.
PLANNED = {"bf16": "bf16", "fp8": "fp8", "fp8_delayed": "fp8"}


@dataclass(frozen=True)
class System:
    """A row of the table, whose head explains the figures."""

    source: str
    system: str
    gpu: str
    gpus: int
    tensor_parallel: int
    precision: str
    global_batch: int
    micro_batch: int
    recomputed: float
    fitted: int
    runs: int
    step_s: float
    evaluation_s: float
    samples: int
    minutes: float
    init_s: float
    outlier: str


def systems() -> list[System]:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    kinds = {field.name: field.type for field in fields(System)}
    return [System(**{name: kinds[name](text) for name, text in row.items()}) for row in csv.DictReader(lines)]


def known() -> list[System]:
    """The systems in a precision for which hardware.toml has rates."""
    return [system for system in systems() if system.precision in PLANNED.values()]


@dataclass(frozen=True)
class Case:
    """What the planned step of a system depends on."""

    cfg: Config
    layout: Layout
    footprints: dict[str, Footprint]
    gpu: Gpu
    assumed: Assumed


@cache
def case(system: System) -> Case:
    gpu, assumed = hardware.load(system.gpu, system.precision)
    cfg = config_file.replace(
        Config(name="public"),
        train__global_batch=system.global_batch,
        train__micro_batch=system.micro_batch,
        parallel__compile=True,
        parallel__kept_regions=-1,
        parallel__reduce_dtype="bf16",
        precision__preset=system.precision,
        eval__batch=1,
    )
    layout = footprint.layout(cfg, system.gpus, gpu.node)
    return Case(cfg, layout, _traced(system.precision, gpu.arch, system.micro_batch), gpu, assumed)


@cache
def _traced(precision: str, arch: str, rows: int) -> dict[str, Footprint]:
    values = {"parallel__compile": True, "precision__preset": precision}
    return footprint.trace(config_file.replace(Config(name="public"), **values), arch, rows)


def planned_s(system: System, gemm_share: float | None = None) -> float:
    """The step of a system by the method of tools.plan. gemm_share: in place of hardware.toml's."""
    known = case(system)
    assumed = replace(known.assumed, gemm_share=gemm_share or known.assumed.gemm_share)
    machine = Machine(known.gpu, assumed, system.gpus)
    model = known.cfg.model
    computing = {kind: machine.seconds(one.forward) for kind, one in known.footprints.items()}
    forward = sum(computing[unit.kind] for unit in known.layout.units)
    # Attention and the MLP of a double block and a single block's end, in forward and again in backward.
    sums = 2 * (2 * model.double_blocks + model.single_blocks)
    tokens = model.text_tokens + model.image_tokens
    stream = 2 * system.micro_batch * system.tensor_parallel * tokens * model.hidden
    step = step_time.times(known.cfg, known.layout, known.footprints, machine, system.micro_batch).step
    return step + system.recomputed * forward + 2 * sums * machine.ring(stream, system.tensor_parallel)
