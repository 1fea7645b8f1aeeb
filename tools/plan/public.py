"""Public rates of FLUX.1 training (public_systems.csv), and the step that tools.plan gives for each system.

A system is planned as flux_ref would run on its cards at its batch: FSDP2 over a node, replicas across nodes, compiled,
gathered weights kept, gradients reduced in bf16. The systems themselves ran other software. Where a system is
tensor-parallel or recomputes blocks, the time for these is added.
"""

import csv
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_type_hints

from flux_ref import config_file
from flux_ref.config import Config
from tools.plan import region_costs, step_time
from tools.plan.step_time import Assumed, Gpu, Machine

TABLE = Path(__file__).with_name("public_systems.csv")
# Presets, as hardware.toml knows them; fp32 is planned as bf16.
PLANNED = {"bf16": "bf16", "fp8": "fp8", "fp8_delayed": "fp8"}


@dataclass(frozen=True)
class System:
    """Of a row of the table, whose head explains the figures."""

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
    step_s: float
    outlier: str

    @property
    def rates(self) -> tuple[Gpu, Assumed]:
        return step_time.load(self.gpu, self.precision)


def systems() -> list[System]:
    lines = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [
        System(**{name: kind(row[name]) for name, kind in get_type_hints(System).items()})
        for row in csv.DictReader(lines)
    ]


def known() -> list[System]:
    """The systems in a precision for which hardware.toml has rates."""
    return [system for system in systems() if system.precision in PLANNED.values()]


def planned_s(system: System, gemm_share: float | None = None) -> float:
    """The step of a system by the method of tools.plan. gemm_share: in place of hardware.toml's."""
    gpu, assumed = system.rates
    machine = Machine(gpu, replace(assumed, gemm_share=gemm_share or assumed.gemm_share), system.gpus)
    rows = system.micro_batch
    traced = config_file.replace(
        Config(name="public"),
        compute__compile=True,
        parallel__kept_regions=-1,
        parallel__reduce_dtype="bf16",
        precision__preset=system.precision,
    )
    footprints = region_costs.trace(traced, gpu.arch, rows)  # the same for several systems
    cfg = config_file.replace(traced, train__global_batch=system.global_batch, train__micro_batch=rows, eval__batch=1)
    layout = region_costs.node_layout(cfg, system.gpus, gpu.node)
    forward = sum(machine.seconds(footprints[unit.kind].forward) for unit in layout.units)

    # Attention and the MLP of a double block and a single block's end, in forward and again in backward.
    model = cfg.model
    sums = 2 * (2 * model.double_blocks + model.single_blocks)
    stream = 2 * rows * system.tensor_parallel * (model.text_tokens + model.image_tokens) * model.hidden
    step = step_time.times(cfg, layout, footprints, machine).step
    return step + system.recomputed * forward + 2 * sums * machine.ring(stream, system.tensor_parallel)
