"""Plans against public rates: MLPerf Training v5.1 and v6.0, and what others published (public_systems.csv).

    python -m bench.plan_check
    python -m bench.plan_check --write      also into bench/results/plan_check.md

Each system is planned as flux_ref would run on its cards at its batch (tools/plan/public.py). The systems themselves
ran other software: on NVIDIA's cards Megatron's distributed optimizer, MXFP8 and captured graphs. One parameter is
fitted for each architecture and precision: the gemm_share of hardware.toml. A system in a precision without a known
rate is named, and has no plan.
Exit codes: 0 done, 2 refused.
"""

import math
import sys
import textwrap
from collections import defaultdict
from pathlib import Path
from statistics import mean, median

from bench.common import commit
from flux_ref import cli
from flux_ref.cli import Options
from tools.plan import public
from tools.plan.public import System

RESULT = Path(__file__).with_name("results") / "plan_check.md"
Kind = tuple[str, str]  # architecture, precision


def kind_of(system: System) -> Kind:
    return system.rates[0].arch, system.precision


def error(system: System, share: float | None = None) -> float:
    """Of the planned step, relative to the public one. share: gemm_share in place of hardware.toml's."""
    return public.planned_s(system, share) / system.step_s - 1


def fit() -> dict[Kind, float]:
    """{(arch, precision): the gemm_share with the least mean |log(ours / public)| of its fitted systems}.

    Each card of each source counts alike, whatever its number of systems. Not squares: one system that spends its time
    otherwise would move the share.
    """
    shares = {}
    fitted = [system for system in public.known() if system.fitted]
    for kind in sorted({*map(kind_of, fitted)}):
        losses = {}
        for share in (step / 100 for step in range(20, 96)):
            sizes = defaultdict(list)
            for system in fitted:
                if kind_of(system) == kind:
                    sizes[system.gpu, system.source].append(abs(math.log(error(system, share) + 1)))
            losses[share] = mean(map(mean, sizes.values()))
        shares[kind] = min(losses, key=losses.__getitem__)
    return shares


def blind(kind: Kind, shares: dict[Kind, float]) -> float:
    """The gemm_share that the other kinds suggest: their median in the same precision, or in any."""
    others = {other: share for other, share in shares.items() if other != kind}
    return median([share for other, share in others.items() if other[1] == kind[1]] or others.values())


def table() -> str:
    """The errors of the plan, a line per system."""
    shares = fit()
    systems = public.known()
    errors_of = {system: error(system) for system in systems}
    unseen = {system: error(system, blind(kind_of(system), shares)) for system in systems}
    usual = [system for system in systems if not system.outlier]
    lines = [f"{'system':<36}{'public ms':>10}{'plan ms':>9}{'error':>7}{'unseen':>7}"]
    lines += [_line(system, errors_of[system], unseen[system]) for system in systems]
    groups = {
        "error of all but OUT": [errors_of[system] for system in usual],
        "error of the unfitted but OUT": [errors_of[system] for system in usual if not system.fitted],
        "unseen of all but OUT": [unseen[system] for system in usual],
    }
    for name, found in groups.items():
        sizes = [*map(abs, found)]
        lines.append(f"{name}: mean {mean(sizes):.0%}, largest {max(sizes):.0%}, of {len(sizes)} systems")
    fitted = (f"{arch} {precision} {share:g}" for (arch, precision), share in shares.items())
    lines += [
        f"fitted: {len(shares)} shares ({', '.join(fitted)})",
        f"  to {sum(system.fitted for system in systems)} of {len(systems)} steps, marked F",
        "error: of the step. unseen: with the median share of the other architectures.",
        "TP: tensor parallelism, which flux_ref lacks. OUT: an outlier:",
        *(f"  {system.system}: {system.outlier}" for system in systems if system.outlier),
        "No plan, because no rate of the precision is known:",
        *(f"  {system.system} in {system.precision}" for system in public.systems() if system not in systems),
        "Every system runs other software than flux_ref; flux_ref itself has not run on any of these.",
        "memory_share, link_share, hop_us, margin and outside_gb are assumed.",
    ]
    return "\n".join(part for line in lines for part in textwrap.wrap(line, 80, subsequent_indent="    "))


def _line(system: System, error: float, unseen: float) -> str:
    mark = "OUT" if system.outlier else "TP" if system.tensor_parallel > 1 else "F" if system.fitted else "-"
    name = f"{system.source} {system.gpus} {system.gpu} {system.precision} {system.system.split('/')[0]}"[:31]
    planned_ms = (error + 1) * system.step_s * 1e3
    return f"{name:<32}{mark:<4}{system.step_s * 1e3:>10.0f}{planned_ms:>9.0f}{error:>+z7.0%}{unseen:>+z7.0%}"


def main(argv: list[str]) -> int:
    parser = Options("python -m bench.plan_check", __doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    text = table()
    print(text)
    if args.write:
        told = f"`python -m bench.plan_check --write` at {commit()}:\n\n```\n{text}\n```\n"
        RESULT.write_text(told, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(cli.run("bench.plan_check", main, sys.argv[1:]))
