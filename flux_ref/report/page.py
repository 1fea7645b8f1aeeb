"""The report as one page: no script, nothing from outside, light and dark. All text in it is escaped."""

import html
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from flux_ref.benchmark import convergence
from flux_ref.config import ModelConfig
from flux_ref.report import charts, drawing, result_files, score
from flux_ref.report.charts import Subject
from flux_ref.report.drawing import Drawing
from flux_ref.report.result_log import number, printable
from flux_ref.report.score import System

TITLE = "FLUX.1 training benchmark"
HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    f'<meta name="viewport" content="width=device-width,initial-scale=1"><title>{TITLE}'
)
PNG_NAME = re.compile(r"((loss|timesteps)_\d+|training|minutes|samples|throughput|time|speed)\.png")  # of `drawings`
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
.pill{border-radius:9px;padding:1px 9px;font-size:13px;font-weight:600;white-space:nowrap;border:1px solid currentColor}
.good{color:var(--c-good)}.bad{color:var(--c-bad)}
.key{display:inline-block;width:11px;height:11px;border-radius:3px;margin-right:7px}
.big{font-size:30px;font-weight:650;margin:0 0 2px}.facts{display:flex;flex-wrap:wrap;gap:14px 40px;margin:18px 0 8px}
ul{padding-left:20px;margin:6px 0}summary{cursor:pointer;color:var(--c-soft);margin:8px 0}
"""
OPENED = 4  # systems up to which the runs are shown at once
# Heading, attribute of a run, format.
RUN_COLUMNS = (
    ("minutes", "minutes", ",.2f"),
    ("samples", "samples", ",.0f"),
    ("samples/s", "throughput", ",.1f"),
    ("without evaluation", "training_throughput", ",.1f"),
    ("evaluation s", "evaluation_s", ",.0f"),
    ("initialisation s", "init_s", ",.0f"),
)


def drawings(chosen: list[Subject]) -> dict[str, Drawing]:
    """The charts there is something to show in, by the name of their PNG."""
    found: dict[str, Drawing | None] = {}
    batches: dict[int, list[Subject]] = {}
    for subject in chosen:
        batch = number(subject.system.value("global_batch_size"))
        batches.setdefault(int(batch or 0), []).append(subject)
    for i, (batch, group) in enumerate(sorted(batches.items())):
        band = convergence.public_band(batch) if any(map(_full_size, group)) else None
        found[f"loss_{i}"] = charts.losses(f"Validation loss at global batch {batch:,}", group, band)
    for i, subject in enumerate(chosen):
        found[f"timesteps_{i}"] = charts.timesteps(subject, subject.system.runs[0])
    found["training"] = charts.training(chosen)
    found["minutes"] = charts.minutes(chosen)
    found["samples"] = charts.samples(chosen)
    found["throughput"] = charts.throughputs(chosen)
    found["time"] = charts.time_split(chosen)
    found["speed"] = charts.speeds(chosen)
    return {name: chart for name, chart in found.items() if chart is not None}


def _full_size(subject: Subject) -> bool:
    """Whether it trains the benchmark's model to its target, as far as is known."""
    hidden = _own_config(subject).get("model.hidden", ModelConfig.hidden)
    return hidden == ModelConfig.hidden and any(run.target == convergence.TARGET for run in subject.system.runs)


def page(chosen: list[Subject], drawn: dict[str, Drawing], basis: str) -> str:
    """The whole document. drawn: of `drawings`."""
    systems = [subject.system for subject in chosen]
    name = f": {systems[0].name}" if len(systems) == 1 else ""
    parts = [f"<h1>{TITLE}{_text(name)}</h1><p class=soft>{_text(basis)}</p>"]
    parts.append(_comparison(chosen) if len(systems) > 1 else _headline(systems[0]))
    parts.append("<h2>Charts</h2>")
    for chart in drawn.values():
        caption = f"<figcaption>{_text(chart.caption)}</figcaption>"
        parts.append(f"<figure><h3>{_text(chart.title)}</h3>{drawing.svg(chart)}{caption}</figure>")
    parts.append("<h2>Runs and official checks</h2>")
    parts += [_system(subject, len(chosen) <= OPENED) for subject in chosen]
    parts.append("<h2>Configuration</h2>" + _compared(chosen, _settings))
    own = {name for subject in chosen for name, own in subject.records.items() if own.config}
    if own:
        parts.append(f"<details><summary>config.toml</summary>{_compared(chosen, _own_config)}</details>")
    parts.append("<h2>Environment</h2>" + _compared(chosen, _machine))
    return (
        f"{HEAD}{_text(name)}</title><style>{drawing.style()}{STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def charts_of(path: Path) -> list[Path]:
    """The PNGs beside a page that an earlier report has written; none if there is no page or not one of ours."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            is_ours = file.read(len(HEAD)) == HEAD
    except FileNotFoundError:
        return []
    beside = path.parent.iterdir() if is_ours else ()
    return [own for own in beside if PNG_NAME.fullmatch(own.name) and own.is_file()]


def _text(value: object) -> str:
    """Any text, safe in HTML."""
    return html.escape(printable(value))


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _pill(system: System) -> str:
    return "<span class='pill bad'>not valid</span>" if system.reasons else "<span class='pill good'>valid</span>"


def _table(head: Iterable[tuple[str, bool]], rows: Iterable[str]) -> str:
    """head: (text, whether it is over numbers)."""
    cells = "".join(f"<th{' class=n' * numeric}>{_text(name)}</th>" for name, numeric in head)
    return f"<div class=scroll><table><tr>{cells}</tr>{''.join(rows)}</table></div>"


def _key(subject: Subject) -> str:
    return f'<span class=key style="background:var(--c-{subject.colour})"></span>'


def _headline(system: System) -> str:
    facts = [
        ("score, minutes", _number(system.score_minutes, ",.2f")),
        ("olympic mean, minutes", _number(system.olympic_mean_minutes, ",.2f")),
    ]
    if system.olympic_mean_minutes is None:
        facts = [("minutes, mean of the runs", _number(system.mean("minutes"), ",.2f"))]
    facts += [
        ("samples/s", _number(system.mean("throughput"), ",.0f")),
        ("runs that count", f"{len(system.counted)} of {len(system.runs)}"),
    ]
    cells = "".join(f"<div><p class=big>{value}</p><p class=soft>{name}</p></div>" for name, value in facts)
    return f"<div class=facts>{cells}</div><p>{_pill(system)}</p>" + _reasons(system)


def _reasons(system: System) -> str:
    lines = [f"<li class=bad>{_text(reason)}</li>" for reason in system.reasons]
    lines += [f"<li>{_text(note)}</li>" for note in system.notes]
    return f"<ul>{''.join(lines)}</ul>" if lines else ""


def _comparison(chosen: list[Subject]) -> str:
    head = [("system", False), ("", False)]
    names = ("accelerators", "batch", "runs", "olympic", "factor", "score", "samples/s", "per accelerator")
    rows = []
    for subject in chosen:
        system, count = subject.system, result_files.accelerators(_machine(subject))
        speed = system.mean("throughput")
        values = (
            _number(count, ","),
            system.value("global_batch_size"),
            f"{len(system.counted)}/{len(system.runs)}",
            _number(system.olympic_mean_minutes, ",.2f"),
            _number(system.factor, ".4f"),
            _number(system.score_minutes, ",.2f"),
            _number(speed, ",.0f"),
            _number(speed / count if speed and count else None, ",.1f"),
        )
        cells = "".join(f"<td class=n>{_text(value)}</td>" for value in values)
        rows.append(f"<tr><td>{_key(subject)}{_text(subject.name)}</td><td>{_pill(system)}</td>{cells}</tr>")
    return _table([*head, *((name, True) for name in names)], rows)


def _system(subject: Subject, opened: bool) -> str:
    system = subject.system
    head = [("run", False), *((name, True) for name, _, _ in RUN_COLUMNS), ("seed", True)]
    rows = []
    for run in system.runs:
        cells = "".join(f"<td class=n>{_number(getattr(run, name), form)}</td>" for _, name, form in RUN_COLUMNS)
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
    """What the logs say before run_start, apart from the seed: one value per key, of the first run that tells."""
    found: dict[str, object] = {}
    for run in subject.system.runs:
        for event in run.log.events:
            if event.key == "run_start":
                break
            if isinstance(event.value, (str, int, float)) and event.key not in ("seed", "cache_clear"):
                found.setdefault(event.key, event.value)
    return found


def _own_config(subject: Subject) -> dict[str, object]:
    return next((own.config for own in subject.records.values() if own.config), {})


def _machine(subject: Subject) -> dict[str, str]:
    log = subject.system.runs[0].log
    found = result_files.machine(log.path, log.system)
    steps = subject.records[str(log.path)].steps
    for key, text in (("peak_memory_gb", "peak memory, GB"), ("data_wait", "share of the time waiting for data")):
        values = [value for step in steps if (value := number(step.get(key))) is not None]
        found |= {text: f"{max(values):.3g}"} if values else {}
    return found
