"""How far a plan is from what public systems did: MLPerf Training v5.1 and v6.0, public_systems.csv.

Each system is planned as flux_ref would run on its cards at its batch: FSDP2 over a node, replicas across nodes,
compiled, gathered weights kept, gradients reduced in bf16, FP8. Their own software is other: Megatron's distributed
optimizer, MXFP8 and captured graphs on NVIDIA's cards, and tensor parallelism where `tensor_parallel` is above 1, whose
communication is not modelled at all. Two parameters are fitted, for all cards together: assumed.gemm_share and
assumed.memory_share in hardware.toml.
"""

import csv
import math
from dataclasses import dataclass, replace
from pathlib import Path

from flux_ref import config, footprint, hardware, memory, precision, step_time
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.footprint import Footprint
from flux_ref.hardware import Assumed, Gpu
from flux_ref.memory import Layout
from flux_ref.step_time import Machine

PUBLIC = Path(__file__).with_name("public_systems.csv")
VALIDATION = 29_696
TUNED = ("gemm_share", "memory_share")


@dataclass(frozen=True)
class System:
    """One public result."""

    round: str
    system: str
    gpu: str
    gpus: int
    tensor_parallel: int
    global_batch: int
    runs: int
    step_s: float
    evaluation_s: float
    samples: int
    minutes: float
    init_s: int

    @property
    def is_fitted(self) -> bool:
        """Whether it is alike enough to learn from."""
        return self.tensor_parallel == 1

    @property
    def rows(self) -> int:
        return self.global_batch // self.gpus


@dataclass(frozen=True)
class Case:
    """A system with all that its time depends on but the shares."""

    system: System
    cfg: Config
    layout: Layout
    footprints: dict[str, Footprint]
    gpu: Gpu

    def step_s(self, assumed: Assumed) -> float:
        machine = Machine(self.gpu, assumed, self.system.gpus)
        return step_time.step(self.cfg, self.layout, self.footprints, machine, self.system.rows).step

    def evaluation_s(self, assumed: Assumed) -> float:
        machine = Machine(self.gpu, assumed, self.system.gpus)
        rows = self.system.rows
        return step_time.evaluation(self.cfg, self.layout, self.footprints, machine, rows, VALIDATION)


def systems() -> list[System]:
    lines = (line for line in PUBLIC.read_text(encoding="utf-8").splitlines() if not line.startswith("#"))
    types = System.__annotations__
    return [System(**{key: types[key](value) for key, value in row.items()}) for row in csv.DictReader(lines)]


def cases() -> list[Case]:
    """All systems, traced; takes half a minute."""
    traced: dict[tuple, dict[str, Footprint]] = {}
    layouts: dict[tuple, Layout] = {}
    found = []
    for system in systems():
        gpu, _ = hardware.load(system.gpu)
        cfg = _config(system.global_batch, system.gpus)
        key = (system.rows, precision.arithmetic(gpu.arch).row_times_column)  # formats have equal sizes
        if key not in traced:
            traced[key] = footprint.trace(cfg, gpu.arch, system.rows)
        if (system.gpus, gpu.node) not in layouts:
            layouts[system.gpus, gpu.node] = memory.layout(cfg, system.gpus, gpu.node)
        found.append(Case(system, cfg, layouts[system.gpus, gpu.node], traced[key], gpu))
    return found


def _config(global_batch: int, gpus: int) -> Config:
    return config.replace(
        config.Config(name="public"),
        train__global_batch=global_batch,
        parallel__compile=True,
        parallel__reshard_after_forward=False,
        parallel__reduce_dtype="bf16",
        fp8__recipe="dynamic",
        eval__batch=min(32, math.ceil(VALIDATION / gpus)),
    )


def fit(found: list[Case], assumed: Assumed) -> Assumed:
    """The shares with the least mean |log(ours / public)| of the steps of fitted systems, every kind of card alike.

    Not squares: one system that spends its time otherwise would move all others.
    """
    kinds: dict[str, list[Case]] = {}
    for case in found:
        if case.system.is_fitted:
            kinds.setdefault(case.system.gpu, []).append(case)

    def loss(shares: tuple[float, ...]) -> float:
        own = replace(assumed, **dict(zip(TUNED, shares)))
        return sum(
            sum(abs(math.log(case.step_s(own) / case.system.step_s)) for case in cases) / len(cases)
            for cases in kinds.values()
        )

    best, width = (0.5, 0.5), 0.16
    least = loss(best)
    while width > 0.004:
        around = [(best[0] + a * width, best[1] + b * width) for a in (-1, 0, 1) for b in (-1, 0, 1) if a or b]
        tried = {shares: loss(shares) for shares in around if all(0.01 < share <= 1 for share in shares)}
        nearest = min(tried, key=tried.get)
        if tried[nearest] < least:
            best, least = nearest, tried[nearest]
        else:
            width /= 2
    return replace(assumed, **{name: round(share, 2) for name, share in zip(TUNED, best)})


def report(argv: list[str]) -> str:
    """The table of errors. Raises: Refusal."""
    if argv:
        raise Refusal(f"--validate takes no further argument, not {argv[0]!r}")
    found = cases()
    _, assumed = hardware.load("h200")
    without = {kind: fit([c for c in found if c.system.gpu != kind], assumed) for kind in {c.system.gpu for c in found}}
    lines = [f"{'system':<32}{'step: public':>13}{'plan':>8}{'error':>7}{'unseen':>8}{'eval':>6}{'run':>6}"]
    errors, unseen = [], []
    for case in found:
        public, own = case.system, case.step_s(assumed)
        error, blind = own / public.step_s - 1, case.step_s(without[public.gpu]) / public.step_s - 1
        checks = case.evaluation_s(assumed)
        steps = public.samples / public.global_batch
        evaluations = public.samples / (math.ceil(262_144 / public.global_batch) * public.global_batch)
        minutes = (steps * own + evaluations * checks) / 60
        name = f"{public.gpus} {public.gpu} {public.system.split('/')[0]}"[:30]
        name += "" if public.is_fitted else " TP"
        lines.append(
            f"{name:<32}{public.step_s * 1e3:>10.0f} ms{own * 1e3:>8.0f}{error:>+7.0%}{blind:>+8.0%}"
            f"{checks / public.evaluation_s - 1:>+6.0%}{minutes / public.minutes - 1:>+6.0%}"
        )
        if public.is_fitted:
            errors.append(abs(error))
            unseen.append(abs(blind))
    fitted = len(errors)
    lines += [
        f"fitted: {len(TUNED)} parameters, {', '.join(f'{n}={getattr(assumed, n):g}' for n in TUNED)},"
        f" on the steps of {fitted} of {len(found)} systems",
        f"mean |error| of those {fitted}: {sum(errors) / fitted:.0%}, largest {max(errors):.0%}; unseen, which is"
        f" fitted without any",
        f"system of the same card: {sum(unseen) / fitted:.0%}, largest {max(unseen):.0%}",
        "error: of the step. eval: of one evaluation. run: of the whole run, given its samples.",
        "TP: tensor parallelism, not modelled. Every system runs other software than flux_ref;",
        "link_share, hop_us, margin and outside_gb are assumed, not fitted.",
    ]
    return "\n".join(lines)
