"""A system in words: its runs, the official checks and the result, as the terminal and the page show them."""

import textwrap

from flux_ref.formats.outside import printable
from tools.report import result_files
from tools.report.score import SHARED, System

COLUMNS = 80
SHOWN_FAULTS = 3  # of a run
# The table of runs: (heading, width, attribute of a run, format).
RUN_COLUMNS = (
    ("minutes", 9, "minutes", ",.2f"),
    ("samples", 12, "samples", ",.0f"),
    ("samples/s", 11, "samples_per_s", ",.1f"),
    ("training", 10, "samples_per_s_without_evaluation", ",.1f"),
    ("eval s", 8, "evaluation_s", ",.0f"),
    ("init s", 7, "init_s", ",.0f"),
)


def describe(system: System) -> str:
    """The verdict, what ran, a row for each run with its faults, the checks and the reasons."""
    count = result_files.accelerators(system.machine)
    model = system.machine.get("accelerator_model_name")
    parts = [f"{key.removeprefix('submission_')} {system.value(key)}" for key in SHARED[:2]]
    if count:
        parts.append(f"{count} x {model}" if model else f"{count} ranks")
    parts += [f"global batch {system.value('global_batch_size')}", f"lr {system.value('opt_base_learning_rate')}"]
    headings = "".join(f"{heading:>{width}}" for heading, width, _, _ in RUN_COLUMNS)
    lines = [
        wrapped(f"{system.name}: {system.verdict}", ""),
        wrapped(", ".join(parts)),
        f"  {'run':<21}{headings}",
    ]
    for run in system.runs:
        row = f"  {_tail(run.name, 20):<21}"
        for _, width, name, form in RUN_COLUMNS:
            row += f"{show(getattr(run, name), form):>{width}}"
        lines.append(printable(row))
        lines += [wrapped(f"  failed: {fault}") for fault in run.faults[:SHOWN_FAULTS]]
        if len(run.faults) > SHOWN_FAULTS:
            lines.append(f"    failed: and {len(run.faults) - SHOWN_FAULTS} more")
    lines += map(wrapped, [*checks(system), *system.notes])
    lines += [wrapped(f"not valid: {reason}") for reason in system.reasons]
    return "\n".join(lines)


def checks(system: System) -> list[str]:
    """The official checks and the score, in words."""
    verdicts = system.verdicts
    lines = [f"compliance: {system.compliant_logs} of {len(system.runs)} logs"]
    if check := verdicts.convergence:
        lines[0] += f"; seeds: {'refused' if verdicts.seeds else 'all different'}"
        outcome = {True: "passed", False: "failed", None: "not judged"}[check.passed]
        text = f"convergence: {outcome} ({check.message})"
        if check.reference_mean:
            text += f", reference {check.reference_mean:,.0f} samples, accepted from {check.least_mean:,.0f}"
            text += f", here {show(system.samples_to_converge, ',.0f')}"
        lines.append(text)
    else:
        lines[0] += "; open division: seeds and convergence are not checked"
    if system.olympic_mean_minutes is not None:
        lines.append(f"olympic mean: {system.olympic_mean_minutes:.2f} minutes")
        if system.score_minutes is not None:
            lines[-1] += f", normalised by {system.factor or 1:.4f}: {system.score_minutes:.2f} minutes"
    return lines


def show(value: float | None, form: str = ",.2f") -> str:
    """A figure as text; "-" for an unknown one."""
    return "-" if value is None else format(value, form)


def summary(systems: list[System]) -> str:
    """A line for each system."""
    rows = [overview(system) for system in systems]
    widths = {heading: max(8, len(heading) + 1) for heading in rows[0]}
    lines = [f"{'system':<18}" + "".join(f"{heading:>{width}}" for heading, width in widths.items())]
    for system, row in zip(systems, rows):
        cells = "".join(f"{row[heading]:>{width}}" for heading, width in widths.items())
        lines.append(printable(f"{_tail(system.name, 17):<18}{cells}"))
    return "\n".join(lines)


def overview(system: System) -> dict[str, str]:
    """A row of the table of systems, by heading."""
    count = result_files.accelerators(system.machine)
    speed = system.mean("samples_per_s")
    return {
        "devices": show(count, ","),
        "batch": str(system.value("global_batch_size")),
        "runs": f"{len(system.counted)}/{len(system.runs)}",
        "olympic min": show(system.olympic_mean_minutes),
        "score min": show(system.score_minutes),
        "samples/s": show(speed, ",.0f"),
        "per device": show(speed / count if speed and count else None, ",.1f"),
    }


def wrapped(text: str, indent: str = "  ") -> str:
    """A text in lines of a terminal; a word, such as a path, is broken only if no line can hold it."""
    return textwrap.fill(
        printable(text),
        COLUMNS,
        initial_indent=indent,
        subsequent_indent=indent + "    ",
        break_on_hyphens=False,
    )


def _tail(text: str, most: int) -> str:
    return text if len(text) <= most else "..." + text[3 - most :]
