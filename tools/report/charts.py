"""The charts of a report, drawn by matplotlib.

matplotlib is an extra (requirements-report.txt); only the page of a report needs it.
"""

import io
import warnings
from collections import defaultdict
from dataclasses import dataclass

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from flux_ref.benchmark import TARGET, convergence
from flux_ref.errors import Refusal
from flux_ref.formats import jsonl
from flux_ref.run.loss_chart import span
from flux_ref.schedule import TIMESTEPS
from tools.report.result_log import number
from tools.report.score import System

WIDTH, HEIGHT, ROW, REST = 8.6, 4.6, 0.45, 0.9  # inches; the last two are heights of charts with a row per system
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False, "axes.grid": True}
)


@dataclass(frozen=True)
class Chart:
    title: str
    caption: str
    figure: Figure


def of_systems(systems: list[System]) -> list[Chart]:
    """The charts that have something to show."""
    batches = defaultdict(list)
    for system in systems:
        if any(run.val_curve for run in system.runs):
            batches[int(number(system.value("global_batch_size")) or 0)].append(system)
    charts = [losses(batch, group) for batch, group in sorted(batches.items())]
    charts += timesteps(systems)
    charts += by_system(systems, "Time to train", "minutes", "minutes", "olympic_mean_minutes")
    return charts + by_system(systems, "Samples to the target", "samples", "samples_to_converge", "samples_to_converge")


def losses(batch: int, systems: list[System]) -> Chart:
    """Validation losses of every run of a global batch, beside the target and the band of public runs."""
    figure = _figure("training samples", HEIGHT)
    axes = figure.axes[0]
    curves = []
    target = 0.0
    for place, system in enumerate(systems):
        runs = [run for run in system.runs if run.val_curve]
        for run in runs:
            label = f" {system.name[-60:]}" if run is runs[0] else None  # one that begins with "_" would be left out
            style = "x:" if run.faults else ".-"
            axes.plot(*zip(*run.val_curve), style, color=f"C{place}", label=label)
            curves.append(run.val_curve)
            target = target or max(run.target, 0.0)
    if target:
        axes.axhline(target, color="red", linestyle="--", label=f"target {target:g}")
    caption = "A line for each run, dotted if the run does not count."
    band = convergence.public_band(batch) if target == TARGET else []
    if band:
        samples, low, median, high = zip(*band)
        axes.plot(samples, median, color="grey", label=f"public MLPerf v5.1 runs at batch {batch}")
        axes.fill_between(samples, low, high, color="grey", alpha=0.25)
        curves += [[*zip(samples, low)], [*zip(samples, high)]]
        caption += (
            " Grey: lowest, median and highest loss of public v5.1 runs of this batch. They validated with captions"
            " dropped, which raises their losses by about 0.001."
        )
    axes.set_ylim(*span(curves, target))
    axes.legend()
    return Chart(f"Validation loss at {f'global batch {batch:,}' if batch else 'no logged batch'}", caption, figure)


def timesteps(systems: list[System]) -> list[Chart]:
    """The losses at the eight timesteps of each system's first run, from the eval.jsonl beside its log."""
    charts = []
    for system in systems:
        points = []
        try:
            records = jsonl.records(system.runs[0].log.path.with_name("eval.jsonl"))
        except Refusal as refusal:
            system.notes.append(f"no chart of its timesteps: {refusal}")
            continue
        for record in records:
            values = record.get("val_loss_per_timestep")
            if isinstance(values, list) and len(values) == TIMESTEPS and all(map(jsonl.is_number, values)):
                points.append([(record["samples"], loss) for loss in values])
        if not points:
            continue
        figure = _figure("training samples", HEIGHT)
        axes = figure.axes[0]
        curves = [*zip(*points)]
        for k, curve in enumerate(curves):
            axes.plot(*zip(*curve), ".-", label=f"t = {k}/{TIMESTEPS}")
        axes.set_ylim(*span(curves))
        axes.legend(ncols=2)
        caption = "First run of the system; t = 0 is data, t = 1 is noise."
        charts.append(Chart(f"Validation loss per timestep: {system.name}", caption, figure))
    return charts


def by_system(systems: list[System], title: str, unit: str, figure: str, mean: str) -> list[Chart]:
    """A chart with a row for each system that has the figure. figure, mean: attributes of a run and of a system."""
    known = [system for system in systems if any(getattr(run, figure) is not None for run in system.runs)]
    if not known:
        return []
    drawing = _figure(unit, REST + ROW * len(known))
    axes = drawing.axes[0]
    for y, system in enumerate(known):
        for run in system.runs:
            axes.plot([getattr(run, figure)], [y], "x" if run.faults else "o", color=f"C{y}")
        axes.plot([getattr(system, mean)], [y], "|", color="black", markersize=25)
    axes.set_yticks(range(len(known)), [system.name[-28:] for system in known])
    axes.set_ylim(len(known) - 0.5, -0.5)
    return [Chart(title, "A dot for each run, a cross if it does not count. Bar: the mean.", drawing)]


def _figure(unit: str, height: float) -> Figure:
    """A figure with one pair of axes. unit: of the horizontal axis."""
    figure = Figure((WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(unit)
    if unit != "minutes":
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


def svg(chart: Chart) -> str:
    """The chart as one svg element without its title."""
    file = io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that the font lacks
        chart.figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()
    return text[text.index("<svg ") :]
