"""Score benchmark runs and show them: the official checks, the time to train, a table, a page with charts.

python -m flux_ref.report runs/schnell_gbs512
python -m flux_ref.report RESULTS_FOLDER_A RESULTS_FOLDER_B --ruleset=5.1.0 --out=report --json=report.json

Exit code: 0 every system is a valid result, 1 one is not (the reasons are said), 2 the request was refused.
"""

import argparse
import statistics
import tempfile
import textwrap
from importlib.metadata import version
from pathlib import Path

from flux_ref import config_rules
from flux_ref.benchmark import convergence
from flux_ref.config import MllogConfig
from flux_ref.errors import Refusal, attempt
from flux_ref.formats.files import write_whole
from flux_ref.report import result_files, result_log, score
from flux_ref.report.result_files import Records
from flux_ref.report.result_log import printable
from flux_ref.report.score import Run, System
from flux_ref.run.json_option import STDOUT, give, json_option, text_beside

INVALID = 1  # exit code
COLUMNS = 80


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flux_ref.report", description="Score and compare MLPerf Training logs of FLUX.1."
    )
    parser.add_argument("paths", nargs="+", metavar="PATH", help="result files, run folders, or trees of them")
    parser.add_argument("--ruleset", choices=config_rules.CHOICES["mllog.ruleset"], default=MllogConfig.ruleset)
    parser.add_argument("--points", type=Path, help="reference convergence points in place of the official ones")
    parser.add_argument("--out", type=Path, default=Path("report"), help="folder for report.html and its PNGs")
    json_option(parser)
    args = parser.parse_args(argv)
    return attempt("report", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    with text_beside(args.json):
        systems = tell(args)
    give(figures(systems, args), args.json)
    return INVALID if any(system.reasons for system in systems) else 0


def tell(args: argparse.Namespace) -> list[System]:
    """Judge all systems, print what is found as it is found, and draw the page. Raises: Refusal."""
    convergence.points(args.ruleset, args.points)  # refuses a file that is none
    groups = result_files.find(args.paths)
    _writable("--out", args.out, args.out / "report.html")
    if args.json not in (None, STDOUT):
        _writable("--json", args.json, args.json)
    basis = f"ruleset {args.ruleset}, mlperf-logging {version('mlperf-logging')}, reference points: "
    basis += printable(args.points or "official")
    print("\n".join(_wrapped(basis, "")))
    systems, records = [], []
    for group in groups:
        logs = [result_log.read(path) for path in group.files]
        systems.append(score.judge(group.name, logs, args.ruleset, args.points))
        records.append({str(path): result_files.records(path) for path in group.files})
        print(f"\n{describe(systems[-1])}", flush=True)
    if not any(run.log.events for system in systems for run in system.runs):
        first = systems[0].runs[0]
        raise Refusal(f"no log could be read; {first.log.path} {first.faults[0]}")
    if len(systems) > 1:
        print(f"\n{summary(systems)}")
    _page(systems, records, basis, args.out)
    print(f"\npage: {printable(args.out / 'report.html')}")
    return systems


def _writable(option: str, value: Path, file: Path) -> None:
    """Make the folder of a file to come, and try it. Raises: Refusal."""
    try:
        if file.is_dir():
            raise IsADirectoryError(0, f"{file.name} is a folder")
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent, buffering=0) as trial:
            trial.write(b"0")
    except OSError as error:
        raise Refusal(
            f"{option}={value} cannot be written: {error.strerror}; give a place where folders and files can be made"
        ) from None


def _page(systems: list[System], records: list[dict[str, Records]], basis: str, out: Path) -> None:
    from flux_ref.report import charts, drawing, page

    subjects = charts.subjects(systems, records)
    drawn = page.drawings(subjects)
    for old in page.charts_of(out / "report.html"):
        old.unlink()
    for name, chart in drawn.items():
        drawing.png(chart, out / f"{name}.png")
    write_whole(out / "report.html", page.page(subjects, drawn, basis))


def show(value: float | None, form: str = ",.2f") -> str:
    return "-" if value is None else format(value, form)


def _tail(text: str, most: int) -> str:
    return text if len(text) <= most else "..." + text[3 - most :]


def describe(system: System) -> str:
    """One system for the terminal: its runs, the official checks, the result."""
    machine = result_files.machine(system.runs[0].log.path, system.runs[0].log.system)
    count = result_files.accelerators(machine)
    told = [f"{key.removeprefix('submission_')} {system.value(key)}" for key in score.SHARED[:2]]
    model = machine.get("accelerator_model_name")
    told += [f"{count} x {model}" if model else f"{count} ranks"] if count else []
    told += [f"global batch {system.value('global_batch_size')}", f"lr {system.value('opt_base_learning_rate')}"]
    lines = [*_wrapped(f"{system.name}: {verdict(system)}", ""), *_wrapped(", ".join(told))]
    lines.append(f"  {'run':<22}{'minutes':>9}{'samples':>12}{'samples/s':>11}{'training':>10}{'eval s':>8}{'init':>6}")
    for run in system.runs:
        init = None if run.init_s is None else run.init_s / 60
        name = _tail(run.name, 21)
        lines.append(
            f"  {name:<22}{show(run.minutes):>9}{show(run.samples, ',.0f'):>12}{show(run.throughput, ',.1f'):>11}"
            f"{show(run.training_throughput, ',.1f'):>10}{show(run.evaluation_s, ',.0f'):>8}{show(init, '.1f'):>6}"
        )
        more = [f"and {len(run.faults) - 3} more" for _ in run.faults[3:4]]
        lines += [line for fault in (*run.faults[:3], *more) for line in _wrapped(f"  failed: {fault}")]
    texts = (*score.checks(system), *system.notes, *(f"not valid: {reason}" for reason in system.reasons))
    return "\n".join((*map(printable, lines), *(line for text in texts for line in _wrapped(text))))


def _wrapped(text: str, indent: str = "  ") -> list[str]:
    """A text of any length in lines of a terminal; a word, such as a path, is broken only if no line can hold it."""
    rest = indent + "    "
    return textwrap.wrap(
        printable(text), COLUMNS, initial_indent=indent, subsequent_indent=rest, break_on_hyphens=False
    )


def verdict(system: System) -> str:
    return "not a valid result" if system.reasons else "valid result"


def summary(systems: list[System]) -> str:
    """A line per system."""
    lines = [f"{'system':<30}{'runs':>6}{'olympic':>10}{'score':>10}{'samples':>12}{'samples/s':>11}"]
    for system in systems:
        lines.append(
            f"{_tail(system.name, 29):<30}{f'{len(system.counted)}/{len(system.runs)}':>6}"
            f"{show(system.olympic_mean_minutes):>10}{show(system.score_minutes):>10}"
            f"{show(system.samples_to_converge, ',.0f'):>12}{show(system.mean('throughput'), ',.1f'):>11}"
        )
    return "\n".join(map(printable, lines))


def figures(systems: list[System], args: argparse.Namespace) -> dict[str, object]:
    """Everything as JSON has it; what is not known is null."""
    return {
        "ruleset": args.ruleset,
        "mlperf_logging": version("mlperf-logging"),
        "points": str(args.points or "official"),
        "systems": [_system(system) for system in systems],
    }


def _system(system: System) -> dict[str, object]:
    minutes = [run.minutes for run in system.counted if not system.mixtures]
    known = system.verdicts.convergence
    return {
        "system": system.name,
        "valid": not system.reasons,
        "reasons": system.reasons,
        "notes": system.notes,
        "olympic_mean_minutes": system.olympic_mean_minutes,
        "normalisation_factor": system.factor,
        "score_minutes": system.score_minutes,
        "mean_minutes": statistics.fmean(minutes) if minutes else None,
        "stdev_minutes": statistics.stdev(minutes) if len(minutes) > 1 else None,
        "samples_to_converge": system.samples_to_converge,
        "samples_per_s": system.mean("throughput"),
        "samples_per_s_without_evaluation": system.mean("training_throughput"),
        "compliant_logs": sum(not complaints for complaints in system.verdicts.compliance),
        "seeds_pass": None if known is None else not system.verdicts.seeds,
        "convergence_pass": known and known.passed,
        "convergence_message": known and known.message,
        "reference_samples": known and known.reference_mean,
        "least_samples": known and known.least_mean,
        "settings": {key: _plain(system.value(key)) for key in score.SHARED},
        "machine": result_files.machine(system.runs[0].log.path, system.runs[0].log.system),
        "runs": [_run(run) for run in system.runs],
    }


def _run(run: Run) -> dict[str, object]:
    return {
        "file": str(run.log.path),
        "counts": not run.faults,
        "faults": run.faults,
        "minutes": run.minutes,
        "samples_to_converge": run.samples_to_target,
        "samples": run.samples,
        "seed": _plain(run.log.value("seed")),
        "status": run.status,
        "init_s": run.init_s,
        "evaluation_s": run.evaluation_s,
        "samples_per_s": run.throughput,
        "samples_per_s_without_evaluation": run.training_throughput,
        "validation": run.val_curve,
    }


def _plain(value: object) -> object:
    """A foreign value as JSON can have it."""
    return value if isinstance(value, (str, bool)) or result_log.number(value) is not None else str(value)
