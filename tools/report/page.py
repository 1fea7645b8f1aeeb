"""The report as one HTML page: it has no script, loads nothing, and all text in it is escaped."""

import html
from collections.abc import Iterable

from flux_ref.formats.outside import printable
from tools.report import charts, text
from tools.report.score import System

HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1"><title>FLUX.1 training benchmark</title><style>
:root{color-scheme:light dark}div,pre{overflow-x:auto}
body{max-width:940px;margin:0 auto;padding:28px 20px;font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
table{border-collapse:collapse;font-size:14px}pre{font-size:13px}
th,td{padding:6px 10px 6px 0;border-bottom:1px solid #888;text-align:left;vertical-align:top;min-width:6em}
figure{margin:18px 0}figcaption{margin-top:6px}svg{display:block;width:100%;min-width:600px;height:auto}
</style></head><body><h1>FLUX.1 training benchmark</h1>"""


def page(systems: list[System], basis: str) -> str:
    """The whole document. basis: the rules that the verdicts rest on, in words."""
    overview = [text.overview(system) | {"verdict": system.verdict} for system in systems]
    parts = [HEAD, f"<p>{_text(basis)}</p>", _table([overview[0], *(row.values() for row in overview)])]
    parts.append("<h2>Charts</h2>")
    for chart in charts.of_systems(systems):
        caption = f"<figcaption>{_text(chart.caption)}</figcaption>"
        parts.append(f"<figure><h3>{_text(chart.title)}</h3><div>{charts.svg(chart)}</div>{caption}</figure>")
    parts.append("<h2>Runs and official checks</h2>")
    for system in systems:
        lines = "\n".join(map(_text, text.describe(system).split("\n")))
        parts.append(f"<h3>{_text(system.name)}</h3><pre>{lines}</pre>")
    parts += ["<h2>Configuration</h2>", _compared(systems, "settings")]
    parts += ["<h2>Environment</h2>", _compared(systems, "machine")]
    return f"{''.join(parts)}</body></html>\n"


def _text(value: object) -> str:
    """Any text, made safe for HTML."""
    return html.escape(printable(value))


def _table(rows: list[Iterable[object]]) -> str:
    """The first row holds the headings."""
    lines = []
    for tag, row in zip(["th", *["td"] * len(rows)], rows):
        cells = "".join(f"<{tag}>{_text(str(value)[:200])}</{tag}>" for value in row)
        lines.append(f"<tr>{cells}</tr>")
    return f"<div><table>{''.join(lines)}</table></div>"


def _compared(systems: list[System], figures: str) -> str:
    """A row per key and a column per system. figures: the attribute of a system that is shown."""
    tables = [getattr(system, figures) for system in systems]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [[key, *(table.get(key, "-") for table in tables)] for key in keys]
    return _table([["", *(system.name for system in systems)], *rows])
