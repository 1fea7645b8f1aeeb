"""Systems in words: their runs, the official checks and the results, as the terminal and the page show them."""

from typing import Any

from flux_ref.cli import printable
from tools.report.score import System, text

SHOWN_FAULTS = 3  # of a run
RUN = ("run", "minutes", "samples", "samples/s")
SYSTEM = ("system", "batch", "runs", "olympic min", "score min", "samples/s")


def describe(systems: list[System]) -> str:
    """Each system, and a table of all if there are several."""
    parts = [lines(system) for system in systems]
    if len(systems) > 1:
        parts.append(table(SYSTEM, [overview(system) for system in systems]))
    return "\n\n".join("\n".join(map(printable, part)) for part in parts)


def lines(system: System) -> list[str]:
    """The verdict, what ran, a row for each run, their faults, the checks and the reasons."""
    keys = ("submission_org", "submission_platform", "global_batch_size", "opt_base_learning_rate")
    org, platform, batch, lr = (text(system.value(key), "") for key in keys)
    told = [
        f"{system.name}: {system.verdict}",
        f"org {org}, platform {platform}, global batch {batch}, lr {lr}",
    ]
    rows = [(run.name, text(run.minutes, ",.2f"), text(run.samples), text(run.samples_per_s)) for run in system.runs]
    told += table(RUN, rows)
    for run in system.runs:
        told += [f"{run.name} failed: {fault}" for fault in run.faults[:SHOWN_FAULTS]]

    check = system.convergence
    if check:
        outcome = {True: "passed", False: "failed", None: "not judged"}[check.passed]
        means = f"reference {text(check.reference_mean)} samples, accepted from {text(check.least_mean)}"
        told.append(f"convergence: {outcome} ({check.message}), {means}, here {text(system.samples_to_converge)}")

    if system.olympic_mean_minutes > 0:
        score = text(system.score_minutes, ",.2f")
        told.append(f"olympic mean: {system.olympic_mean_minutes:,.2f} minutes; normalised: {score}")
    return told + [f"not valid: {reason}" for reason in system.reasons]


def overview(system: System) -> tuple[str, ...]:
    """A row of the table of systems."""
    return (
        system.name,
        text(system.value("global_batch_size"), ""),
        str(len(system.runs)),
        text(system.olympic_mean_minutes, ",.2f"),
        text(system.score_minutes, ",.2f"),
        text(system.samples_per_s),
    )


def table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    """Lines of a table. The first column is a name."""
    widths = [max(map(len, column)) for column in zip(head, *rows)]
    return ["  ".join([name.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for name, *rest in (head, *rows)]
