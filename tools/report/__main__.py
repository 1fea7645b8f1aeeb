"""Score benchmark runs: the official checks, the time to train, a table, and an HTML page with charts.

python -m tools.report runs/schnell_gbs512
python -m tools.report RESULTS_FOLDER_A RESULTS_FOLDER_B --ruleset=5.1.0 --out=report --json=report.json

The page has no script and loads nothing; all text in it is escaped. It needs matplotlib, an extra
(requirements-report.txt).

Exit code: 0 every system is a valid result, or a rehearsal that passes the checks; 1 a system is neither (the reasons
are printed); 2 the request was refused.
"""

import html
import io
import sys
import warnings
from collections import defaultdict
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flux_ref import cli, mlperf_closed
from flux_ref.cli import Options, printable
from flux_ref.config import KEYS, EvalConfig, MllogConfig
from flux_ref.files import write_whole
from flux_ref.loss_chart import span
from tools.figures import json_option, show
from tools.report import result_log, score
from tools.report.result_log import number
from tools.report.score import System

STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "report", "text.parse_math": False, "axes.grid": True}
HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>FLUX.1 training benchmark</title><style>
div{overflow-x:auto}pre{white-space:pre-wrap;font-size:13px}
body{max-width:940px;margin:0 auto;padding:28px 20px;font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
svg{display:block;width:100%;min-width:600px;height:auto}
</style></head><body><h1>FLUX.1 training benchmark</h1>\
<p>Validation losses: a line for each run, dotted if the run does not count. Grey: the lowest, median and
highest loss of the public runs of MLPerf v5.1, which lie about 0.001 too high.</p>"""


def main(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("python -m tools.report", "Score and compare MLPerf Training logs of FLUX.1.")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="result files, run folders, or their trees")
    parser.add_argument("--ruleset", choices=KEYS["mllog.ruleset"].choices, default=MllogConfig.ruleset)
    parser.add_argument("--points", type=Path, help="reference convergence points in place of the official ones")
    parser.add_argument("--out", type=Path, help="folder for a page with charts, report.html")
    json_option(parser)
    args = parser.parse_args(argv)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    rules = {
        "ruleset": args.ruleset,
        "mlperf_logging": version("mlperf-logging"),
        "points": str(args.points or "official"),
    }
    systems = [score.judge(name, files, args.ruleset, args.points) for name, files in result_log.find(args.paths)]
    text = ", ".join(f"{name} {value}" for name, value in rules.items()) + f"\n\n{score.describe(systems)}"
    if args.out:
        path = args.out / "report.html"
        write_whole(path, page(systems, text))
        text += f"\n\npage: {printable(path)}"
    show(text, rules | {"systems": [asdict(system) for system in systems]}, args.json)  # an unknown value is null
    return int(any(system.reasons for system in systems))


def page(systems: list[System], text: str) -> str:
    """An HTML document: a chart for each global batch that has losses, and what the terminal shows."""
    import matplotlib

    batches = defaultdict(list)
    for system in systems:
        if any(run.val_curve for run in system.runs):
            batches[number(system.value("global_batch_size"))].append(system)
    with matplotlib.rc_context(STYLE):
        drawn = "".join(f"<div>{chart(batch, group)}</div>" for batch, group in sorted(batches.items()))
    return f"{HEAD}{drawn}<pre>{html.escape(text)}</pre></body></html>\n"


def chart(batch: Any, systems: list[System]) -> str:
    """An svg element: validation losses of every run of a global batch, beside the target and the public runs."""
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
    if not target > 0:  # also if it is unknown, NaN
        target = 0.0
    axes.axhline(target, color="red", linestyle="--", label=f"target {target:g}")
    band = mlperf_closed.load_public_curve(batch) if target == EvalConfig.target else []
    if band:
        samples, low, median, high = zip(*band)
        axes.plot(samples, median, color="grey", label="public runs")
        axes.fill_between(samples, low, high, color="grey", alpha=0.25)
        shown += [[*zip(samples, low)], [*zip(samples, high)]]

    axes.set_ylim(*span(shown, target))
    axes.legend()

    file = io.StringIO()
    with warnings.catch_warnings(action="ignore"):  # about letters that the font lacks
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()[file.getvalue().index("<svg ") :]


if __name__ == "__main__":
    sys.exit(cli.run("report", main, sys.argv[1:]))
