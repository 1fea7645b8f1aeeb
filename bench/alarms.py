"""How often flux_ref.early_warning speaks of public runs, all of which converged.

    git clone https://github.com/mlcommons/training_results_v5.1
    python -m bench.alarms training_results_v5.1/*/results/*/flux1 --json=bench/results/alarms_v51.json

Every run is replayed, evaluation by evaluation, twice: against the public band, which this very run is part of, and
against a band of the other systems at its batch only, as a run that is new would be. Only runs that reached the target
count. The note of dropped captions is no false one: those runs did drop captions in validation.
"""

import argparse
import math
import shlex
import sys
from collections import defaultdict

from flux_ref.benchmark import alarms, convergence
from flux_ref.benchmark.alarms import Alarm
from flux_ref.report import result_files, result_log, score
from flux_ref.run import cli, json_option
from flux_ref.run.environment import commit

Curve = list[tuple[float, float]]  # (samples, validation loss)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("bench.alarms")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="result files of the benchmark, or trees of them")
    json_option.json_option(parser)
    args = parser.parse_args(argv)
    report = {
        "command": f"python -m bench.alarms {shlex.join(argv)}",
        "commit": commit(),
        "systems": judged(curves(args.paths)),
    }
    json_option.show(table(report), report, args.json)
    return 0


def curves(paths: list[str]) -> dict[int, dict[str, list[Curve]]]:
    """The losses of all runs that reached the target, by batch and system."""
    found = defaultdict(lambda: defaultdict(list))
    for group in result_files.find(paths):
        for path in group.files:
            run = score.measure(result_log.read(path))
            if not run.faults:
                found[run.log.value("global_batch_size")][group.name].append(run.val_curve)
    return found


def judged(found: dict[int, dict[str, list[Curve]]]) -> list[dict]:
    """What is said of each system's runs."""
    systems = []
    for batch, runs in sorted(found.items()):
        band, bias = convergence.public_band(batch), convergence.bias(batch)
        for name, own in runs.items():
            others = band_of(batch, [curve for other, more in runs.items() if other != name for curve in more])
            said = [alarms.of_losses(curve, band, bias) for curve in own]
            new = [alarms.of_losses(curve, others) for curve in own] if others else None
            systems.append(
                {
                    "system": name,
                    "global_batch": batch,
                    "runs": len(own),
                    "warned": count(said, "warning"),
                    "noted": count(said, "note"),
                    "warned_by_others": new and count(new, "warning"),
                }
            )
    return systems


def band_of(batch: int, own: list[Curve]) -> convergence.Band | None:
    rows = convergence.quartile_rows((batch, math.nan, math.nan), own)
    return convergence.pooled(rows, "the other systems") if rows else None


def count(said: list[list[Alarm]], level: str) -> int:
    """Runs of which something of this level is said."""
    return sum(any(alarm.level == level for alarm in alarms) for alarms in said)


def table(report: dict) -> str:
    systems = report["systems"]
    compared = [one for one in systems if one["warned_by_others"] is not None]
    lines = [f"{'system':<42}{'batch':>6}{'runs':>6}{'warned':>8}{'noted':>7}{'warned, by the others':>23}"]
    for one in systems:
        by_others = "-" if one["warned_by_others"] is None else one["warned_by_others"]
        lines.append(
            f"{one['system']:<42}{one['global_batch']:>6}{one['runs']:>6}{one['warned']:>8}{one['noted']:>7}"
            f"{by_others:>23}"
        )
    sums = {key: sum(one[key] for one in systems) for key in ("runs", "warned", "noted")}
    by_others = f"{sum(one['warned_by_others'] for one in compared)} of {sum(one['runs'] for one in compared)}"
    lines.append(f"{'all':<48}{sums['runs']:>6}{sums['warned']:>8}{sums['noted']:>7}{by_others:>23}")
    return "\n".join(lines)


if __name__ == "__main__":
    cli.leave(cli.run("bench.alarms", __doc__, main, sys.argv[1:]))
