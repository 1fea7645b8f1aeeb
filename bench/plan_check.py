"""Plans against public rates: MLPerf Training v5.1 and v6.0, and what others published (public_systems.csv).

    python -m bench.plan_check
    python -m bench.plan_check --write

Each system is planned as flux_ref would run on its cards at its batch: FSDP2 over a node, replicas across nodes,
compiled, gathered weights kept, gradients reduced in bf16. The systems themselves ran other software: on NVIDIA's cards
Megatron's distributed optimizer, MXFP8 and captured graphs. Where a system is tensor-parallel or recomputes blocks, the
time for these is added. One parameter is fitted for each architecture and precision: the gemm_share of hardware.toml.
A system in a precision without a known rate is named, and has no plan.
--write puts the planned steps into public_systems.csv, where tools.plan finds them, and this table into
bench/results/plan_check.md.
Exit codes: 0 done, 2 refused.
"""

import math
import sys
import textwrap
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace

from bench.common import commit
from flux_ref import config, config_file, errors
from flux_ref.benchmark.facts import VAL_SAMPLES
from flux_ref.config import Config
from flux_ref.precision import fp8
from flux_ref.run.options import Options
from tools.plan import footprint, step_time
from tools.plan.commands import PLANNED
from tools.plan.footprint import Footprint
from tools.plan.step_time import Machine
from tools.shared import hardware, public_systems
from tools.shared.communication import Layout
from tools.shared.hardware import Assumed, Gpu

RESULT = Path(__file__).with_name("results") / "plan_check.md"


@dataclass(frozen=True)
class Case:
    """A public system with all that its planned time depends on but the share."""

    public: SimpleNamespace  # a row of public_systems.csv
    cfg: Config
    layout: Layout
    footprints: dict[str, Footprint]
    gpu: Gpu
    assumed: Assumed  # as hardware.toml has it

    @property
    def kind(self) -> tuple[str, str]:
        return self.gpu.arch, self.public.precision

    def step_s(self, assumed: Assumed) -> float:
        """With what flux_ref would not do: recompute some blocks, and sum activations in tensor parallelism."""
        public, model, machine = self.public, self.cfg.model, Machine(self.gpu, assumed, self.public.gpus)
        forward = sum(machine.seconds(self.footprints[unit.kind].forward_work) for unit in self.layout.units)
        # Attention and the MLP of a double block and a single block's end, in forward and again in backward.
        sums = 2 * (2 * model.double_blocks + model.single_blocks)
        stream = (
            2 * public.micro_batch * public.tensor_parallel * (model.text_tokens + model.image_tokens) * model.hidden
        )
        step = step_time.step(self.cfg, self.layout, self.footprints, machine, public.micro_batch).step
        return step + public.recomputed * forward + 2 * sums * machine.ring(stream, public.tensor_parallel)

    def error(self, assumed: Assumed | None = None) -> float:
        """Of the planned step, relative to the public one."""
        return self.step_s(assumed or self.assumed) / self.public.step_s - 1


def known(public: SimpleNamespace) -> bool:
    """Whether tools.plan has a rate for the precision of a system."""
    return public.precision in PLANNED.values()


def cases() -> list[Case]:
    """All known systems, traced; takes half a minute."""
    traced, found = {}, []
    for public in filter(known, public_systems.systems()):
        gpu, assumed = hardware.load(public.gpu, precision=public.precision)
        cfg = config_file.replace(
            config.Config(name="public"),
            train__global_batch=public.global_batch,
            train__micro_batch=public.micro_batch,
            parallel__compile=True,
            parallel__kept_regions=-1,
            parallel__reduce_dtype="bf16",
            precision__preset=public.precision,
            eval__batch=min(32, math.ceil(VAL_SAMPLES / public.gpus)),
        )
        # FP8 formats have equal sizes, so that layouts are all that cards differ in.
        key = (public.micro_batch, public.precision, fp8.arithmetic(gpu.arch).row_times_column)
        if key not in traced:
            traced[key] = footprint.trace(cfg, gpu.arch, public.micro_batch)
        found.append(Case(public, cfg, footprint.layout(cfg, public.gpus, gpu.node), traced[key], gpu, assumed))
    return found


def fit(found: list[Case]) -> dict[tuple[str, str], float]:
    """{(arch, precision): the gemm_share with the least mean |log(ours / public)| of its fitted systems}.

    Each card of each source counts alike, whatever its number of systems. Not squares: one system that spends its time
    otherwise would move the share.
    """
    groups: dict[tuple[str, str], dict[tuple[str, str], list[Case]]] = {}
    for case in found:
        if case.public.fitted:
            alike = groups.setdefault(case.kind, {})
            alike.setdefault((case.public.gpu, case.public.source), []).append(case)

    def loss(kind: tuple[str, str], share: float) -> float:
        sizes = (
            mean(abs(math.log(case.error(replace(case.assumed, gemm_share=share)) + 1)) for case in alike)
            for alike in groups[kind].values()
        )
        return mean(sizes)

    return {kind: min((step / 100 for step in range(20, 96)), key=partial(loss, kind)) for kind in sorted(groups)}


def blind(kind: tuple[str, str], shares: dict[tuple[str, str], float]) -> float:
    """The gemm_share that the other kinds suggest: their median in the same precision, or in any."""
    others = {other: share for other, share in shares.items() if other != kind}
    return median([share for other, share in others.items() if other[1] == kind[1]] or others.values())


def table(found: list[Case]) -> str:
    """The errors of the plan, a line per system."""
    shares = fit(found)
    unseen = [case.error(replace(case.assumed, gemm_share=blind(case.kind, shares))) for case in found]
    lines = [f"{'system':<36}{'public ms':>10}{'plan ms':>9}{'error':>7}{'unseen':>7}"]
    lines += [_line(case, error) for case, error in zip(found, unseen)]
    usual = [case for case in found if not case.public.outlier]
    groups = {
        "error of all but OUT": [case.error() for case in usual],
        "error of the unfitted but OUT": [case.error() for case in usual if not case.public.fitted],
        "unseen of all but OUT": [error for case, error in zip(found, unseen) if case in usual],
    }
    for name, those in groups.items():
        sizes = [abs(error) for error in those]
        lines.append(f"{name}: mean {mean(sizes):.0%}, largest {max(sizes):.0%}, of {len(sizes)} systems")
    held = sum(abs(math.log(case.error() + 1)) <= math.log(1 + case.assumed.range) for case in usual)
    fitted = (f"{arch} {precision} {share:g}" for (arch, precision), share in shares.items())
    lines += [
        f"in the plan's range, but OUT: {held} of {len(usual)} systems",
        f"fitted: {len(shares)} shares ({', '.join(fitted)})",
        f"  to {sum(case.public.fitted for case in found)} of {len(found)} steps, marked F",
        "error: of the step. unseen: with the median share of the other architectures.",
        "TP: tensor parallelism, which flux_ref lacks. OUT: an outlier:",
        *(f"  {case.public.system}: {case.public.outlier}" for case in found if case.public.outlier),
        "No plan, because no rate of the precision is known:",
        *(f"  {public.system} in {public.precision}" for public in public_systems.systems() if not known(public)),
        "Every system runs other software than flux_ref; flux_ref itself has not run on any of these.",
        "memory_share, link_share, hop_us, margin and outside_gb are assumed.",
    ]
    return "\n".join(part for line in lines for part in textwrap.wrap(line, 80, subsequent_indent="    "))


def _line(case: Case, unseen: float) -> str:
    public, step_s = case.public, case.step_s(case.assumed)
    mark = "OUT" if public.outlier else "TP" if public.tensor_parallel > 1 else "F" if public.fitted else "-"
    name = f"{public.source} {public.gpus} {public.gpu} {public.precision} {public.system.split('/')[0]}"[:31]
    line = f"{name:<32}{mark:<4}{public.step_s * 1e3:>10.0f}{step_s * 1e3:>9.0f}"
    return line + f"{_percent(case.error()):>7}{_percent(unseen):>7}"


def _percent(error: float) -> str:
    return f"{round(error, 2) + 0.0:+.0%}"  # no -0


def write(found: list[Case], text: str) -> None:
    """Into public_systems.csv what is planned, and the table into the results."""
    lines = public_systems.TABLE.read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("source,")) + 1
    column = lines[first - 1].split(",").index("planned_s")
    systems = public_systems.systems(public_systems.TABLE)
    rows = [i for i, public in enumerate(systems, first) if known(public)]
    for i, case in zip(rows, found, strict=True):
        cells = lines[i].split(",", column + 1)
        cells[column] = f"{case.step_s(case.assumed):.4f}"
        lines[i] = ",".join(cells)
    public_systems.TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    RESULT.write_text(f"`python -m bench.plan_check --write` at {commit()}:\n\n```\n{text}\n```\n", encoding="utf-8")


def main(argv: list[str]) -> int:
    parser = Options("python -m bench.plan_check", __doc__)
    parser.add_argument("--write", action="store_true")
    args, found = parser.parse_args(argv), cases()
    text = table(found)
    print(text)
    if args.write:
        write(found, text)
    return 0


if __name__ == "__main__":
    sys.exit(errors.run("bench.plan_check", main, sys.argv[1:]))
