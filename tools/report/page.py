"""The report as one HTML page, light and dark: it has no script, loads nothing, and all text in it is escaped."""

import html
from collections.abc import Iterable

from flux_ref.formats.outside import printable
from tools.report import charts, score, text
from tools.report.charts import COLOURS
from tools.report.score import RUNS, System

TITLE = "FLUX.1 training benchmark"
STYLE = """
*{box-sizing:border-box}
body{margin:0;background:var(--c-paper);color:var(--c-ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:940px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:26px;margin:0}h2{font-size:19px;margin:44px 0 10px}h3{font-size:16px;margin:26px 0 6px}
p{margin:6px 0}.soft,figcaption,th{color:var(--c-soft)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:14px}
th{font-weight:500;text-align:left}tr:first-child th{vertical-align:bottom}
th,td{padding:6px 10px 6px 0;border-bottom:1px solid var(--c-grid);vertical-align:top;overflow-wrap:break-word}
td:first-child{min-width:150px;overflow-wrap:anywhere}
.n td+td,.n th+th{text-align:right;white-space:nowrap;padding-left:8px}
.n td:last-child,.n th:last-child{padding-right:0}
td.differs{font-weight:600}pre{font-size:13px;overflow-x:auto;margin:6px 0}
figure{margin:18px 0 30px}figcaption{font-size:14px;margin-top:2px}svg{width:100%;height:auto;display:block}
svg text{font-family:system-ui,sans-serif!important}
.pill{border-radius:9px;padding:1px 9px;font-size:13px;font-weight:600;white-space:nowrap;border:1px solid currentColor}
.good{color:var(--c-good)}.bad{color:var(--c-bad)}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
"""


def page(systems: list[System], basis: str) -> str:
    """The whole document. basis: the rules that the verdicts rest on, in words."""
    title = f"{TITLE}: {_text(systems[0].name)}" if len(systems) == 1 else TITLE
    parts = [f"<h1>{title}</h1><p class=soft>{_text(basis)}</p>", _comparison(systems), "<h2>Charts</h2>"]
    for chart in charts.of_systems(systems):
        caption = f"<figcaption>{_text(chart.caption)}</figcaption>"
        parts.append(f"<figure><h3>{_text(chart.title)}</h3>{charts.svg(chart)}{caption}</figure>")
    parts.append("<h2>Runs and official checks</h2>")
    for system in systems:
        lines = "\n".join(map(_text, text.describe(system).split("\n")))
        parts.append(f"<h3>{_label(system)} {_verdict(system)}</h3><pre>{lines}</pre>")
    parts += ["<h2>Configuration</h2>", _compared(systems, [system.settings for system in systems])]
    parts += ["<h2>Environment</h2>", _compared(systems, [system.machine for system in systems])]
    light = ""
    dark = ""
    for name, (in_light, in_dark) in COLOURS.items():
        light += f"--c-{name}:{in_light};"
        dark += f"--c-{name}:{in_dark};"
    colours = f":root{{color-scheme:light dark;{light}}}\n@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{title}</title>'
        f"<style>{colours}{STYLE}</style></head><body><main>{''.join(parts)}</main></body></html>\n"
    )


def _text(value: object) -> str:
    """Any text, made safe for HTML."""
    return html.escape(printable(value))


def _table(head: Iterable[str], rows: Iterable[str], kind: str) -> str:
    """kind: "n" for a table of numbers, whose columns stand to the right."""
    cells = "".join(f"<th>{_text(name)}</th>" for name in head)
    return f"<div class=scroll><table class={kind}><tr>{cells}</tr>{''.join(rows)}</table></div>"


def _label(system: System) -> str:
    """The colour and the name of a system."""
    key = f'<span class=key style="background:var(--c-{charts.colour(system)})"></span>'
    return f"{key}{_text(system.name)}"


def _verdict(system: System) -> str:
    """Runs that are too few for a result are no failure: whoever compares two runs asks for none."""
    if len(system.runs) < RUNS:
        return f"<span class='pill soft'>{len(system.runs)} of {RUNS} runs</span>"
    if system.verdict == score.VALID:
        return "<span class='pill good'>valid</span>"
    return f"<span class='pill bad'>{'not valid' if system.reasons else 'rehearsal'}</span>"


def _comparison(systems: list[System]) -> str:
    rows = []
    for system in systems:
        cells = "".join(f"<td>{_text(value)}</td>" for value in text.overview(system).values())
        rows.append(f"<tr><td>{_label(system)}</td><td>{_verdict(system)}</td>{cells}</tr>")
    return _table(["system", "", *text.overview(systems[0])], rows, kind="n")


def _compared(systems: list[System], tables: list[dict[str, object]]) -> str:
    """A row per key and a column per system; bold where they differ."""
    rows = []
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [str(table.get(key, "-")) for table in tables]
        differs = " class=differs" if len({*values} - {"-"}) > 1 else ""
        cells = "".join(f"<td{differs}>{_text(value[:200])}</td>" for value in values)
        rows.append(f"<tr><th>{_text(key)}</th>{cells}</tr>")
    return _table(["", *(system.name for system in systems)], rows, kind="words")
