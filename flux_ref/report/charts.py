"""The charts of a report: what each one shows, drawn by matplotlib in light and dark colours.

matplotlib is an extra (requirements-report.txt); only the page of a report needs it.
"""

import html
import io
import re
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from flux_ref.benchmark import convergence
from flux_ref.benchmark.convergence import Band
from flux_ref.benchmark.facts import TARGET
from flux_ref.config import ModelConfig
from flux_ref.report import result_files
from flux_ref.report.result_files import Records
from flux_ref.report.result_log import number
from flux_ref.report.score import RUNS, System

# name: (light, dark). The colours "0" to "7" tell systems apart.
COLOURS = {
    "paper": ("#ffffff", "#16181d"),
    "ink": ("#1b1f27", "#e8eaee"),
    "soft": ("#667080", "#98a1b0"),
    "grid": ("#e4e7ec", "#2b303a"),
    "band": ("#8a94a6", "#7c8698"),
    "good": ("#1a7f4b", "#46c585"),
    "bad": ("#c0362c", "#ff7b6e"),
    "0": ("#2563c9", "#6ea8ff"),
    "1": ("#d9720b", "#ffa94d"),
    "2": ("#1f8a5b", "#4ecb92"),
    "3": ("#a23bb5", "#d98bea"),
    "4": ("#c2334d", "#ff8095"),
    "5": ("#0c8599", "#4dd0e1"),
    "6": ("#7a5c1e", "#d8b45a"),
    "7": ("#5b5fc7", "#a5a8ff"),
}
SERIES = 8
STRETCHES = 150  # points of a training curve
WIDTH, CURVES, LEGEND_ROW, ROW, REST = 8.6, 4.0, 0.22, 0.4, 0.8  # inches; the last two are heights of charts by system
RC = {
    **{"font.size": 9.5, "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "report"},
    **{"lines.linewidth": 1.3, "lines.markersize": 5.0, "legend.handlelength": 1.3, "legend.columnspacing": 1.3},
}
Line = tuple[str, str, list[tuple[float, float]]]  # name, colour, (samples, value)
Palette = dict[str, str]  # the colour of each name in COLOURS


@dataclass
class Subject:
    """A system with its colour, and the records of those of its runs that are ours."""

    system: System
    colour: str
    records: dict[str, Records]  # by the path of the result file

    @property
    def name(self) -> str:
        return self.system.name

    @property
    def config(self) -> dict[str, object]:
        """The config of its first run of ours, by section.key; {} without one."""
        return next((files.config for files in self.records.values() if files.config), {})


@dataclass(frozen=True)
class Chart:
    title: str
    caption: str
    draw: Callable[[Axes, Palette], None]
    rows: int = 0  # systems that get a row each; 0: a chart of curves


def as_subject(system: System, i: int) -> Subject:
    """System number i of the report with its colour and its records."""
    paths = [run.log.path for run in system.runs]
    return Subject(system, str(i % SERIES), {str(path): result_files.records(path) for path in paths})


def of_subjects(chosen: list[Subject]) -> dict[str, Chart]:
    """The charts that have something to show, by the name of their PNG."""
    charts: dict[str, Chart | None] = {}
    batches: dict[int, list[Subject]] = {}
    for subject in chosen:
        batches.setdefault(int(number(subject.system.value("global_batch_size")) or 0), []).append(subject)
    for i, (batch, group) in enumerate(sorted(batches.items())):
        band = convergence.public_band(batch) if any(map(_is_benchmark, group)) else None
        charts[f"loss_{i}"] = losses(f"Validation loss at global batch {batch:,}", group, band)
    by_timestep = [timestep_lines(subject) for subject in chosen]
    limits = _limits([line for lines in by_timestep for line in lines])  # the same for all systems
    caption = "First run of the system; t = 0 is data, t = 1 noise."
    for i, (subject, lines) in enumerate(zip(chosen, by_timestep)):
        charts[f"timesteps_{i}"] = curves(f"Validation loss per timestep: {subject.name}", caption, lines, limits)
    lines = training_lines(chosen)
    caption = "First run of each system. Each point is the mean of several losses."
    charts["training"] = curves("Training loss", caption, lines, _limits(lines))
    caption = f"A dot for each run, hollow if it is left out or does not count. Bar: olympic mean of {RUNS} runs."
    charts["minutes"] = dots("Time to train", "minutes", caption, chosen, "minutes", "olympic_mean_minutes")
    caption = (
        "Dashed: on the left the least mean that the official check accepts, on the right the reference's mean."
        " Bar and number: the system's mean."
    )
    figures = ("samples_to_converge",) * 2
    charts["samples"] = dots("Samples to the target", "samples", caption, chosen, *figures, dashed=True)
    charts["throughput"] = throughputs(chosen)
    charts["time"] = time_split(chosen)
    return {name: chart for name, chart in charts.items() if chart is not None}


def _is_benchmark(subject: Subject) -> bool:
    """Whether a system trains the benchmark's model to its target, as far as is known."""
    is_full = subject.config.get("model.hidden", ModelConfig.hidden) == ModelConfig.hidden
    return is_full and any(run.target == TARGET for run in subject.system.runs)


def _limits(lines: list[Line], *more: float) -> tuple[float, float]:
    """The ends of an axis: all values but the highest thirtieth, which are those of the first evaluations."""
    values = sorted([*(value for _, _, points in lines for _, value in points), *more]) or [0.0]
    low, high = values[0], values[-1 - len(values) // 30]
    margin = (high - low) * 0.05 or 0.1
    return low - margin, high + margin


def curves(
    title: str,
    caption: str,
    lines: list[Line],
    y: tuple[float, float],
    more: Callable[[Axes, Palette], None] = lambda axes, colour: None,
) -> Chart | None:
    """Lines over training samples. Lines of one name have one entry in the legend. more: draws what else there is."""

    def draw(axes: Axes, colour: Palette) -> None:
        named = set()
        for name, shade, points in lines:
            # matplotlib leaves a label that begins with "_" out of the legend.
            label = None if name in named else f" {name[-60:]}"
            axes.plot(*zip(*points), color=colour[shade], label=label)
            named.add(name)
        more(axes, colour)
        axes.set_xlim(left=0)
        axes.set_ylim(*y)
        axes.set_xlabel("training samples")

    return Chart(title, caption, draw) if lines else None


def losses(title: str, group: list[Subject], band: Band | None) -> Chart | None:
    """Validation losses of every run beside the band of public runs and the target."""
    runs = [(subject, run) for subject in group for run in subject.system.runs if run.val_curve]
    lines = [(subject.name, subject.colour, run.val_curve) for subject, run in runs]
    targets = [run.target for _, run in runs if run.target > 0][:1]
    low, high = _limits(lines, *targets)
    caption = "A line for each run, a dot at its last evaluation. The dot is hollow if the run does not count."
    if band:
        low, high = min(low, *band.low), max(high, *band.high[len(band.high) // 15 :])
        caption += (
            " Grey: lowest, median and highest loss of public runs of this batch. They validated with captions dropped,"
            " which raises their losses by about 0.001."
        )

    def draw(axes: Axes, colour: Palette) -> None:
        for subject, run in runs:
            inside = colour["paper"] if run.faults else colour[subject.colour]
            axes.plot(*run.val_curve[-1], "o", color=colour[subject.colour], markerfacecolor=inside)
        for target in targets:
            axes.axhline(target, color=colour["bad"], linestyle="--", label=f"target {target:g}")
        if band:
            axes.plot(band.samples, band.median, color=colour["band"], label=band.source)
            axes.fill_between(band.samples, band.low, band.high, color=colour["band"], alpha=0.25, linewidth=0)

    return curves(title, caption, lines, (low, high), draw)


def training_lines(chosen: list[Subject]) -> list[Line]:
    """Training losses of the first run of each system, averaged over stretches."""
    lines = []
    for subject in chosen:
        run = subject.system.runs[0]
        points = [(record["samples"], record.get("loss")) for record in subject.records[str(run.log.path)].steps]
        points = sorted(point for point in points or run.train_curve if None not in map(number, point))
        size = -(-len(points) // STRETCHES) or 1
        groups = [points[i : i + size] for i in range(0, len(points), size)]
        means = [(group[-1][0], statistics.fmean(loss for _, loss in group)) for group in groups]
        lines += [(subject.name, subject.colour, means)] if len(means) > 1 else []
    return lines


def timestep_lines(subject: Subject) -> list[Line]:
    """The losses at the eight timesteps of a system's first run; [] if its records have none."""
    evaluations = [
        (record["samples"], losses)
        for record in subject.records[str(subject.system.runs[0].log.path)].evaluations
        if isinstance(losses := record.get("val_loss_per_timestep"), list) and None not in map(number, losses)
    ]
    count = len(evaluations[0][1]) if len(evaluations) > 1 else 0
    evaluations = [(samples, losses) for samples, losses in evaluations if len(losses) == count]
    return [
        (f"t = {k}/{count}", str(k % SERIES), [(samples, losses[k]) for samples, losses in evaluations])
        for k in range(count)
    ]


def rows(
    title: str,
    unit: str,
    caption: str,
    chosen: list[Subject],
    draw_row: Callable[[Axes, int, Subject, Palette], str],
) -> Chart | None:
    """A row for each system. draw_row draws at a height and returns the number to write beside the row."""

    def draw(axes: Axes, colour: Palette) -> None:
        names = [subject.name for subject in chosen]
        axes.set_yticks(range(len(names)), [name if len(name) <= 28 else f"...{name[-25:]}" for name in names])
        axes.set_ylim(len(names) - 0.5, -0.5)
        axes.set_xlabel(unit)
        axes.margins(x=0.06)
        style = {"color": colour["ink"], "fontweight": "bold", "va": "center", "transform": axes.get_yaxis_transform()}
        for y, subject in enumerate(chosen):
            axes.text(1.01, y, draw_row(axes, y, subject, colour), **style)

    return Chart(title, caption, draw, len(chosen)) if chosen else None


def dots(
    title: str, unit: str, caption: str, chosen: list[Subject], figure: str, mean: str, dashed: bool = False
) -> Chart | None:
    """A dot for each run, a bar for the mean. figure: attribute of a run; mean: attribute of a system.

    dashed: whether to draw the least mean that the official check accepts, and the reference's mean.
    """

    def draw_row(axes: Axes, y: int, subject: Subject, colour: Palette) -> str:
        check, shade = subject.system.verdicts.convergence, colour[subject.colour]
        if dashed and check and check.reference_mean is not None:
            for value in (check.least_mean, check.reference_mean):
                axes.plot([value, value], [y - 0.4, y + 0.4], color=colour["soft"], linestyle="--")
        known = [run for run in subject.system.runs if getattr(run, figure) is not None]
        known.sort(key=lambda run: getattr(run, figure))
        counted = [run for run in known if not run.faults]
        none_failed = len(counted) == len(subject.system.runs)
        kept = counted[1 : len(counted) - none_failed] if subject.system.olympic_mean_minutes else counted
        for i, run in enumerate(known):
            height = y + (i % 5 - 2) * 0.14  # so that equal runs do not hide each other
            inside = shade if run in kept else colour["paper"]
            axes.plot(getattr(run, figure), height, "o", color=shade, markerfacecolor=inside)
        middle = getattr(subject.system, mean)
        if middle is None:
            return ""
        axes.plot([middle, middle], [y - 0.36, y + 0.36], color=colour["ink"], linewidth=3)
        return f"{middle:,.2f}" if middle < 1000 else short(middle)

    known = [s for s in chosen if any(getattr(run, figure) is not None for run in s.system.runs)]
    return rows(title, unit, caption, known, draw_row)


def throughputs(chosen: list[Subject]) -> Chart | None:
    """Samples per second of each system: a bar for the whole run, a paler one without the time of evaluations."""

    def draw_row(axes: Axes, y: int, subject: Subject, colour: Palette) -> str:
        whole, trained = (subject.system.mean(name) for name in ("samples_per_s", "samples_per_s_without_evaluation"))
        axes.barh(y, trained or whole, 0.5, color=colour[subject.colour], alpha=0.4)
        axes.barh(y, whole, 0.5, color=colour[subject.colour])
        return short(whole)

    known = [subject for subject in chosen if subject.system.mean("samples_per_s")]
    caption = "Number: the whole run. Paler: without the time of evaluations."
    return rows("Throughput", "samples/s", caption, known, draw_row)


def time_split(chosen: list[Subject]) -> Chart | None:
    """Minutes of initialisation, training and evaluation, means over the runs."""

    def draw_row(axes: Axes, y: int, subject: Subject, colour: Palette) -> str:
        init, run, evaluation = (subject.system.mean(name) or 0.0 for name in ("init_s", "run_s", "evaluation_s"))
        begin = 0.0
        for seconds, opacity in ((init, 0.3), (run - evaluation, 1.0), (evaluation, 0.6)):
            axes.barh(y, seconds / 60, 0.5, begin / 60, color=colour[subject.colour], alpha=opacity)
            begin += seconds
        return f"{subject.system.mean('minutes'):,.2f}"

    known = [subject for subject in chosen if subject.system.mean("run_s")]
    unit = "minutes: pale initialisation (not timed), full training, half evaluation"
    caption = "Means over the runs. The number is the timed part: training and evaluation."
    return rows("Where the time goes", unit, caption, known, draw_row)


def short(value: float, _: object = None) -> str:
    """1,500,000 as 1.5M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _figure(chart: Chart, colour: Palette) -> Figure:
    figure = Figure((WIDTH, REST + ROW * chart.rows), layout="constrained", facecolor=colour["paper"])
    axes = figure.add_subplot(facecolor=colour["paper"])
    axes.spines[:].set_visible(False)
    axes.grid(axis="x" if chart.rows else "y", color=colour["grid"])
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelcolor=colour["soft"])
    chart.draw(axes, colour)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(short)
    axes.xaxis.label.set_color(colour["soft"])
    if chart.rows:
        axes.tick_params("y", labelcolor=colour["ink"])
        return figure
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.6g}")
    labels = axes.get_legend_handles_labels()[1]
    columns = max(1, 110 // (max(map(len, labels)) + 5))
    figure.set_figheight(CURVES + LEGEND_ROW * -(-len(labels) // columns))
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False}
    axes.legend(ncols=columns, labelcolor=colour["ink"], **place)
    return figure


def _save(chart: Chart, mode: int, title: str, to: Path | io.StringIO, **options: object) -> None:
    """mode: 0 light, 1 dark."""
    colour = {name: pair[mode] for name, pair in COLOURS.items()}
    with matplotlib.rc_context(RC), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that the font lacks
        figure = _figure(chart, colour)
        figure.suptitle(title, x=0.01, ha="left", color=colour["ink"], fontweight="bold")
        figure.savefig(to, **options)


def png(chart: Chart, mode: int, path: Path) -> None:
    """Write the chart as a PNG with its title. mode: 0 light, 1 dark."""
    _save(chart, mode, chart.title, path, format="png", dpi=200)


def svg(chart: Chart) -> str:
    """The chart as one svg element without its title. Its colours are the custom properties --c-NAME of the page."""
    file = io.StringIO()
    _save(chart, 0, "", file, format="svg", metadata={"Date": None})
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", file.getvalue(), flags=re.DOTALL)
    for name, (light, _) in COLOURS.items():
        text = text.replace(light, f"var(--c-{name})")
    start = f'<svg role="img" aria-label="{html.escape(chart.title)}" '
    return start + text[text.index("<svg ") + len("<svg ") :]
