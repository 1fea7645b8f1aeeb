"""Targets: configs, logs, records of runs, curves, hardware figures and reference points, all text."""

import csv
import io
import json
import math
import os
import random
import tomllib
from pathlib import Path

from fuzz.damage import BYTES, JSON, JSON_LINES, TEXT, at
from fuzz.engine import Said, Target, command
from made_logs import MadeLog

from flux_ref import config, config_file
from flux_ref.benchmark import convergence
from flux_ref.formats import jsonl
from flux_ref.run import folder as run_folder
from tools.plan import commands as plan
from tools.report import commands as report
from tools.report import result_log, score
from tools.shared import hardware
from tools.watch import commands as watch

ROOT = Path(__file__).parents[2]
MICRO = config_file.load(ROOT / "tests" / "micro.toml")


# Configs


def make_config(folder: Path) -> None:
    (folder / "one.toml").write_text(config_file.dump(MICRO))


def run_config(folder: Path) -> dict[str, object]:
    return config.flat(config_file.load(folder / "one.toml"))


def read_config(folder: Path) -> dict[str, object]:
    """The config by tomllib alone, from the bytes; what it lacks has its default."""
    tree = tomllib.loads((folder / "one.toml").read_bytes().decode())
    given = {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}
    found = config.flat(config.Config()) | given
    return {key: _typed(value, config.TYPES[key]) for key, value in found.items()}


def _typed(value: object, kind: type) -> object:
    return float(value) if kind is float else tuple(value) if isinstance(value, list) else value


# The records of a run


def make_run(folder: Path) -> None:
    """A run that came to its end."""
    run = folder / "run"
    run.mkdir()
    cfg = config_file.replace(MICRO, eval__target=0.5, eval__band="", data__train="data/train")
    (run / "config.toml").write_text(config_file.dump(cfg))
    facts = {"ranks": 2, "nodes": ["a", "a"], "device": "NVIDIA H200", "torch": "2.11.0"}
    (run / "environment.json").write_text(json.dumps(facts))
    step = {"loss": 1.5, "samples_per_s": 100.0, "data_wait": 0.01, "peak_memory_gb": 2.0, "grad_norm": 1.0}
    records = [{"step": i, "samples": 12 * i, **step, "samples_per_s": 100.0 + i % 3} for i in range(1, 40)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    losses = [{"samples": 36 * i, "val_loss": 1 / i, "seconds": 0.5, "losses": [1.0] * 8} for i in range(1, 4)]
    (run / "eval.jsonl").write_text("".join(json.dumps(record) + "\n" for record in losses))
    (run / "outcome.json").write_text(json.dumps({"outcome": jsonl.REACHED, "samples": 108}))
    MadeLog(1, evaluations=3).write(run / "result_0.txt")


def run_records(folder: Path) -> tuple:
    """What every reader of these files gets: records, outcome, environment."""
    run = folder / "run"
    found = [jsonl.records(run / name, figures=figures) for name, figures in watch.FIGURES.items()]
    return (*found, jsonl.outcome(run), jsonl.json_object(run / "environment.json"))


def read_records(folder: Path) -> tuple:
    """By json alone. The last line may be half a record; other lines must be records."""
    found = [_records(folder / "run" / name, figures) for name, figures in watch.FIGURES.items()]
    files = [_content(folder / "run" / name) for name in ("outcome.json", "environment.json")]
    ending, facts = (json.loads(content) if content else {} for content in files)
    ending = ending["outcome"] if files[0] or ending else ""
    if not isinstance(facts, dict) or ending not in ("", jsonl.REACHED, jsonl.ENDED):
        raise ValueError("outcome or environment")
    return (*found, ending, facts)


def _records(path: Path, figures: tuple[str, ...]) -> list[dict]:
    lines, kept = _content(path).split(b"\n"), []
    for i, line in enumerate(lines):
        try:
            record = json.loads(line.decode())
            wrong = [key for key in ("samples", *figures) if not _is_number(record[key])]
        except (ValueError, KeyError, TypeError, IndexError):
            wrong = [path.name]
        if not wrong and record["samples"] >= 0:
            kept.append(record)
        elif i < len(lines) - 1:
            raise ValueError(f"{path.name} line {i + 1}")
    return kept


def _content(path: Path) -> bytes:
    """None for a missing file, as for an empty one."""
    if not path.exists():
        return b""
    if not path.is_file():
        raise ValueError("no file")
    return path.read_bytes()


def _is_number(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and abs(value) < 1e100


def run_watch(folder: Path) -> Said:
    return command(watch.main, ["run", "--once"])


def judge_watch(folder: Path, said: Said) -> str:
    """The panel of other records is another; it must have lines of 80 columns."""
    for name, figures in watch.FIGURES.items():
        _records(folder / "run" / name, figures)
    return "" if max(map(len, said.out.splitlines())) <= 80 else "a line is too long"


def make_unfinished(folder: Path) -> None:
    make_run(folder)
    (folder / "run" / "outcome.json").unlink()
    cfg = config_file.replace(config_file.of_run(folder / "run"), run__dir="run")
    (folder / "run" / ".lock").write_text(f"process {os.getpid()} on {os.uname().nodename}\n")
    (folder / "run" / "config.toml").write_text(config_file.dump(cfg))


def run_claim(folder: Path) -> object:
    """A run claims the folder of an unfinished one, and resumes its records."""
    run = folder / "run"
    cfg = config_file.replace(MICRO, eval__target=0.5, eval__band="", data__train="data/train", run__dir="run")
    with run_folder.claim(cfg, False) as start:
        if not start.is_new:
            return jsonl.records(run / "metrics.jsonl", 120, ("loss",))
    return []


def judge_claim(folder: Path, found: object) -> str:
    if not (folder / "run" / "metrics.jsonl").exists():
        return ""
    want = [record for record in _records(folder / "run" / "metrics.jsonl", ("loss",)) if record["samples"] <= 120]
    return "" if found == want else "other records"


# Benchmark logs


def make_logs(folder: Path) -> None:
    (folder / "logs").mkdir()
    ours = {"train.caption_drop": 0.1, "model.rope_axes": [16, 56, 56], "rehearsal": False}
    MadeLog(1, evaluations=3, **ours).write(folder / "logs" / "result_0.txt")
    MadeLog(2, evaluations=4).write(folder / "logs" / "result_1.txt")


def many(folder: Path, random: random.Random) -> str:
    """A log of very many lines."""
    line = random.choice((b"\0", b"\n", b":::MLLOG {\n", b"x" * 99 + b"\n"))
    (folder / "logs" / "result_1.txt").write_bytes(line * (10 * 2**20 // len(line)))
    return f"10 MiB of {line[:12]!r}"


def run_logs(folder: Path) -> list[tuple]:
    """The figures of each log, as a report counts them; only "faulty" for a log that does not count."""
    found = []
    for path in sorted((folder / "logs").glob("result_*")):
        run = score.measure(result_log.read(path))
        found.append("faulty" if run.faults else (run.run_ms, run.samples, run.val_curve))
    return found


def judge_logs(folder: Path, found: list) -> str:
    """A log that counts has the figures that json finds in its lines."""
    for path, figures in zip(sorted((folder / "logs").glob("result_*")), found, strict=True):
        if figures != "faulty":
            text = path.read_text(encoding="latin-1")
            entries = [json.loads(line.rpartition(":::MLLOG ")[2]) for line in text.split("\n") if ":::MLLOG " in line]
            times = {key: [e["time_ms"] for e in entries if e["key"] == key] for key in ("run_start", "run_stop")}
            keys, losses = [entry["key"] for entry in entries], {}
            for entry in entries[keys.index("run_start") : keys.index("run_stop")]:
                if entry["key"] == "eval_accuracy":
                    losses.setdefault(entry["metadata"]["samples_count"], entry["value"])
            if figures[2] != sorted(losses.items()) or figures[0] != times["run_stop"][0] - times["run_start"][-1]:
                return f"{path.name} differs from {sorted(losses.items())}, {times}"
    return ""


def run_report(folder: Path) -> Said:
    return command(report.main, ["logs", "--json=figures.json"])


def judge_report(folder: Path, said: Said) -> str:
    """Two runs are no valid result, whatever they hold."""
    figures = json.loads((folder / "figures.json").read_text())
    valid = [system["system"] for system in figures["systems"] if system["valid"]]
    return "" if said.code == 1 and not valid else f"{valid} are valid, exit code {said.code}"


# Tables of figures


def make_points(folder: Path) -> None:
    make_logs(folder)
    content = (ROOT / "configs" / "closed_smoke_points.json").read_text()
    (folder / "points.json").write_text(content)


def run_points(folder: Path) -> Said:
    return command(report.main, ["logs", "--points=points.json"])


def judge_points(folder: Path, said: Said) -> str:
    points = json.loads((folder / "points.json").read_text()).values()
    return "" if said.code == 1 and all(point["Benchmark"] == "flux1" for point in points) else "no points"


def make_curves(folder: Path) -> None:
    with convergence.PUBLIC.open() as file:
        lines = [line for line in file if line.startswith(("global_batch", "512,", "1024,"))]
    (folder / "curves.csv").write_text("".join(lines[:1] + lines[1::4]))


def run_curves(folder: Path) -> tuple:
    found = [convergence.band(folder / "curves.csv", batch, "own") for batch in (512, 700, 1024, 2048)]
    return tuple(found)


def judge_curves(folder: Path, found: tuple) -> str:
    """Whatever is accepted consists of finite losses in order, at samples that the file has."""
    rows = list(csv.DictReader(io.StringIO((folder / "curves.csv").read_bytes().decode(), newline="")))
    samples = {float(row["samples"]) for row in rows}
    for curves in filter(None, found):
        figures = [*curves.low, *curves.median, *curves.high]
        if not all(math.isfinite(figure) and figure > 0 for figure in figures):
            return f"{figures} are not all above 0"
        if list(curves.samples) != sorted(set(curves.samples)) or not {*map(float, curves.samples)} <= {
            *map(int, samples)
        }:
            return f"{curves.samples} are not in the file"
    return ""


def make_plan(folder: Path) -> None:
    (folder / "own.toml").write_text(hardware.TABLE.read_text())
    make_config(folder)


def sizes(folder: Path, random: random.Random) -> str:
    """One to three sizes of the model or the batches become large."""
    keys = [key for key, kind in config.TYPES.items() if kind is int and key.startswith(("model.", "train.", "eval."))]
    chosen = {random.choice(keys): 2 ** random.randrange(1, 64) for _ in range(random.randrange(1, 4))}
    values = config.flat(MICRO) | chosen
    (folder / "one.toml").write_text("".join(f"{key} = {config_file._toml(value)}\n" for key, value in values.items()))
    return ", ".join(f"{key}={value}" for key, value in chosen.items())


def run_plan(folder: Path) -> Said:
    """The whole plan from a config and a table of hardware."""
    return command(plan.main, ["one.toml", "--gpus=4", "--gpu=h200", "--hardware=own.toml", "--json=plan.json"])


def judge_plan(folder: Path, said: Said) -> str:
    figures = json.loads((folder / "plan.json").read_text())
    wanted = ("total", "disk", "checkpoint", *(("samples_per_s", "evaluation") if said.code == 0 else ()))
    wrong = [name for name in wanted if not isinstance(figures[name], (int, float)) or not figures[name] >= 0]
    run_config(folder)
    hardware.load("h200", folder / "own.toml")
    return f"{wrong} are no figures" if wrong else ""


RUN = at("run/*", TEXT) | {
    "tree_of_metrics": at("metrics.jsonl", JSON_LINES)["tree_line"],
    "tree_of_eval": at("eval.jsonl", JSON_LINES)["tree_line"],
    "tree_of_outcome": at("outcome.json", JSON)["tree"],
    "tree_of_environment": at("environment.json", JSON)["tree"],
}
UNFINISHED = {name: hurt for name, hurt in RUN.items() if name != "tree_of_outcome"}
LOGS = at("logs/result_*", BYTES) | {"many": many} | at("result_0.txt", JSON_LINES, "log_")
PLAN = at("*.toml", TEXT) | dict.fromkeys(("sizes", "sizes_too", "sizes_as_well"), sizes)
CLAIMED = ("run", "run/.lock", "run/config.toml")
TARGETS = [
    Target("config", make_config, at("one.toml", TEXT), run_config, read_config, weight=2),
    Target("records", make_run, RUN, run_records, read_records),
    Target("watch", make_run, RUN, run_watch, judge=judge_watch, weight=2),
    Target("claim", make_unfinished, UNFINISHED, run_claim, judge=judge_claim, writes=CLAIMED),
    Target("logs", make_logs, LOGS, run_logs, judge=judge_logs, weight=2),
    Target("report", make_logs, LOGS, run_report, judge=judge_report, writes=("figures.json",)),
    Target("points", make_points, at("points.json", JSON), run_points, judge=judge_points, weight=0.5),
    Target("curves", make_curves, at("curves.csv", TEXT), run_curves, judge=judge_curves),
    Target("plan", make_plan, PLAN, run_plan, judge=judge_plan, writes=("plan.json",), weight=0.3),
]
