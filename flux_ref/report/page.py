"""The report as one HTML page, light and dark: it has no script, loads nothing, and all text in it is escaped."""

import html
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from flux_ref.report import charts, score
from flux_ref.report.charts import COLOURS, Chart, Subject
from flux_ref.report.result_log import number, printable
from flux_ref.report.score import RUN_COLUMNS, SYSTEM_COLUMNS, System, show

TITLE = "FLUX.1 training benchmark"
HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{TITLE}'
)
# The names that charts.of_subjects gives.
PNG_NAME = re.compile(r"((loss|timesteps)_\d+|training|minutes|samples|throughput|time)(_dark)?\.png")
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
td.n,th.n{text-align:right;white-space:nowrap;padding-left:8px}
td.n:last-child,th.n:last-child{padding-right:0}
tr.out td{color:var(--c-soft)}td.differs{font-weight:600}
figure{margin:18px 0 30px}figcaption{font-size:14px;margin-top:2px}svg{width:100%;height:auto;display:block}
svg text{font-family:system-ui,sans-serif!important}
.pill{border-radius:9px;padding:1px 9px;font-size:13px;font-weight:600;white-space:nowrap;border:1px solid currentColor}
.good{color:var(--c-good)}.bad{color:var(--c-bad)}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
ul{padding-left:20px;margin:6px 0}summary{cursor:pointer;color:var(--c-soft);margin:8px 0}
"""
OPENED = 4  # systems up to which the runs are shown at once


def page(chosen: list[Subject], drawn: dict[str, Chart], basis: str) -> str:
    """The whole document. drawn: the charts by name."""
    systems = [subject.system for subject in chosen]
    name = f": {systems[0].name}" if len(systems) == 1 else ""
    parts = [f"<h1>{TITLE}{_text(name)}</h1><p class=soft>{_text(basis)}</p>"]
    parts.append(_comparison(chosen))
    parts.append("<h2>Charts</h2>")
    for chart in drawn.values():
        caption = f"<figcaption>{_text(chart.caption)}</figcaption>"
        parts.append(f"<figure><h3>{_text(chart.title)}</h3>{charts.svg(chart)}{caption}</figure>")
    parts.append("<h2>Runs and official checks</h2>")
    parts += [_system(subject, len(chosen) <= OPENED) for subject in chosen]
    parts.append("<h2>Configuration</h2>" + _compared(chosen, _settings))
    if any(subject.config for subject in chosen):
        table = _compared(chosen, lambda subject: subject.config)
        parts.append(f"<details><summary>config.toml</summary>{table}</details>")
    parts.append("<h2>Environment</h2>" + _compared(chosen, _machine))
    return (
        f"{HEAD}{_text(name)}</title><style>{_colours()}{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def charts_of(path: Path) -> list[Path]:
    """The PNGs that an earlier report wrote beside its page; none if there is no page or the page is foreign."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            is_ours = file.read(len(HEAD)) == HEAD
    except FileNotFoundError:
        return []
    beside = path.parent.iterdir() if is_ours else ()
    return [png for png in beside if PNG_NAME.fullmatch(png.name) and png.is_file()]


def _colours() -> str:
    """The custom properties --c-NAME: light colours, and dark ones for readers who prefer them."""
    light, dark = ("".join(f"--c-{name}:{pair[mode]};" for name, pair in COLOURS.items()) for mode in (0, 1))
    return f":root{{color-scheme:light dark;{light}}}\n@media(prefers-color-scheme:dark){{:root{{{dark}}}}}"


def _text(value: object) -> str:
    """Any text, made safe for HTML."""
    return html.escape(printable(value))


def _pill(system: System) -> str:
    return "<span class='pill bad'>not valid</span>" if system.reasons else "<span class='pill good'>valid</span>"


def _table(head: Iterable[tuple[str, bool]], rows: Iterable[str]) -> str:
    """head: (text, whether it is over numbers)."""
    cells = "".join(f"<th{' class=n' * numeric}>{_text(name)}</th>" for name, numeric in head)
    return f"<div class=scroll><table><tr>{cells}</tr>{''.join(rows)}</table></div>"


def _key(subject: Subject) -> str:
    return f'<span class=key style="background:var(--c-{subject.colour})"></span>'


def _reasons(system: System) -> str:
    lines = [f"<li class=bad>{_text(reason)}</li>" for reason in system.reasons]
    lines += [f"<li>{_text(note)}</li>" for note in system.notes]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _comparison(chosen: list[Subject]) -> str:
    rows = []
    for subject in chosen:
        cells = "".join(f"<td class=n>{_text(value)}</td>" for value in score.overview(subject.system))
        rows.append(f"<tr><td>{_key(subject)}{_text(subject.name)}</td><td>{_pill(subject.system)}</td>{cells}</tr>")
    return _table([("system", False), ("", False), *((heading, True) for heading, _ in SYSTEM_COLUMNS)], rows)


def _system(subject: Subject, opened: bool) -> str:
    system = subject.system
    head = [("run", False), *((heading, True) for heading, *_ in RUN_COLUMNS), ("seed", True)]
    rows = []
    for run in system.runs:
        cells = "".join(f"<td class=n>{show(getattr(run, name), form)}</td>" for *_, name, form in RUN_COLUMNS)
        rows.append(
            f"<tr{' class=out' * bool(run.faults)}><td>{_text(run.name)}</td>{cells}"
            f"<td class=n>{_text(run.log.value('seed'))[:20]}</td></tr>"
        )
        rows += [
            f"<tr class=out><td colspan={len(head)}><span class=bad>{_text(f)}</span></td></tr>" for f in run.faults
        ]
    lines = "".join(f"<p>{_text(line)}</p>" for line in score.checks(system))
    title = f"<h3>{_key(subject)}{_text(subject.name)} {_pill(system)}</h3>"
    table = f"<details{' open' * opened}><summary>runs</summary>{_table(head, rows)}</details>"
    return f"{title}{_reasons(system)}{lines}{table}"


def _compared(chosen: list[Subject], what: Callable[[Subject], dict[str, object]]) -> str:
    """A row per key and a column per system; bold where they differ."""
    tables = [what(subject) for subject in chosen]
    rows = []
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table.get(key, "-") for table in tables]
        differs = " class=differs" if len({str(table[key]) for table in tables if key in table}) > 1 else ""
        cells = "".join(f"<td{differs}>{_text(str(value)[:200])}</td>" for value in values)
        rows.append(f"<tr><th>{_text(key)}</th>{cells}</tr>")
    if not rows:
        return "<p class=soft>The logs tell nothing.</p>"
    return _table([("", False), *((subject.name, False) for subject in chosen)], rows)


def _settings(subject: Subject) -> dict[str, object]:
    """What the logs say before run_start, apart from the seed: for each key the first value that any run gives."""
    settings: dict[str, object] = {}
    for run in subject.system.runs:
        for event in run.log.events:
            if event.key == "run_start":
                break
            if isinstance(event.value, (str, int, float)) and event.key not in ("seed", "cache_clear"):
                settings.setdefault(event.key, event.value)
    return settings


def _machine(subject: Subject) -> dict[str, str]:
    machine = subject.system.machine
    steps = subject.records[str(subject.system.runs[0].log.path)].steps
    for key, text in (("peak_memory_gb", "peak memory, GB"), ("data_wait", "share of the time waiting for data")):
        values = [value for step in steps if (value := number(step.get(key))) is not None]
        machine |= {text: f"{max(values):.3g}"} if values else {}
    return machine
