"""The charts of a report: what they show of systems, as drawings."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from flux_ref.benchmark.convergence import Band
from flux_ref.report.axes import WIDTH, Curve, Entry, Frame, Rows, flattened, short
from flux_ref.report.drawing import SERIES, Drawing
from flux_ref.report.result_files import Records
from flux_ref.report.result_log import number
from flux_ref.report.score import RUNS, Run, System

STRETCHES = 150  # of a training curve


@dataclass
class Subject:
    """A system with its colour, and the records of those of its runs that are ours."""

    system: System
    colour: str
    records: dict[str, Records]  # by the path of the result file

    @property
    def name(self) -> str:
        return self.system.name


def subjects(systems: list[System], records: list[dict[str, Records]]) -> list[Subject]:
    return [Subject(system, str(i % SERIES), own) for i, (system, own) in enumerate(zip(systems, records))]


def _names(chosen: list[Subject]) -> list[Entry]:
    return [Entry(subject.name[-60:], subject.colour) for subject in chosen]


def losses(title: str, chosen: list[Subject], band: Band | None) -> Drawing | None:
    """Validation losses of every run over the band of public ones, and the target; the first evaluations may be cut."""
    runs = [(subject, run) for subject in chosen for run in subject.system.runs if run.val_curve]
    if not runs:
        return None
    values = sorted(loss for _, run in runs for _, loss in run.val_curve)
    target = next((run.target for _, run in runs if run.target > 0), math.nan)
    low = min(values[0], target) if target > 0 else values[0]
    high = values[-1 - len(values) // 30]
    if band:
        values = band.high[len(band.high) // 15 :]
        low, high = min(low, *band.low), max(high, *values)
    margin = (high - low) * 0.05 or 0.1
    most = max(run.val_curve[-1][0] for _, run in runs)
    most = max(most, band.samples[-1]) if band else most
    legend = _names([subject for subject in chosen if any(subject is other for other, _ in runs)])
    legend += [Entry(f"target {target:g}", "bad", True)] if target > 0 else []
    legend += [Entry(band.source, "band")] if band else []
    frame = Frame(title, (0, most), (low - margin, high + margin), legend)
    frame.drawing.caption = "A line per run, a dot at its last evaluation, hollow if the run does not count."
    if band:
        frame.drawing.caption += (
            " Grey: lowest, median and highest loss of public runs of this batch. They validated with captions dropped,"
            " which lifts their losses a little."
        )
        top = frame.y[1]
        edge = [*flattened(band.samples, band.high, top), *reversed(flattened(band.samples, band.low, top))]
        frame.drawing.area([frame.at(*point) for point in edge], "band", 0.25, band.source)
        frame.curve(list(zip(band.samples, band.median)), "band", 1.5)
    if target > 0:
        frame.curve([(0, target), (most, target)], "bad", 1.5, dashed=True)
    for subject, run in runs:
        frame.curve(run.val_curve, subject.colour, 1.3)
        x, y = run.val_curve[-1]
        if y <= frame.y[1]:
            tip = f"{subject.name}, {run.name}: {y:.5f} at {x:,.0f} samples"
            frame.drawing.dot(*frame.at(x, y), subject.colour, 3, bool(run.faults), tip)
    return frame.drawing


def training(chosen: list[Subject]) -> Drawing | None:
    """Training losses of the first run of each system, each point the mean of a stretch."""
    curves = []
    for subject in chosen:
        run = subject.system.runs[0]
        points = [(record.get("samples"), record.get("loss")) for record in subject.records[str(run.log.path)].steps]
        points = sorted(point for point in points or run.train_curve if None not in map(number, point))
        size = -(-len(points) // STRETCHES)
        groups = [points[i : i + size] for i in range(0, len(points), size or 1)]
        curves.append((subject, [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]))
    curves = [(subject, curve) for subject, curve in curves if len(curve) > 1]
    if not curves:
        return None
    values = sorted(y for _, curve in curves for _, y in curve)
    low, high = values[0], values[-1 - len(values) // 30]
    margin = (high - low) * 0.05 or 0.1
    most = max(curve[-1][0] for _, curve in curves)
    frame = Frame("Training loss", (0, most), (low - margin, high + margin), _names([s for s, _ in curves]))
    frame.drawing.caption = "First run of each system; each point is the mean of a stretch."
    for subject, curve in curves:
        frame.curve(curve, subject.colour, 1.3)
    return frame.drawing


def timestep_curves(evaluations: list[dict]) -> list[Curve]:
    """Losses at each timestep over samples, from the records of our runs; [] if they tell none."""
    curves: list[Curve] = []
    for record in evaluations:
        samples, values = record.get("samples"), record.get("val_loss_per_timestep")
        if not isinstance(values, list) or None in map(number, (samples, *values)):
            continue
        curves = curves or [[] for _ in values]
        for curve, value in zip(curves, values):
            curve.append((samples, value))
    return [curve for curve in curves if len(curve) > 1]


def timesteps(subject: Subject, run: Run) -> Drawing | None:
    """The losses at the eight timesteps of one of our runs."""
    curves = timestep_curves(subject.records[str(run.log.path)].evaluations)
    if not curves:
        return None
    values = sorted(value for curve in curves for _, value in curve)
    low, high = values[0], values[-1 - len(values) // 30]
    margin = (high - low) * 0.05 or 0.1
    most = max(curve[-1][0] for curve in curves)
    legend = [Entry(f"t = {k}/{len(curves)}", str(k % SERIES)) for k in range(len(curves))]
    frame = Frame(f"Validation loss per timestep: {subject.name}", (0, most), (low - margin, high + margin), legend)
    frame.drawing.caption = "First run of the system; t = 0 is data, t = 1 noise."
    for k, curve in enumerate(curves):
        frame.curve(curve, str(k % SERIES), 1.5)
    return frame.drawing


def speeds(chosen: list[Subject]) -> Drawing | None:
    """Training speed between evaluations, as a share of the mean of its run."""
    runs = [(subject, run) for subject in chosen for run in subject.system.runs if len(run.speeds) > 1]
    runs = [(subject, run) for subject, run in runs if run.training_throughput]
    if not runs:
        return None
    curves = [
        (subject, [(x, 100 * speed / run.training_throughput) for x, speed in run.speeds]) for subject, run in runs
    ]
    values = [value for _, curve in curves for _, value in curve]
    span = max(2.0, max(abs(value - 100) for value in values) * 1.1)
    most = max(curve[-1][0] for _, curve in curves)
    legend = _names([subject for subject in chosen if any(subject is other for other, _ in curves)])
    frame = Frame("Training speed during the run, % of its mean", (0, most), (max(0, 100 - span), 100 + span), legend)
    frame.drawing.caption = "From one evaluation to the next; evaluations left out."
    for subject, curve in curves:
        frame.curve(curve, subject.colour, 1)
    return frame.drawing


def minutes(chosen: list[Subject]) -> Drawing | None:
    """How long each run took."""
    caption = f"A dot per run, hollow if it is dropped or does not count. Bar: olympic mean of {RUNS} runs."
    return strip(
        *("Time to train", "minutes", caption, chosen),
        *(lambda run: run.minutes, lambda system: system.olympic_mean_minutes, lambda system: []),
    )


def samples(chosen: list[Subject]) -> Drawing | None:
    """When each run reached the target, and what the official check holds it against."""

    def marks(system: System) -> list[tuple[float, str]]:
        known = system.verdicts.convergence
        if known is None or known.reference_mean is None:
            return []
        least, mean = known.least_mean, known.reference_mean
        return [(least, f"accepted from {least:,.0f}"), (mean, f"the reference's mean, {mean:,.0f}")]

    caption = (
        "Dashed: the least mean that the official check accepts, and to its right the reference's mean."
        " Bar and number: the system's mean."
    )
    return strip(
        *("Samples to the target", "samples", caption, chosen),
        *(lambda run: run.samples_to_target, lambda system: system.samples_to_converge, marks),
    )


def strip(
    title: str,
    unit: str,
    caption: str,
    chosen: list[Subject],
    figure: Callable[[Run], float | None],
    mean: Callable[[System], float | None],
    marks: Callable[[System], list[tuple[float, str]]],
) -> Drawing | None:
    """A dot per run, hollow if it does not count or is dropped; a bar for the mean; marks: (value, tip) of lines."""
    known = [s for s in chosen if any(figure(run) is not None for run in s.system.runs)]
    if not known:
        return None
    values = [figure(run) for s in known for run in s.system.runs if figure(run) is not None]
    values += [value for s in known for value, _ in marks(s.system)]
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or high * 0.05 or 1
    rows = Rows(title, [s.name for s in known], max(0, low - margin), high + margin, unit)
    rows.drawing.caption = caption
    for i, subject in enumerate(known):
        y = rows.y(i)
        for value, tip in marks(subject.system):
            rows.drawing.line([(rows.x(value), y - 13), (rows.x(value), y + 13)], "soft", 1.5, dashed=True)
            rows.drawing.dot(rows.x(value), y - 13, "soft", 2, tip=tip)
        own = [run for run in subject.system.runs if figure(run) is not None]
        counted = sorted((run for run in own if not run.faults), key=figure)
        whole = len(counted) == len(subject.system.runs)
        kept = counted[1 : len(counted) - whole] if subject.system.olympic_mean_minutes else counted
        placed: list[float] = []
        for run in own:
            x = rows.x(figure(run))
            near = sum(abs(x - other) < 6 for other in placed)  # dots side by side, not over each other
            placed.append(x)
            tip = f"{subject.name}, {run.name}: {figure(run):{',.0f' if figure(run) > 1000 else ',.2f'}} {unit}"
            spot = y + (-1) ** near * ((near + 1) // 2) * 3
            rows.drawing.dot(x, spot, subject.colour, 4, run not in kept, tip)
        if (middle := mean(subject.system)) is not None:
            rows.drawing.line([(rows.x(middle), y - 11), (rows.x(middle), y + 11)], "ink", 3)
            rows.drawing.text(WIDTH - 62, y, f"{middle:,.2f}" if middle < 1000 else short(middle), "ink", bold=True)
    return rows.drawing


def throughputs(chosen: list[Subject]) -> Drawing | None:
    """Samples per second of each system: the whole run as a bar, evaluations left out in a lighter one behind it."""
    known = [s for s in chosen if s.system.mean("throughput")]
    if not known:
        return None
    pairs = [(s.system.mean("throughput"), s.system.mean("training_throughput")) for s in known]
    rows = Rows(
        "Throughput",
        [s.name for s in known],
        0,
        max(max(a, b or 0) for a, b in pairs),
        "samples/s; lighter: evaluations left out",
    )
    for i, (subject, (whole, training)) in enumerate(zip(known, pairs)):
        y = rows.y(i) - 9
        if training:
            tip = f"{training:,.1f} samples/s without evaluations"
            rows.drawing.box(rows.x(0), y, rows.x(training) - rows.x(0), 18, subject.colour, tip, 0.4)
        rows.drawing.box(rows.x(0), y, rows.x(whole) - rows.x(0), 18, subject.colour, f"{whole:,.1f} samples/s")
        rows.drawing.text(rows.x(max(whole, training or 0)) + 6, y + 9, short(whole), "ink", bold=True)
    return rows.drawing


def time_split(chosen: list[Subject]) -> Drawing | None:
    """Minutes of initialisation, training and evaluation, means over the runs."""
    known = [s for s in chosen if s.system.mean("run_s")]
    if not known:
        return None

    def parts(system: System) -> list[tuple[str, float, float]]:
        init, run, evaluation = (system.mean(name) or 0.0 for name in ("init_s", "run_s", "evaluation_s"))
        return [("initialisation", init, 0.3), ("training", run - evaluation, 1.0), ("evaluation", evaluation, 0.6)]

    most = max(sum(seconds for _, seconds, _ in parts(s.system)) for s in known) / 60
    unit = "minutes: pale initialisation (not timed), full training, half evaluation"
    rows = Rows("Where the time goes", [s.name for s in known], 0, most, unit)
    rows.drawing.caption = "Means over the runs; the number is the timed part, training and evaluation."
    for i, subject in enumerate(known):
        begin = 0.0
        for name, seconds, opacity in parts(subject.system):
            x, width = rows.x(begin / 60), seconds / 60 / most * (rows.x(most) - rows.x(0))
            tip = f"{name}: {seconds / 60:.2f} minutes"
            rows.drawing.box(x, rows.y(i) - 9, max(0, width - 1), 18, subject.colour, tip, opacity)
            begin += seconds
        rows.drawing.text(rows.x(begin / 60) + 6, rows.y(i), f"{subject.system.mean('minutes'):,.2f}", "ink", bold=True)
    return rows.drawing
