"""The report as one HTML page with matplotlib's charts: it has no script, loads nothing, and all text is escaped.

matplotlib is an extra (requirements-report.txt).
"""

import html
import io
import warnings
from collections import defaultdict
from collections.abc import Iterable

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from flux_ref.benchmark import convergence
from flux_ref.config import EvalConfig
from flux_ref.errors import printable
from flux_ref.loss_chart import span
from tools.report import words
from tools.report.result_log import number
from tools.report.score import System

matplotlib.rcParams.update(
    {"svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False, "axes.grid": True}
)
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>FLUX.1 training benchmark</title><style>
div{overflow-x:auto}pre{white-space:pre-wrap}
body{max-width:940px;margin:0 auto;padding:28px 20px;font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
table{border-collapse:collapse;font-size:14px}pre{font-size:13px}
th,td{padding:6px 10px 6px 0;border-bottom:1px solid #888;text-align:left;vertical-align:top;min-width:6em}
svg{display:block;width:100%;min-width:600px;height:auto}
</style></head><body><h1>FLUX.1 training benchmark</h1>"""


CAPTION = """Validation losses: a line for each run, dotted if the run does not count. Grey: the lowest, median and
highest loss of the public runs of MLPerf v5.1, which lie about 0.001 too high."""


def page(systems: list[System], basis: str) -> str:
    """The whole document. basis: the rules that the verdicts rest on, in words."""
    rows = [words.overview(system) | {"verdict": system.verdict} for system in systems]
    parts = [HEAD, f"<p>{_safe(basis)}</p>", _table([rows[0], *(row.values() for row in rows)]), f"<p>{CAPTION}</p>"]
    parts += [f"<div>{svg(figure)}</div>" for figure in charts(systems)]
    parts += [f"<pre>{_safe(words.describe(system))}</pre>" for system in systems]
    return f"{''.join(parts)}</body></html>\n"


def _safe(text: str) -> str:
    """Any text, made safe for HTML."""
    return html.escape("\n".join(map(printable, text.split("\n"))))


def _table(rows: list[Iterable[str]]) -> str:
    """The first row holds the headings."""
    cells = [[f"<{'td' if i else 'th'}>{_safe(value)}" for value in row] for i, row in enumerate(rows)]
    return f"<div><table><tr>{'<tr>'.join(map(''.join, cells))}</table></div>"


def charts(systems: list[System]) -> list[Figure]:
    """A chart for each global batch that has losses."""
    batches = defaultdict(list)
    for system in systems:
        if any(run.val_curve for run in system.runs):
            batches[int(number(system.value("global_batch_size")) or 0)].append(system)
    return [losses(batch, group) for batch, group in sorted(batches.items())]


def losses(batch: int, systems: list[System]) -> Figure:
    """Validation losses of every run of a global batch, beside the target and the band of public runs."""
    figure = Figure((8.6, 4.6), layout="constrained")  # inches
    axes = figure.add_subplot(xlabel="training samples", title=f"global batch {batch:,}")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    curves = [run.val_curve for system in systems for run in system.runs if run.val_curve]
    for place, system in enumerate(systems):
        label = f" {system.name[-60:]}"  # one that begins with "_" would be left out
        for run in system.runs:
            if run.val_curve:
                axes.plot(*zip(*run.val_curve), "x:" if run.faults else ".-", color=f"C{place}", label=label)
                label = None
    target = number(systems[0].value("target_accuracy")) or 0.0
    axes.axhline(target, color="red", linestyle="--", label=f"target {target:g}")
    band = convergence.public_band(batch) if target == EvalConfig.target else []
    if band:
        samples, low, median, high = zip(*band)
        axes.plot(samples, median, color="grey", label="public runs")
        axes.fill_between(samples, low, high, color="grey", alpha=0.25)
        curves += [[*zip(samples, low)], [*zip(samples, high)]]
    axes.set_ylim(*span(curves, target))
    axes.legend()
    return figure


def svg(figure: Figure) -> str:
    """The figure as one svg element."""
    file = io.StringIO()
    with warnings.catch_warnings(action="ignore"):  # about letters that the font lacks
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()[file.getvalue().index("<svg ") :]
