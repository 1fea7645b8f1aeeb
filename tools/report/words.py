"""A system in words: its runs, the official checks and the result, as the terminal and the page show them."""

from flux_ref.errors import printable
from tools.report.score import System

SHOWN_FAULTS = 3  # of a run


def describe(system: System) -> str:
    """The verdict, what ran, a row for each run, their faults, the checks and the reasons."""
    keys = ("submission_org", "submission_platform", "global_batch_size", "opt_base_learning_rate")
    org, platform, batch, lr = (show(system.value(key), "") for key in keys)
    devices = f"{show(system.devices)} x {system.device}"
    lines = [
        f"{system.name}: {system.verdict}",
        f"org {org}, platform {platform}, {devices}, global batch {batch}, lr {lr}",
    ]
    rows = []
    faults = []
    for run in system.runs:
        rows.append(
            {
                "run": run.name,
                "minutes": show(run.minutes, ",.2f"),
                "samples": show(run.samples),
                "samples/s": show(run.samples_per_s, ",.1f"),
                "without evaluations": show(run.training_samples_per_s, ",.1f"),
            }
        )
        faults += [f"{run.name} failed: {fault}" for fault in run.faults[:SHOWN_FAULTS]]
        if more := len(run.faults[SHOWN_FAULTS:]):
            faults.append(f"{run.name} failed: and {more} more; --json has all")
    lines += [*table(rows), *faults]
    if check := system.convergence:
        outcome = {True: "passed", False: "failed", None: "not judged"}[check.passed]
        means = f"reference {show(check.reference_mean)} samples, accepted from {show(check.least_mean)}"
        lines.append(f"seeds: {'refused' if system.seeds else 'all different'}")
        lines.append(f"convergence: {outcome} ({check.message}), {means}, here {show(system.samples_to_converge)}")
    if system.olympic_mean_minutes:
        normalised = f"; normalised: {show(system.score_minutes, ',.2f')} minutes" if system.score_minutes else ""
        lines.append(f"olympic mean: {show(system.olympic_mean_minutes, ',.2f')} minutes{normalised}")
    return "\n".join(map(printable, [*lines, *(f"not valid: {reason}" for reason in system.reasons)]))


def show(value: object, form: str = ",.0f") -> str:
    """A figure as text; "-" for an unknown one."""
    return "-" if value is None else format(value, form)


def overview(system: System) -> dict[str, str]:
    """A row of the table of systems, by heading."""
    speed, count = system.samples_per_s, system.devices
    return {
        "system": system.name,
        "devices": show(count),
        "batch": show(system.value("global_batch_size"), ""),
        "runs": str(len(system.runs)),
        "olympic min": show(system.olympic_mean_minutes, ",.2f"),
        "score min": show(system.score_minutes, ",.2f"),
        "samples/s": show(speed),
        "per device": show(speed / count if speed and count else None, ",.1f"),
    }


def table(rows: list[dict[str, str]]) -> list[str]:
    """Lines of a table. rows: cells by heading; the first column is a name."""
    lines = [list(rows[0]), *([printable(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for name, *cells in lines]
