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
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from types import SimpleNamespace

from flux_ref import config, config_file
from flux_ref.benchmark import hardware
from flux_ref.benchmark.communication import Layout
from flux_ref.benchmark.facts import EVAL_EVERY_SAMPLES, VAL_SAMPLES
from flux_ref.benchmark.hardware import Assumed, Gpu
from flux_ref.config import Config
from flux_ref.plan import footprint, step_time
from flux_ref.plan.footprint import Footprint
from flux_ref.plan.step_time import Machine
from flux_ref.run.attempt import attempt
from flux_ref.run.options import Options
from flux_ref.speed import fp8_product

PUBLIC = Path(__file__).with_name("public_systems.csv")
TUNED = ("gemm_share", "memory_share")
TEXTS = ("round", "system", "gpu", "precision")  # columns that are no numbers


@dataclass(frozen=True)
class Case:
    """A public system with all that its planned time depends on but the shares."""

    public: SimpleNamespace  # a row of public_systems.csv
    cfg: Config
    layout: Layout
    footprints: dict[str, Footprint]
    gpu: Gpu

    def step_s(self, assumed: Assumed) -> float:
        return step_time.step(*self._arguments(assumed)).step

    def evaluation_s(self, assumed: Assumed) -> float:
        return step_time.evaluation(*self._arguments(assumed), VAL_SAMPLES)

    def _arguments(self, assumed: Assumed) -> tuple:
        machine = Machine(self.gpu, assumed, self.public.gpus)
        return self.cfg, self.layout, self.footprints, machine, self.public.rows


def systems() -> list[SimpleNamespace]:
    """The rows of the table. is_fitted: whether a system is alike enough to learn from."""
    lines = [line for line in PUBLIC.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    found = []
    for row in csv.DictReader(lines):
        public = SimpleNamespace(**{key: value if key in TEXTS else json.loads(value) for key, value in row.items()})
        public.rows = public.global_batch // public.gpus
        public.is_fitted = public.tensor_parallel == 1 and public.precision == "fp8"
        found.append(public)
    return found


def cases() -> list[Case]:
    """All systems, traced; takes half a minute."""
    traced, found = {}, []
    for public in systems():
        gpu, _ = hardware.load(public.gpu)
        cfg = config_file.replace(
            config.Config(name="public"),
            train__global_batch=public.global_batch,
            parallel__compile=True,
            parallel__reshard_after_forward=False,
            parallel__reduce_dtype="bf16",
            fp8__recipe="dynamic" if public.precision == "fp8" else "off",
            eval__batch=min(32, math.ceil(VAL_SAMPLES / public.gpus)),
        )
        # FP8 formats have equal sizes, so that layouts are all that cards differ in.
        key = (public.rows, public.precision, fp8_product.arithmetic(gpu.arch).row_times_column)
        if key not in traced:
            traced[key] = footprint.trace(cfg, gpu.arch, public.rows)
        found.append(Case(public, cfg, footprint.layout(cfg, public.gpus, gpu.node), traced[key], gpu))
    return found


def fit(found: list[Case], assumed: Assumed) -> Assumed:
    """The shares with the least mean |log(ours / public)| of the steps of fitted systems, every kind of card alike.

    Not squares: one system that spends its time otherwise would move all others.
    """
    kinds: dict[str, list[Case]] = {}
    for case in found:
        if case.public.is_fitted:
            kinds.setdefault(case.public.gpu, []).append(case)

    def loss(shares: tuple[float, ...]) -> float:
        tried = replace(assumed, **dict(zip(TUNED, shares)))
        return sum(mean(abs(math.log(_error(case, tried) + 1)) for case in kind) for kind in kinds.values())

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


def _error(case: Case, assumed: Assumed) -> float:
    """Of the planned step, relative to the public one."""
    return case.step_s(assumed) / case.public.step_s - 1


def table(found: list[Case]) -> str:
    """The errors of the plan, a line per system."""
    _, assumed = hardware.load("h200")
    kinds = {case.public.gpu for case in found}
    blind = {kind: fit([case for case in found if case.public.gpu != kind], assumed) for kind in kinds}
    lines = [f"{'system':<32}{'step: public':>13}{'plan':>8}{'error':>7}{'unseen':>8}{'eval':>6}{'run':>6}"]
    lines += [_line(case, assumed, blind[case.public.gpu]) for case in found]
    fitted = [case for case in found if case.public.is_fitted]
    errors = [abs(_error(case, assumed)) for case in fitted]
    unseen = [abs(_error(case, blind[case.public.gpu])) for case in fitted]
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
    public, step_s = case.public, case.step_s(assumed)
    name = f"{public.gpus} {public.gpu} {public.system.split('/')[0]}"[:26]
    name += " TP" if public.tensor_parallel > 1 else "" if public.precision == "fp8" else f" {public.precision}"
    line = f"{name:<32}{public.step_s * 1e3:>10.0f} ms{step_s * 1e3:>8.0f}"
    line += f"{_error(case, assumed):>+7.0%}{_error(case, blind):>+8.0%}"
    if not public.samples:
        return line
    evaluation = case.evaluation_s(assumed)
    evaluations = public.samples / (math.ceil(EVAL_EVERY_SAMPLES / public.global_batch) * public.global_batch)
    minutes = (public.samples / public.global_batch * step_s + evaluations * evaluation) / 60
    return line + f"{evaluation / public.evaluation_s - 1:>+6.0%}{minutes / public.minutes - 1:>+6.0%}"


def main(argv: list[str]) -> int:
    Options("python -m bench.plan_check", __doc__).parse_args(argv)
    print(table(cases()))
    return 0


if __name__ == "__main__":
    sys.exit(attempt("bench.plan_check", lambda: main(sys.argv[1:])))
