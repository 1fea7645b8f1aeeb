"""How often the early warnings (flux_ref/benchmark/alarms.py) flag public runs, all of which converged.

    git clone https://github.com/mlcommons/training_results_v5.1
    python -m bench.alarms training_results_v5.1/*/results/*/flux1 --json=bench/results/alarms_v51.json

Every run is replayed twice, evaluation by evaluation: against the public band, which contains the run itself, and
against a band of the other systems at its batch, as a new run would be. Only runs that reached the target count.
"""

import argparse
import math
import shlex
import sys
from collections import defaultdict

from flux_ref.benchmark import alarms, convergence
from flux_ref.report import band, result_files, result_log, score
from flux_ref.run import cli, json_option
from flux_ref.run.environment import commit

Curve = list[tuple[float, float]]  # (samples, validation loss)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("bench.alarms")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="result files of the benchmark, or trees of them")
    json_option.json_option(parser)
    args = parser.parse_args(argv)
    report = {"command": f"python -m bench.alarms {shlex.join(argv)}", "commit": commit()}
    report["systems"] = judged(curves(args.paths))
    json_option.show(table(report), report, args.json)
    return 0


def curves(paths: list[str]) -> dict[int, dict[str, list[Curve]]]:
    """The losses of all runs that reached the target, by batch and system."""
    by_batch = defaultdict(lambda: defaultdict(list))
    for name, files in result_files.find(paths):
        for path in files:
            run = score.measure(result_log.read(path))
            if not run.faults:
                by_batch[run.log.value("global_batch_size")][name].append(run.val_curve)
    return by_batch


def judged(by_batch: dict[int, dict[str, list[Curve]]]) -> list[dict]:
    """How many runs of each system are flagged."""
    systems = []
    for batch, runs in sorted(by_batch.items()):
        public = convergence.public_band(batch)
        for name, own in runs.items():
            rest = [curve for other, more in runs.items() if other != name for curve in more]
            rows = band.quartile_rows((batch, math.nan, math.nan), rest)
            figures = {"system": name, "global_batch": batch, "runs": len(own), "warned": warned(own, public)}
            figures["warned_by_others"] = warned(own, convergence.pooled(rows, "the other systems")) if rows else None
            systems.append(figures)
    return systems


def warned(runs: list[Curve], band: convergence.Band | None) -> int:
    """Number of runs that get a warning."""
    return sum(any(alarm.level == "warning" for alarm in alarms.of_losses(curve, band)) for curve in runs)


def table(report: dict) -> str:
    systems = report["systems"]
    compared = [system for system in systems if system["warned_by_others"] is not None]
    lines = [f"{'system':<42}{'batch':>6}{'runs':>6}{'warned':>8}{'warned, by the others':>23}"]
    for system in systems:
        by_others = "-" if system["warned_by_others"] is None else system["warned_by_others"]
        counts = f"{system['global_batch']:>6}{system['runs']:>6}{system['warned']:>8}{by_others:>23}"
        lines.append(f"{system['system']:<42}{counts}")
    runs, warnings = (sum(system[key] for system in systems) for key in ("runs", "warned"))
    by_others, of_them = (sum(system[key] for system in compared) for key in ("warned_by_others", "runs"))
    return "\n".join([*lines, f"{'all':<48}{runs:>6}{warnings:>8}{f'{by_others} of {of_them}':>23}"])


if __name__ == "__main__":
    cli.leave(cli.run("bench.alarms", __doc__, main, sys.argv[1:]))
