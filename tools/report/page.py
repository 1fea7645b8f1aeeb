"""The report as one HTML page with matplotlib's charts: it has no script, loads nothing, and all text is escaped.

matplotlib is an extra (requirements-report.txt).
"""

import html
import io
import warnings
from collections import defaultdict
from typing import Any

from flux_ref import mlperf_closed
from flux_ref.config import EvalConfig
from flux_ref.loss_chart import span
from tools.report.result_log import number
from tools.report.score import System

STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False, "axes.grid": True}
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>FLUX.1 training benchmark</title><style>
div{overflow-x:auto}pre{white-space:pre-wrap;font-size:13px}
body{max-width:940px;margin:0 auto;padding:28px 20px;font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
svg{display:block;width:100%;min-width:600px;height:auto}
</style></head><body><h1>FLUX.1 training benchmark</h1>"""
CAPTION = """<p>Validation losses: a line for each run, dotted if the run does not count. Grey: the lowest, median and
highest loss of the public runs of MLPerf v5.1, which lie about 0.001 too high.</p>"""


def page(systems: list[System], text: str) -> str:
    """The whole document: charts, and what the terminal shows."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        drawn = "".join(f"<div>{svg(figure)}</div>" for figure in charts(systems))
    return f"{HEAD}{CAPTION}{drawn}<pre>{html.escape(text)}</pre></body></html>\n"


def charts(systems: list[System]) -> list[Any]:
    """A figure of matplotlib for each global batch that has losses."""
    batches = defaultdict(list)
    for system in systems:
        if any(run.val_curve for run in system.runs):
            batches[number(system.value("global_batch_size"))].append(system)
    return [losses(batch, group) for batch, group in sorted(batches.items())]


def losses(batch: Any, systems: list[System]) -> Any:
    """Validation losses of every run of a global batch, beside the target and the band of public runs."""
    from matplotlib.figure import Figure

    figure = Figure((8.6, 4.6), layout="constrained")  # inches
    axes = figure.add_subplot(xlabel="million training samples", title=f"global batch {batch:,}")
    axes.xaxis.set_major_formatter(lambda samples, _: f"{samples / 1e6:g}")
    shown = []
    for place, system in enumerate(systems):
        label = f" {system.name[-60:]}"  # one that begins with "_" would be left out
        for run in system.runs:
            if run.val_curve:
                axes.plot(*zip(*run.val_curve), "x:" if run.faults else ".-", color=f"C{place}", label=label)
                label = ""
                shown.append(run.val_curve)

    target = number(systems[0].value("target_accuracy"))
    target = target if target > 0 else 0.0
    axes.axhline(target, color="red", linestyle="--", label=f"target {target:g}")
    band = mlperf_closed.load_public_curve(batch) if target == EvalConfig.target else []
    if band:
        samples, low, median, high = zip(*band)
        axes.plot(samples, median, color="grey", label="public runs")
        axes.fill_between(samples, low, high, color="grey", alpha=0.25)
        shown += [[*zip(samples, low)], [*zip(samples, high)]]

    axes.set_ylim(*span(shown, target))
    axes.legend()
    return figure


def svg(figure: Any) -> str:
    """The figure as one svg element."""
    file = io.StringIO()
    with warnings.catch_warnings(action="ignore"):  # about letters that the font lacks
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()[file.getvalue().index("<svg ") :]
