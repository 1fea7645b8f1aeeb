"""The charts of a report: what each one shows, drawn by matplotlib.

matplotlib is an extra (requirements-report.txt); only the page of a report needs it.
"""

import html
import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flux_ref.benchmark import convergence
from flux_ref.benchmark.facts import TARGET
from flux_ref.formats import jsonl
from flux_ref.run.loss_chart import span
from flux_ref.schedule import TIMESTEPS
from tools.report.result_log import number
from tools.report.score import RUNS, System
from tools.shared import public_systems

# name: (light, dark). The colours "0" to "7" tell systems and timesteps apart.
COLOURS = {
    "paper": ("#ffffff", "#16181d"),
    "ink": ("#1b1f27", "#e8eaee"),
    "soft": ("#667080", "#98a1b0"),
    "grid": ("#e4e7ec", "#2b303a"),
    "band": ("#8a94a6", "#7c8698"),
    "good": ("#1a7f4b", "#46c585"),
    "bad": ("#c0362c", "#ff7b6e"),
    "0": ("#1f5fd0", "#5b95ff"),
    "1": ("#e07b00", "#ffa640"),
    "2": ("#17824f", "#3fbf7f"),
    "3": ("#8a2fc0", "#b57bff"),
    "4": ("#c4203f", "#ff6470"),
    "5": ("#10a3b8", "#4fdcea"),
    "6": ("#6b4a1b", "#b89a6a"),
    "7": ("#e56ba8", "#ff9fd2"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
WIDTH, CURVES, LEGEND_ROW, ROW, REST = 8.6, 4.0, 0.22, 0.4, 0.8  # inches; the last two are heights of charts by system
RC = {
    **{"font.size": 9.5, "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "report"},
    **{"lines.linewidth": 1.3, "lines.markersize": 5.0, "legend.handlelength": 1.3, "legend.columnspacing": 1.3},
}


@dataclass(frozen=True)
class Chart:
    title: str
    caption: str
    draw: Callable[[Axes], None]
    rows: int = 0  # systems that get a row each; 0: a chart of curves


def of_systems(systems: list[System]) -> list[Chart]:
    """The charts that have something to show."""
    batches: dict[int, list[System]] = {}
    for system in systems:
        batches.setdefault(int(number(system.value("global_batch_size")) or 0), []).append(system)
    charts = [losses(batch, group) for batch, group in sorted(batches.items())]
    charts += [*timesteps(systems), times(systems), samples(systems)]
    return [chart for chart in charts if chart]


def colour(system: System) -> str:
    """The name of a system's colour."""
    return str(system.place % 8)


def losses(batch: int, group: list[System]) -> Chart | None:
    """Validation losses of every run of a global batch, beside the target and the band of public runs."""
    runs = [run for system in group for run in system.runs if run.val_curve]
    if not runs:
        return None
    target = next((run.target for run in runs if run.target > 0), None)
    band = convergence.public_band(batch) if target == TARGET else None
    low, high = span([run.val_curve for run in runs], target or 0.0)
    caption = "A line for each run, a dot at its last evaluation. The dot is hollow if the run does not count."
    if band:
        low = min(low, *band.low)
        high = max(high, *band.high[len(band.high) // 15 :])
        caption += (
            " Grey: lowest, median and highest loss of public v5.1 runs of this batch. They validated with captions"
            " dropped, which raises their losses by about 0.001. Thin: public v6.0 runs, one of each system."
        )

    def draw(axes: Axes) -> None:
        for system in group:
            shade, label = LIGHT[colour(system)], f" {system.name[-60:]}"  # a label that begins with "_" is not shown
            for run in system.runs:
                if run.val_curve:
                    axes.plot(*zip(*run.val_curve), color=shade, label=label)
                    inside = LIGHT["paper"] if run.faults else shade
                    axes.plot(*run.val_curve[-1], "o", color=shade, markerfacecolor=inside)
                    label = None
        if target:
            axes.axhline(target, color=LIGHT["bad"], linestyle="--", label=f"target {target:g}")
        if band:
            axes.plot(band.samples, band.median, color=LIGHT["band"], label=band.source)
            axes.fill_between(band.samples, band.low, band.high, color=LIGHT["band"], alpha=0.25, linewidth=0)
            for i, curve in enumerate(public_systems.curves(batch)):
                axes.plot(*zip(*curve), color=LIGHT["band"], linewidth=0.7, label=None if i else "public v6.0 runs")
        axes.set_xlim(left=0)
        axes.set_ylim(low, high)
        axes.set_xlabel("training samples")

    return Chart(f"Validation loss at global batch {batch:,}", caption, draw)


def timesteps(systems: list[System]) -> list[Chart]:
    """The losses at the eight timesteps of each system's first run, from the eval.jsonl beside its log; equal axes."""
    curves: dict[System, list[list[tuple[float, float]]]] = {}
    for system in systems:
        points = []
        for record in jsonl.records(system.runs[0].log.path.with_name("eval.jsonl")):
            losses = record.get("val_loss_per_timestep")
            if isinstance(losses, list) and len(losses) == TIMESTEPS and all(map(jsonl.is_number, losses)):
                points.append([(record["samples"], loss) for loss in losses])
        if points:
            curves[system] = [*zip(*points)]
    every = [curve for group in curves.values() for curve in group]

    def draw(axes: Axes, group: list[list[tuple[float, float]]]) -> None:
        for k, curve in enumerate(group):
            axes.plot(*zip(*curve), ".-", color=LIGHT[str(k)], label=f"t = {k}/{TIMESTEPS}")
        axes.set_xlim(0, max(samples for curve in every for samples, _ in curve) or 1)
        axes.set_ylim(*span(every))
        axes.set_xlabel("training samples")

    title, caption = "Validation loss per timestep", "First run of the system; t = 0 is data, t = 1 is noise."
    return [Chart(f"{title}: {system.name}", caption, partial(draw, group=group)) for system, group in curves.items()]


def rows(
    title: str, unit: str, caption: str, systems: list[System], draw_row: Callable[[Axes, int, System], str]
) -> Chart | None:
    """A row for each system. draw_row draws at a height and returns the number to write beside the row."""

    def draw(axes: Axes) -> None:
        names = [system.name for system in systems]
        axes.set_yticks(range(len(names)), [name if len(name) <= 28 else f"...{name[-25:]}" for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel(unit)
        axes.margins(x=0.06)
        style = {"color": LIGHT["ink"], "fontweight": "bold", "va": "center", "transform": axes.get_yaxis_transform()}
        for y, system in enumerate(systems):
            axes.text(1.01, y, draw_row(axes, y, system), **style)

    return Chart(title, caption, draw, len(systems)) if systems else None


def times(systems: list[System]) -> Chart | None:
    """Minutes of each run, and the olympic mean."""

    def draw_row(axes: Axes, y: int, system: System) -> str:
        draw_dots(axes, y, system, "minutes")
        return draw_mean(axes, y, system.olympic_mean_minutes)

    caption = f"A dot for each run, hollow if it is left out or does not count. Bar: olympic mean of {RUNS} runs."
    known = [system for system in systems if any(run.minutes is not None for run in system.runs)]
    return rows("Time to train", "minutes", caption, known, draw_row)


def samples(systems: list[System]) -> Chart | None:
    """Samples of each run to the target, their mean, and the means of the official convergence check."""

    def draw_row(axes: Axes, y: int, system: System) -> str:
        check = system.verdicts.convergence
        if check and check.reference_mean is not None:
            for value in (check.least_mean, check.reference_mean):
                axes.plot([value, value], [y - 0.4, y + 0.4], color=LIGHT["soft"], linestyle="--")
        draw_dots(axes, y, system, "samples_to_converge")
        return draw_mean(axes, y, system.samples_to_converge)

    caption = (
        "Dashed: on the left the least mean that the official check accepts, on the right the reference's mean."
        " Bar and number: the system's mean."
    )
    known = [system for system in systems if any(run.samples_to_converge is not None for run in system.runs)]
    return rows("Samples to the target", "samples", caption, known, draw_row)


def draw_dots(axes: Axes, y: int, system: System, figure: str) -> None:
    """A dot for each run that has a figure. figure: attribute of a run."""
    known = [run for run in system.runs if getattr(run, figure) is not None]
    known.sort(key=lambda run: getattr(run, figure))
    kept = [run for run in known if not run.faults]
    if system.olympic_mean_minutes:  # a failed run is the worst, so that no other run is left out as the worst
        kept = kept[1:-1] if len(kept) == len(system.runs) else kept[1:]
    shade = LIGHT[colour(system)]
    for i, run in enumerate(known):
        height = y + (i % 5 - 2) * 0.14  # so that equal runs do not hide each other
        inside = shade if run in kept else LIGHT["paper"]
        axes.plot(getattr(run, figure), height, "o", color=shade, markerfacecolor=inside)


def draw_mean(axes: Axes, y: int, mean: float | None) -> str:
    """A bar at the mean; returns the mean as text."""
    if mean is None:
        return ""
    axes.plot([mean, mean], [y - 0.36, y + 0.36], color=LIGHT["ink"], linewidth=3)
    return f"{mean:,.2f}" if mean < 1000 else short(mean)


def short(value: float, _: object = None) -> str:
    """1,500,000 as 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _figure(chart: Chart) -> Figure:
    figure = Figure((WIDTH, REST + ROW * chart.rows), layout="constrained", facecolor=LIGHT["paper"])
    axes = figure.add_subplot(facecolor=LIGHT["paper"])
    axes.spines[:].set_visible(False)
    axes.grid(axis="x" if chart.rows else "y", color=LIGHT["grid"])
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=LIGHT["soft"])
    chart.draw(axes)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(short)
    axes.xaxis.label.set_color(LIGHT["soft"])
    if chart.rows:
        axes.tick_params("y", labelcolor=LIGHT["ink"])
        return figure
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.6g}")
    labels = axes.get_legend_handles_labels()[1]
    columns = max(1, 110 // (max(map(len, labels)) + 5))
    figure.set_figheight(CURVES + LEGEND_ROW * -(-len(labels) // columns))
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False}
    axes.legend(ncols=columns, labelcolor=LIGHT["ink"], **place)
    return figure


def svg(chart: Chart) -> str:
    """The chart as one svg element without its title. Its colours are the custom properties --c-NAME of the page."""
    file = io.StringIO()
    with matplotlib.rc_context(RC), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that the font lacks
        _figure(chart).savefig(file, format="svg", metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", file.getvalue(), flags=re.DOTALL)
    for name, light in LIGHT.items():
        text = text.replace(light, f"var(--c-{name})")
    start = f'<svg role="img" aria-label="{html.escape(chart.title)}" '
    return start + text[text.index("<svg ") + len("<svg ") :]
