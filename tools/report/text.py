"""A system in words: its runs, the official checks and the result, as the terminal and the page show them."""

import textwrap

from flux_ref.formats.outside import printable
from tools.report import result_files
from tools.report.score import SHARED, System

COLUMNS = 80
SHOWN_FAULTS = 3  # of a run
WHAT = (
    "org {submission_org}, platform {submission_platform}, {devices}, global batch {global_batch_size},"
    " lr {opt_base_learning_rate}"
)
CONVERGENCE = "convergence: {} ({}), reference {} samples, accepted from {}, here {}"
SCORE = "; normalised by {}: {} minutes"
# The table of runs: attribute of a run: (heading, format).
RUN_COLUMNS = {
    "minutes": ("minutes", ",.2f"),
    "samples": ("samples", ",.0f"),
    "samples_per_s": ("samples/s", ",.1f"),
    "samples_per_s_without_evaluation": ("training", ",.1f"),
    "evaluation_s": ("eval s", ",.0f"),
}


def describe(system: System) -> str:
    """The verdict, what ran, a row for each run, their faults, the checks and the reasons."""
    count = show(result_files.accelerators(system.machine), ",")
    devices = f"{count} x {system.machine.get('accelerator_model_name', 'device')}"
    shared = {key: show(system.value(key), "") for key in SHARED}
    rows = []
    faults = []
    for run in system.runs:
        figures = {heading: show(getattr(run, name), form) for name, (heading, form) in RUN_COLUMNS.items()}
        rows.append({"run": run.name} | figures)
        faults += [f"{run.name} failed: {fault}" for fault in run.faults[:SHOWN_FAULTS]]
        if len(run.faults) > SHOWN_FAULTS:
            faults.append(f"{run.name} failed: and {len(run.faults) - SHOWN_FAULTS} more; --json has all")
    lines = [f"{system.name}: {system.verdict}", WHAT.format(**shared, devices=devices), *table(rows), *faults]
    lines += [*checks(system), *system.notes, *(f"not valid: {reason}" for reason in system.reasons)]
    return "\n".join(map(wrapped, lines))


def checks(system: System) -> list[str]:
    """The official checks and the score, in words."""
    check = system.verdicts.convergence
    lines = [f"compliance: {system.compliant_logs} of {len(system.runs)} logs"]
    if check:
        outcome = {True: "passed", False: "failed", None: "not judged"}[check.passed]
        means = (check.reference_mean, check.least_mean, system.samples_to_converge)
        lines.append(f"seeds: {'refused' if system.verdicts.seeds else 'all different'}")
        lines.append(CONVERGENCE.format(outcome, check.message, *(show(mean, ",.0f") for mean in means)))
    else:
        lines.append("open division: seeds and convergence are not checked")
    if system.olympic_mean_minutes is not None:
        scored = system.score_minutes is not None
        score = SCORE.format(show(system.factor, ".4f"), show(system.score_minutes)) if scored else ""
        lines.append(f"olympic mean: {show(system.olympic_mean_minutes)} minutes{score}")
    return lines


def show(value: object, form: str = ",.2f") -> str:
    """A figure as text; "-" for an unknown one."""
    return "-" if value is None else format(value, form)


def overview(system: System) -> dict[str, str]:
    """A row of the table of systems, by heading."""
    count = result_files.accelerators(system.machine)
    speed = system.mean("samples_per_s")
    return {
        "system": system.name,
        "devices": show(count, ","),
        "batch": show(system.value("global_batch_size"), ""),
        "runs": f"{len(system.counted)}/{len(system.runs)}",
        "olympic min": show(system.olympic_mean_minutes),
        "score min": show(system.score_minutes),
        "samples/s": show(speed, ",.0f"),
        "per device": show(speed / count if speed and count else None, ",.1f"),
    }


def table(rows: list[dict[str, str]]) -> list[str]:
    """Lines of a table. rows: cells by heading; the first column is a name, which may be shortened."""
    lines = [list(rows[0]), *([printable(cell) for cell in row.values()] for row in rows)]
    for line, name in zip(lines[1:], shortened([line[0] for line in lines[1:]])):
        line[0] = name
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in lines]


def shortened(names: list[str]) -> list[str]:
    """The last folders of each name, as few as keep different names different."""
    folders = 1
    while len({*(short := ["/".join(name.split("/")[-folders:]) for name in names])}) < len({*names}):
        folders += 1
    return short


def wrapped(text: str) -> str:
    """A text in lines of a terminal; a word, such as a path, is broken only if no line can hold it."""
    return textwrap.fill(printable(text), COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
