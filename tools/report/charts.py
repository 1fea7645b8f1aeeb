"""The charts of a report: what each one shows, drawn by matplotlib.

matplotlib is an extra (requirements-report.txt); only the page of a report needs it.
"""

import html
import io
import re
import warnings
from collections.abc import Callable, Sequence
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
STEPS = (1, 2, 2.5, 5, 10)  # between ticks, times a power of ten
RC = {
    "font.size": 9.5,
    "text.parse_math": False,
    "text.color": LIGHT["ink"],
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "lines.linewidth": 1.3,
    "lines.markersize": 5.0,
    "legend.handlelength": 1.3,
    "legend.columnspacing": 1.3,
    "figure.facecolor": LIGHT["paper"],
    "axes.facecolor": LIGHT["paper"],
    "axes.edgecolor": LIGHT["paper"],
    "axes.labelcolor": LIGHT["soft"],
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "xtick.major.size": 0,
    "xtick.labelcolor": LIGHT["soft"],
    "ytick.major.size": 0,
    "ytick.labelcolor": LIGHT["ink"],
}


@dataclass(frozen=True)
class Chart:
    title: str
    caption: str
    unit: str  # of the horizontal axis
    draw: Callable[[Axes], None]
    rows: Sequence[System] = ()  # systems that get a row each; none: a chart of curves


def of_systems(systems: list[System]) -> list[Chart]:
    """The charts that have something to show."""
    batches: dict[int, list[System]] = {}
    for system in systems:
        batches.setdefault(int(number(system.value("global_batch_size")) or 0), []).append(system)
    charts = []
    for batch, group in sorted(batches.items()):
        if any(run.val_curve for system in group for run in system.runs):
            charts.append(losses(batch, group))
    charts += timesteps(systems)
    for chart in (times(systems), samples(systems)):
        if chart.rows:
            charts.append(chart)
    return charts


def colour(system: System) -> str:
    """The name of a system's colour."""
    return str(system.place % 8)


def losses(batch: int, group: list[System]) -> Chart:
    """Validation losses of every run of a global batch, beside the target and the band of public runs."""
    runs = [(system, run) for system in group for run in system.runs if run.val_curve]
    target = next((run.target for _, run in runs if run.target > 0), 0.0)
    band = convergence.public_band(batch) if target == TARGET else None
    low, high = span([run.val_curve for _, run in runs], target)
    caption = "A line for each run, a dot at its last evaluation. The dot is hollow if the run does not count."
    if band:
        low = min(low, *band.low)
        high = max(high, *band.high[len(band.high) // 15 :])
        caption += (
            " Grey: lowest, median and highest loss of public v5.1 runs of this batch. They validated with captions"
            " dropped, which raises their losses by about 0.001. Thin: public v6.0 runs, one of each system."
        )

    def draw(axes: Axes) -> None:
        grey = LIGHT["band"]
        named = set()
        for system, run in runs:
            # A label that begins with "_" is not shown.
            label = None if system in named else f" {system.name[-60:]}"
            named.add(system)
            axes.plot(*zip(*run.val_curve), color=LIGHT[colour(system)], label=label)
            draw_dot(axes, system, *run.val_curve[-1], is_full=not run.faults)
        if target:
            axes.axhline(target, color=LIGHT["bad"], linestyle="--", label=f"target {target:g}")
        if band:
            axes.plot(band.samples, band.median, color=grey, label=band.source)
            axes.fill_between(band.samples, band.low, band.high, color=grey, alpha=0.25, linewidth=0)
            for i, curve in enumerate(public_systems.curves(batch)):
                axes.plot(*zip(*curve), color=grey, linewidth=0.7, label=None if i else "public v6.0 runs")
        axes.set_xlim(left=0)
        axes.set_ylim(low, high)

    return Chart(f"Validation loss at global batch {batch:,}", caption, "training samples", draw)


def timesteps(systems: list[System]) -> list[Chart]:
    """The losses at the eight timesteps of each system's first run, from the eval.jsonl beside its log; equal axes."""
    found: dict[str, list[list[tuple[float, float]]]] = {}
    for system in systems:
        points = []
        for record in jsonl.records(system.runs[0].log.path.with_name("eval.jsonl")):
            losses = record.get("val_loss_per_timestep")
            if isinstance(losses, list) and len(losses) == TIMESTEPS and all(map(jsonl.is_number, losses)):
                points.append([(record["samples"], loss) for loss in losses])
        if points:
            found[system.name] = [*zip(*points)]
    every = [curve for curves in found.values() for curve in curves]

    def draw(axes: Axes, curves: list[list[tuple[float, float]]]) -> None:
        for k, curve in enumerate(curves):
            axes.plot(*zip(*curve), ".-", color=LIGHT[str(k)], label=f"t = {k}/{TIMESTEPS}")
        axes.set_xlim(0, max(samples for curve in every for samples, _ in curve) or 1)
        axes.set_ylim(*span(every))

    caption = "First run of the system; t = 0 is data, t = 1 is noise."
    return [
        Chart(f"Validation loss per timestep: {name}", caption, "training samples", partial(draw, curves=curves))
        for name, curves in found.items()
    ]


def times(systems: list[System]) -> Chart:
    """Minutes of each run, and the olympic mean."""
    known = [system for system in systems if any(run.minutes is not None for run in system.runs)]

    def draw(axes: Axes) -> None:
        for y, system in enumerate(known):
            draw_row(axes, y, system, "minutes", system.olympic_mean_minutes)

    caption = f"A dot for each run, hollow if it is left out or does not count. Bar: olympic mean of {RUNS} runs."
    return Chart("Time to train", caption, "minutes", draw, known)


def samples(systems: list[System]) -> Chart:
    """Samples of each run to the target, their mean, and the means of the official convergence check."""
    known = [system for system in systems if any(run.samples_to_converge is not None for run in system.runs)]

    def draw(axes: Axes) -> None:
        for y, system in enumerate(known):
            check = system.verdicts.convergence
            if check and check.reference_mean is not None:
                for value in (check.least_mean, check.reference_mean):
                    axes.plot([value, value], [y - 0.4, y + 0.4], color=LIGHT["soft"], linestyle="--")
            draw_row(axes, y, system, "samples_to_converge", system.samples_to_converge)

    caption = (
        "Dashed: on the left the least mean that the official check accepts, on the right the reference's mean."
        " Bar and number: the system's mean."
    )
    return Chart("Samples to the target", caption, "samples", draw, known)


def draw_row(axes: Axes, y: int, system: System, figure: str, mean: float | None) -> None:
    """A dot for each run that has a figure, a bar at the mean. figure: attribute of a run."""
    known = [run for run in system.runs if getattr(run, figure) is not None]
    known.sort(key=lambda run: getattr(run, figure))
    kept = [run for run in known if not run.faults]
    if system.olympic_mean_minutes:  # a failed run is the worst, so that no other run is left out as the worst
        kept = kept[1:-1] if len(kept) == len(system.runs) else kept[1:]
    for i, run in enumerate(known):
        height = y + (i % 5 - 2) * 0.14  # so that equal runs do not hide each other
        draw_dot(axes, system, getattr(run, figure), height, is_full=run in kept)
    if mean is not None:
        axes.plot([mean, mean], [y - 0.36, y + 0.36], color=LIGHT["ink"], linewidth=3)
        text = f"{mean:,.2f}" if mean < 1000 else short(mean)
        axes.text(1.01, y, text, fontweight="bold", va="center", transform=axes.get_yaxis_transform())


def draw_dot(axes: Axes, system: System, x: float, y: float, is_full: bool) -> None:
    shade = LIGHT[colour(system)]
    axes.plot(x, y, "o", color=shade, markerfacecolor=shade if is_full else LIGHT["paper"])


def short(value: float, _: object = None) -> str:
    """1,500,000 as 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _figure(chart: Chart) -> Figure:
    rows = len(chart.rows)
    figure = Figure((WIDTH, REST + ROW * rows), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(axis="x" if rows else "y")
    chart.draw(axes)
    axes.set_xlabel(chart.unit)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=STEPS))
    axes.xaxis.set_major_formatter(short)
    if rows:
        names = [system.name for system in chart.rows]
        axes.set_yticks(range(rows), [name if len(name) <= 28 else f"...{name[-25:]}" for name in names])
        axes.set_ylim(rows - 0.5, -0.5)
        axes.margins(x=0.06)
        return figure
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=STEPS))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.6g}")
    labels = axes.get_legend_handles_labels()[1]
    columns = max(1, 110 // (max(map(len, labels)) + 5))
    figure.set_figheight(CURVES + LEGEND_ROW * -(-len(labels) // columns))
    axes.legend(ncols=columns, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
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
