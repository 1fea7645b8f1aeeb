"""Score benchmark runs: the official checks, the time to train, a table, and a page with charts.

python -m tools.report runs/schnell_gbs512
python -m tools.report RESULTS_FOLDER_A RESULTS_FOLDER_B --ruleset=5.1.0 --out=report --json=report.json

Exit code: 0 every system is a valid result, or a rehearsal that passes the checks; 1 a system is neither (the reasons
are printed); 2 the request was refused.
"""

import argparse
from importlib.metadata import version
from pathlib import Path

from flux_ref import config
from flux_ref.config import MllogConfig
from flux_ref.errors import Refusal
from flux_ref.formats.files import write_whole
from flux_ref.formats.outside import printable
from flux_ref.run.attempt import attempt
from flux_ref.run.options import Options, package
from tools.report import official, result_files, result_log, score, text
from tools.report.score import Run, System
from tools.shared.json_option import give, json_option, text_beside

INVALID = 1  # exit code
# Attributes that --json gives.
OF_RUN = ("faults", "samples_to_converge", "status", *text.RUN_COLUMNS)
OF_SYSTEM = (
    *("verdict", "reasons", "notes", "olympic_mean_minutes", "score_minutes", "samples_to_converge", "machine"),
    "compliant_logs",
)


def main(argv: list[str]) -> int:
    return attempt("report", lambda: run(argv))


def run(argv: list[str]) -> int:
    parser = Options("python -m tools.report", "Score and compare MLPerf Training logs of FLUX.1.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="result files, run folders, or trees of them")
    parser.add_argument("--ruleset", choices=config.KEYS["mllog.ruleset"].choices, default=MllogConfig.ruleset)
    parser.add_argument("--points", type=Path, help="reference convergence points in place of the official ones")
    parser.add_argument("--out", type=Path, help="folder for a page with charts, report.html")
    json_option(parser)
    args = parser.parse_args(argv)
    with text_beside(args.json):
        systems = judge_and_print(args)
    content = {
        "ruleset": args.ruleset,
        "mlperf_logging": version("mlperf-logging"),
        "points": str(args.points or "official"),
        "systems": [figures(system) for system in systems],
    }
    give(content, args.json)  # an unknown value is null
    return INVALID if any(system.reasons for system in systems) else 0


def judge_and_print(args: argparse.Namespace) -> list[System]:
    """Judge all systems, print each verdict at once, and write the page if --out asks for it. Raises: Refusal."""
    if args.out:
        package("matplotlib", "--out")
        args.out.mkdir(parents=True, exist_ok=True)
    if args.points:
        official.require_points(args.points)
    points = args.points or "official"
    basis = f"ruleset {args.ruleset}, mlperf-logging {version('mlperf-logging')}, reference points: {points}"
    systems = []
    groups = result_files.find(args.paths)
    print(text.wrapped(basis))
    for name, files in groups:
        system = score.judge(name, [result_log.read(path) for path in files], args.ruleset, args.points)
        systems.append(system)
        print(f"\n{text.describe(system)}", flush=True)
    if not any(run.log.events for system in systems for run in system.runs):
        first = systems[0].runs[0]
        raise Refusal(f"no log could be read; {first.log.path} {first.faults[0]}")
    if len(systems) > 1:
        print("", *text.table([text.overview(system) for system in systems]), sep="\n")
    if args.out:
        from tools.report import page  # brings matplotlib

        write_whole(args.out / "report.html", page.page(systems, basis))
        print(f"\npage: {printable(args.out / 'report.html')}")
    return systems


def figures(system: System) -> dict[str, object]:
    """A system for JSON."""
    check = system.verdicts.convergence or official.Convergence(None, None)
    return {name: getattr(system, name) for name in OF_SYSTEM} | {
        "system": system.name,
        "valid": system.verdict == score.VALID,
        "samples_per_s": system.mean("samples_per_s"),
        "samples_per_s_without_evaluation": system.mean("samples_per_s_without_evaluation"),
        "normalisation_factor": system.factor,
        "seeds_pass": not system.verdicts.seeds if system.verdicts.convergence else None,
        "convergence_pass": check.passed,
        "convergence_message": check.message,
        "reference_samples": check.reference_mean,
        "least_samples": check.least_mean,
        "settings": {key: system.value(key) for key in score.SHARED},
        "runs": [_run(run) for run in system.runs],
    }


def _run(run: Run) -> dict[str, object]:
    return {name: getattr(run, name) for name in OF_RUN} | {
        "file": str(run.log.path),
        "counts": not run.faults,
        "seed": run.log.value("seed"),
        "validation": run.val_curve,
    }
