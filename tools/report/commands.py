"""Score benchmark runs: the official checks, the time to train, a table, and a page with charts.

python -m tools.report runs/schnell_gbs512
python -m tools.report RESULTS_FOLDER_A RESULTS_FOLDER_B --ruleset=5.1.0 --out=report --json=report.json

Exit code: 0 every system is a valid result, or a rehearsal that passes the checks; 1 a system is neither (the reasons
are printed); 2 the request was refused.
"""

import argparse
import importlib.util
import statistics
import textwrap
from importlib.metadata import version
from pathlib import Path

from flux_ref import config_rules
from flux_ref.config import MllogConfig
from flux_ref.errors import Refusal
from flux_ref.formats.files import write_whole
from flux_ref.formats.outside import printable
from flux_ref.run.attempt import attempt
from flux_ref.run.options import Options
from tools.report import official, result_files, result_log, score
from tools.report.score import RUN_COLUMNS, Run, System, show
from tools.shared.json_option import give, json_option, text_beside

INVALID = 1  # exit code
COLUMNS = 80


def main(argv: list[str]) -> int:
    return attempt("report", lambda: run(argv))


def run(argv: list[str]) -> int:
    parser = Options("python -m tools.report", "Score and compare MLPerf Training logs of FLUX.1.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="result files, run folders, or trees of them")
    parser.add_argument("--ruleset", choices=config_rules.CHOICES["mllog.ruleset"], default=MllogConfig.ruleset)
    parser.add_argument("--points", type=Path, help="reference convergence points in place of the official ones")
    parser.add_argument("--out", type=Path, help="folder for a page with charts, report.html")
    json_option(parser)
    args = parser.parse_args(argv)
    with text_beside(args.json):
        systems = judge_and_print(args)
    figures = {
        "ruleset": args.ruleset,
        "mlperf_logging": version("mlperf-logging"),
        "points": str(args.points or "official"),
        "systems": [_system(system) for system in systems],
    }
    give(figures, args.json)  # an unknown value is null
    return INVALID if any(system.reasons for system in systems) else 0


def judge_and_print(args: argparse.Namespace) -> list[System]:
    """Judge all systems, print each verdict at once, and write the page if --out asks for it. Raises: Refusal."""
    if args.out:
        if importlib.util.find_spec("matplotlib") is None:
            raise Refusal("--out draws with matplotlib, which is missing; pip install -r requirements-report.txt")
        args.out.mkdir(parents=True, exist_ok=True)
    basis = f"ruleset {args.ruleset}, mlperf-logging {version('mlperf-logging')}, reference points: "
    basis += printable(args.points or "official")
    if args.points:
        official.require_points(args.points)
    groups = result_files.find(args.paths)
    systems = []
    print("\n".join(_wrapped(basis, "")))
    for place, (name, files) in enumerate(groups):
        system = score.judge(name, [result_log.read(path) for path in files], args.ruleset, args.points)
        system.place = place
        systems.append(system)
        print(f"\n{describe(system)}", flush=True)
    if not any(run.log.events for system in systems for run in system.runs):
        first = systems[0].runs[0]
        raise Refusal(f"no log could be read; {first.log.path} {first.faults[0]}")
    if len(systems) > 1:
        print(f"\n{summary(systems)}")
    if args.out:
        from tools.report import page  # brings matplotlib

        write_whole(args.out / "report.html", page.page(systems, basis))
        print(f"\npage: {printable(args.out / 'report.html')}")
    return systems


def _tail(text: str, most: int) -> str:
    return text if len(text) <= most else "..." + text[3 - most :]


def describe(system: System) -> str:
    """A system for the terminal: its runs, the official checks, the result."""
    count = result_files.accelerators(system.machine)
    parts = [f"{key.removeprefix('submission_')} {system.value(key)}" for key in score.SHARED[:2]]
    model = system.machine.get("accelerator_model_name")
    parts += [f"{count} x {model}" if model else f"{count} ranks"] if count else []
    parts += [f"global batch {system.value('global_batch_size')}", f"lr {system.value('opt_base_learning_rate')}"]
    lines = [*_wrapped(f"{system.name}: {system.verdict}", ""), *_wrapped(", ".join(parts))]
    lines.append(f"  {'run':<21}" + "".join(f"{heading:>{width}}" for heading, width, _, _ in RUN_COLUMNS))
    for run in system.runs:
        values = (f"{show(getattr(run, name), form):>{width}}" for _, width, name, form in RUN_COLUMNS)
        lines.append(f"  {_tail(run.name, 20):<21}{''.join(values)}")
        more = [f"and {len(run.faults) - 3} more"] * (len(run.faults) > 3)
        lines += [line for fault in (*run.faults[:3], *more) for line in _wrapped(f"  failed: {fault}")]
    texts = (*score.checks(system), *system.notes, *(f"not valid: {reason}" for reason in system.reasons))
    return "\n".join((*map(printable, lines), *(line for text in texts for line in _wrapped(text))))


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    """A text in lines of a terminal; a word, such as a path, is broken only if no line can hold it."""
    rest = indent + "    "
    return textwrap.wrap(
        printable(text), COLUMNS, initial_indent=indent, subsequent_indent=rest, break_on_hyphens=False
    )


def summary(systems: list[System]) -> str:
    """A line for each system."""
    rows = [score.overview(system) for system in systems]
    table = [{heading: heading for heading in rows[0]}, *rows]
    names = ["system", *(_tail(system.name, 17) for system in systems)]
    cells = ["".join(f"{row[heading]:>{max(8, len(heading) + 1)}}" for heading in row) for row in table]
    return "\n".join(printable(f"{name:<18}{line}") for name, line in zip(names, cells))


def _system(system: System) -> dict[str, object]:
    minutes = [run.minutes for run in system.counted if not system.mixtures]
    check = system.verdicts.convergence
    names = ("reasons", "notes", "olympic_mean_minutes", "score_minutes", "samples_to_converge", "machine")
    means = ("samples_per_s", "samples_per_s_without_evaluation")
    return {
        "system": system.name,
        "valid": system.verdict == score.VALID,
        "verdict": system.verdict,
        **{name: getattr(system, name) for name in names},
        **{name: system.mean(name) for name in means},
        "normalisation_factor": system.factor,
        "mean_minutes": statistics.fmean(minutes) if minutes else None,
        "stdev_minutes": statistics.stdev(minutes) if len(minutes) > 1 else None,
        "compliant_logs": sum(not complaints for complaints in system.verdicts.compliance),
        "seeds_pass": None if check is None else not system.verdicts.seeds,
        "convergence_pass": check and check.passed,
        "convergence_message": check and check.message,
        "reference_samples": check and check.reference_mean,
        "least_samples": check and check.least_mean,
        "settings": {key: system.value(key) for key in score.SHARED},
        "runs": [_run(run) for run in system.runs],
    }


def _run(run: Run) -> dict[str, object]:
    names = ("faults", "samples_to_converge", "status", *(name for _, _, name, _ in RUN_COLUMNS))
    return {
        "file": str(run.log.path),
        "counts": not run.faults,
        **{name: getattr(run, name) for name in names},
        "seed": run.log.value("seed"),
        "validation": run.val_curve,
    }
