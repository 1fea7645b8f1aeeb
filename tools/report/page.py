"""The report as one HTML page with matplotlib's charts: it has no script, loads nothing, and all text is escaped.

matplotlib is an extra (requirements-report.txt).
"""

import html
import io
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from flux_ref.benchmark import convergence
from flux_ref.benchmark.facts import TARGET
from flux_ref.formats.outside import printable
from flux_ref.run.loss_chart import span
from tools.report import words
from tools.report.result_log import number
from tools.report.score import System

WIDTH, HEIGHT, ROW, REST = 8.6, 4.6, 0.45, 0.9  # inches; the last two are heights of charts with a row per system
matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False, "axes.grid": True}
)
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>FLUX.1 training benchmark</title><style>
div{overflow-x:auto}pre{white-space:pre-wrap}
body{max-width:940px;margin:0 auto;padding:28px 20px;font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
table{border-collapse:collapse;font-size:14px}pre{font-size:13px}
th,td{padding:6px 10px 6px 0;border-bottom:1px solid #888;text-align:left;vertical-align:top;min-width:6em}
figure{margin:18px 0}figcaption{margin-top:6px}svg{display:block;width:100%;min-width:600px;height:auto}
</style></head><body><h1>FLUX.1 training benchmark</h1>"""


class Chart(NamedTuple):
    title: str
    caption: str
    figure: Figure


def page(systems: list[System], basis: str) -> str:
    """The whole document. basis: the rules that the verdicts rest on, in words."""
    rows = [words.overview(system) | {"verdict": system.verdict} for system in systems]
    parts = [HEAD, f"<p>{_safe(basis)}</p>", _table([rows[0], *(row.values() for row in rows)])]
    for title, caption, figure in charts(systems):
        caption = f"<figcaption>{_safe(caption)}</figcaption>"
        parts.append(f"<figure><h3>{_safe(title)}</h3><div>{svg(figure)}</div>{caption}</figure>")
    parts += [f"<pre>{_safe(words.describe(system))}</pre>" for system in systems]
    return f"{''.join(parts)}</body></html>\n"


def _safe(value: object) -> str:
    """Any text, made safe for HTML."""
    return html.escape("\n".join(map(printable, str(value).split("\n"))))


def _table(rows: list[Iterable[str]]) -> str:
    """The first row holds the headings."""
    cells = [[f"<{'td' if i else 'th'}>{_safe(value)}" for value in row] for i, row in enumerate(rows)]
    return f"<div><table><tr>{'<tr>'.join(map(''.join, cells))}</table></div>"


def charts(systems: list[System]) -> Iterator[Chart]:
    """The charts that have something to show."""
    batches = defaultdict(list)
    for system in systems:
        if any(run.val_curve for run in system.runs):
            batches[int(number(system.value("global_batch_size")) or 0)].append(system)
    yield from (losses(batch, group) for batch, group in sorted(batches.items()))
    if timed := [system for system in systems if any(run.minutes for run in system.runs)]:
        yield minutes(timed)


def losses(batch: int, systems: list[System]) -> Chart:
    """Validation losses of every run of a global batch, beside the target and the band of public runs."""
    axes = _axes(HEIGHT, "training samples")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    curves = [run.val_curve for system in systems for run in system.runs if run.val_curve]
    for place, system in enumerate(systems):
        label = f" {system.name[-60:]}"  # one that begins with "_" would be left out
        for run in system.runs:
            if run.val_curve:
                axes.plot(*zip(*run.val_curve), "x:" if run.faults else ".-", color=f"C{place}", label=label)
                label = None
    target = number(systems[0].value("target_accuracy")) or 0.0
    if target:
        axes.axhline(target, color="red", linestyle="--", label=f"target {target:g}")
    caption = "A line for each run, dotted if the run does not count."
    band = convergence.public_band(batch) if target == TARGET else []
    if band:
        samples, low, median, high = zip(*band)
        axes.plot(samples, median, color="grey", label="public runs of MLPerf v5.1")
        axes.fill_between(samples, low, high, color="grey", alpha=0.25)
        curves += [[*zip(samples, low)], [*zip(samples, high)]]
        caption += " Grey: lowest, median and highest loss of the public runs, which lie about 0.001 too high."
    axes.set_ylim(*span(curves, target))
    axes.legend()
    return Chart(f"Validation loss at global batch {batch:,}", caption, axes.figure)


def minutes(systems: list[System]) -> Chart:
    """The time to train of every run, a row for each system."""
    axes = _axes(REST + ROW * len(systems), "minutes")
    for y, system in enumerate(systems):
        for run in system.runs:
            axes.plot([run.minutes], [y], "x" if run.faults else "o", color=f"C{y}")
        axes.plot([system.olympic_mean_minutes], [y], "|", color="black", markersize=25)
    axes.set_yticks(range(len(systems)), [system.name[-28:] for system in systems])
    axes.set_ylim(len(systems) - 0.5, -0.5)
    return Chart(
        "Time to train", "A dot for each run, a cross if it does not count. Bar: the olympic mean.", axes.figure
    )


def _axes(height: float, label: str) -> Axes:
    """The axes of a new figure. label: of the horizontal axis."""
    axes = Figure((WIDTH, height), layout="constrained").add_subplot()
    axes.set_xlabel(label)
    return axes


def svg(figure: Figure) -> str:
    """The figure as one svg element without a title."""
    file = io.StringIO()
    with warnings.catch_warnings(action="ignore"):  # about letters that the font lacks
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()[file.getvalue().index("<svg ") :]
