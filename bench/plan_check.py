"""Plans against public results: MLPerf Training v5.1 and v6.0, public_systems.csv.

    python -m bench.plan_check

Each system is planned as flux_ref would run on its cards at its batch: FSDP2 over a node, replicas across nodes,
compiled, gathered weights kept, gradients reduced in bf16, FP8. The systems themselves ran other software: on NVIDIA's
cards Megatron's distributed optimizer, MXFP8 and captured graphs. A system with `tensor_parallel` above 1 also sends
what tensor parallelism sends, which the plan leaves out. Two parameters are fitted to all cards together:
assumed.gemm_share and assumed.memory_share of hardware.toml.
Exit codes: 0 done, 2 refused.
"""

import csv
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from flux_ref import config, config_file
from flux_ref.benchmark import hardware
from flux_ref.benchmark.communication import Layout
from flux_ref.benchmark.facts import EVAL_EVERY_SAMPLES, VAL_SAMPLES
from flux_ref.benchmark.hardware import Assumed, Gpu
from flux_ref.config import Config
from flux_ref.plan import footprint, step_time
from flux_ref.plan.figures import Footprint
from flux_ref.plan.step_time import Machine
from flux_ref.run.attempt import attempt
from flux_ref.run.options import Options
from flux_ref.speed import fp8

PUBLIC = Path(__file__).with_name("public_systems.csv")
TUNED = ("gemm_share", "memory_share")


@dataclass(frozen=True)
class System:
    """One public result."""

    round: str
    system: str
    gpu: str
    gpus: int
    tensor_parallel: int
    precision: str
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
        return self.tensor_parallel == 1 and self.precision == "fp8"

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

    def machine(self, assumed: Assumed) -> Machine:
        return Machine(self.gpu, assumed, self.system.gpus)

    def step_s(self, assumed: Assumed) -> float:
        machine, rows = self.machine(assumed), self.system.rows
        return step_time.step(self.cfg, self.layout, self.footprints, machine, rows).step

    def evaluation_s(self, assumed: Assumed) -> float:
        machine, rows = self.machine(assumed), self.system.rows
        return step_time.evaluation(self.cfg, self.layout, self.footprints, machine, rows, VAL_SAMPLES)


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
        cfg = _config(system)
        # FP8 formats have equal sizes, so that layouts are all that cards differ in.
        key = (system.rows, cfg.fp8.recipe, fp8.arithmetic(gpu.arch).row_times_column)
        if key not in traced:
            traced[key] = footprint.trace(cfg, gpu.arch, system.rows)
        if (system.gpus, gpu.node) not in layouts:
            layouts[system.gpus, gpu.node] = footprint.layout(cfg, system.gpus, gpu.node)
        found.append(Case(system, cfg, layouts[system.gpus, gpu.node], traced[key], gpu))
    return found


def _config(system: System) -> Config:
    return config_file.replace(
        config.Config(name="public"),
        train__global_batch=system.global_batch,
        parallel__compile=True,
        parallel__reshard_after_forward=False,
        parallel__reduce_dtype="bf16",
        fp8__recipe="dynamic" if system.precision == "fp8" else "off",
        eval__batch=min(32, math.ceil(VAL_SAMPLES / system.gpus)),
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
        errors = (
            mean(abs(math.log(case.step_s(own) / case.system.step_s)) for case in kind) for kind in kinds.values()
        )
        return sum(errors)

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


def table(found: list[Case]) -> str:
    """The errors of the plan, a line per system."""
    _, assumed = hardware.load("h200")
    kinds = {case.system.gpu for case in found}
    blind = {kind: fit([case for case in found if case.system.gpu != kind], assumed) for kind in kinds}
    lines = [f"{'system':<32}{'step: public':>13}{'plan':>8}{'error':>7}{'unseen':>8}{'eval':>6}{'run':>6}"]
    lines += [_line(case, assumed, blind[case.system.gpu]) for case in found]
    fitted = [case for case in found if case.system.is_fitted]
    errors = [abs(case.step_s(assumed) / case.system.step_s - 1) for case in fitted]
    unseen = [abs(case.step_s(blind[case.system.gpu]) / case.system.step_s - 1) for case in fitted]
    values = ", ".join(f"{name}={getattr(assumed, name):g}" for name in TUNED)
    lines += [
        f"fitted: {len(TUNED)} parameters, {values}, to {len(fitted)} of {len(found)} steps",
        f"error: of the step; of the fitted rows mean {mean(errors):.0%}, largest {max(errors):.0%}",
        f"unseen: fitted without its kind of card; mean {mean(unseen):.0%}, largest {max(unseen):.0%}",
        "eval: of one evaluation. run: of the whole run, given its samples.",
        "TP: tensor parallelism, which is not modelled; bf16: not FP8. Neither is fitted.",
        "Every system runs other software than flux_ref. link_share, hop_us, margin and",
        "outside_gb are assumed, not fitted. flux_ref itself has not run on any of these.",
    ]
    return "\n".join(lines)


def _line(case: Case, assumed: Assumed, blind: Assumed) -> str:
    public, own = case.system, case.step_s(assumed)
    name = f"{public.gpus} {public.gpu} {public.system.split('/')[0]}"[:26]
    name += " TP" if public.tensor_parallel > 1 else "" if public.precision == "fp8" else f" {public.precision}"
    line = f"{name:<32}{public.step_s * 1e3:>10.0f} ms{own * 1e3:>8.0f}{own / public.step_s - 1:>+7.0%}"
    line += f"{case.step_s(blind) / public.step_s - 1:>+8.0%}"
    if not public.samples:
        return line
    evaluation = case.evaluation_s(assumed)
    evaluations = public.samples / (math.ceil(EVAL_EVERY_SAMPLES / public.global_batch) * public.global_batch)
    minutes = (public.samples / public.global_batch * own + evaluations * evaluation) / 60
    return line + f"{evaluation / public.evaluation_s - 1:>+6.0%}{minutes / public.minutes - 1:>+6.0%}"


def main(argv: list[str]) -> int:
    Options("python -m bench.plan_check", __doc__).parse_args(argv)
    print(table(cases()))
    return 0


if __name__ == "__main__":
    sys.exit(attempt("bench.plan_check", lambda: main(sys.argv[1:])))
