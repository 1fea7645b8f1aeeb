"""Targets: configs, logs, records of runs, curves, hardware figures and reference points, all text."""

import csv
import io
import json
import math
import os
import tomllib
from contextlib import suppress
from pathlib import Path
from random import Random

from fuzz.damage import BYTES, JSON, JSON_LINES, TEXT, at, edits, tree, tree_line
from fuzz.engine import Said, Target, command
from made_logs import MadeLog

from flux_ref import config, config_file
from flux_ref.benchmark import convergence
from flux_ref.formats import jsonl
from flux_ref.run import folder as run_folder
from tools.plan import commands as plan
from tools.report import commands as report
from tools.shared import hardware

ROOT = Path(__file__).parents[2]
MICRO = config_file.load(ROOT / "tests" / "micro.toml")
TRAINED = config_file.replace(MICRO, eval__target=0.5, eval__band="", data__train="data/train")
CLAIMING = config_file.replace(TRAINED, run__dir="run")
FIGURES = {
    "metrics.jsonl": ("loss", "samples_per_s", "data_wait", "peak_memory_gb"),
    "eval.jsonl": ("val_loss", "seconds"),
}


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
    (run / "config.toml").write_text(config_file.dump(TRAINED))
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
    found = [jsonl.records(run / name, figures=figures) for name, figures in FIGURES.items()]
    return (*found, jsonl.outcome(run), jsonl.json_object(run / "environment.json"))


def judge_records(folder: Path, found: tuple) -> str:
    """As by json alone. The last line of records may be half a one."""
    run = folder / "run"
    *records, ending, facts = found
    for name, kept in zip(FIGURES, records):
        *lines, last = _content(run / name).split(b"\n")
        wanted = [json.loads(line) for line in lines]
        with suppress(ValueError):
            wanted.append(json.loads(last))
        if kept not in (wanted, wanted[:-1]):
            return f"{name} holds {wanted}"
    wanted = [json.loads(_content(run / name) or "{}") for name in ("outcome.json", "environment.json")]
    return "" if [ending, facts] == [wanted[0].get("outcome", ""), wanted[1]] else "another outcome or environment"


def _content(path: Path) -> bytes:
    """Nothing for a missing file."""
    return path.read_bytes() if path.exists() else b""


def make_unfinished(folder: Path) -> None:
    make_run(folder)
    (folder / "run" / "outcome.json").unlink()
    (folder / "run" / ".lock").write_text(f"process {os.getpid()} on {os.uname().nodename}\n")
    (folder / "run" / "config.toml").write_text(config_file.dump(CLAIMING))


def run_claim(folder: Path) -> list:
    """A run claims the folder of an unfinished one, and resumes its records."""
    with run_folder.claim(CLAIMING, False):
        return jsonl.records(folder / "run" / "metrics.jsonl", 120, ("loss",))


# Benchmark logs and reference points


def make_logs(folder: Path) -> None:
    (folder / "logs").mkdir()
    ours = {"train.caption_drop": 0.1, "model.rope_axes": [16, 56, 56], "rehearsal": False}
    MadeLog(1, evaluations=3, **ours).write(folder / "logs" / "result_0.txt")
    MadeLog(2, evaluations=4).write(folder / "logs" / "result_1.txt")
    (folder / "points.json").write_text((ROOT / "configs" / "closed_smoke_points.json").read_text())


def many(path: Path, random: Random) -> str:
    """A log of very many lines."""
    line = random.choice((b"\0", b"\n", b":::MLLOG {\n", b"x" * 99 + b"\n"))
    path.write_bytes(line * (10 * 2**20 // len(line)))
    return f"10 MiB of {line[:12]!r}"


def run_report(folder: Path) -> Said:
    return command(report.main, ["logs", "--points=points.json", "--json=figures.json"])


def judge_report(folder: Path, said: Said) -> str:
    """Two runs are no valid result, whatever they hold."""
    figures = json.loads(Path("figures.json").read_text())
    valid = [system["system"] for system in figures["systems"] if system["valid"]]
    points = json.loads(Path("points.json").read_text()).values()
    is_right = said.code == 1 and not valid and all(point["Benchmark"] == "flux1" for point in points)
    return "" if is_right else f"{valid} are valid, exit code {said.code}"


# Tables of figures


def make_curves(folder: Path) -> None:
    with convergence.PUBLIC.open() as file:
        lines = [line for line in file if line.startswith(("global_batch", "512,", "1024,"))]
    (folder / "curves.csv").write_text("".join(lines[:1] + lines[1::4]))


def run_curves(folder: Path) -> list:
    return [convergence.band(folder / "curves.csv", batch, "own") for batch in (512, 700, 1024, 2048)]


def judge_curves(folder: Path, found: list) -> str:
    """Whatever is accepted consists of losses above 0, at samples that the file has, in order."""
    rows = csv.DictReader(io.StringIO((folder / "curves.csv").read_bytes().decode(), newline=""))
    samples = {int(float(row["samples"])) for row in rows}
    for curves in filter(None, found):
        losses = [*curves.low, *curves.median, *curves.high]
        at = list(curves.samples)
        if not all(0 < loss < math.inf for loss in losses) or at != sorted(set(at)) or not {*map(int, at)} <= samples:
            return f"{losses} at {at}"
    return ""


def make_plan(folder: Path) -> None:
    (folder / "own.toml").write_text(hardware.TABLE.read_text())
    make_config(folder)


def sizes(path: Path, random: Random) -> str:
    """One to three sizes of the model or the batches become large."""
    keys = [key for key, kind in config.TYPES.items() if kind is int and key.startswith(("model.", "train.", "eval."))]
    chosen = {random.choice(keys): 2 ** random.randrange(1, 64) for _ in range(random.randrange(1, 4))}
    values = config.flat(MICRO) | chosen
    path.write_text("".join(f"{key} = {config_file._toml(value)}\n" for key, value in values.items()))
    return str(chosen)


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


RUN = at("run/*", TEXT) | at("run/*.jsonl", edits(tree_line=tree_line)) | at("run/*.json", edits(tree=tree))
LOGS = at("logs/result_*", BYTES | {"many": many}) | at("result_0.txt", JSON_LINES, "log_")
PLAN = at("*.toml", TEXT) | at("one.toml", {"sizes": sizes})
CLAIMED = ("run", "run/.lock", "run/config.toml")
TARGETS = [
    Target("config", make_config, at("one.toml", TEXT), run_config, read_config),
    Target("records", make_run, RUN, run_records, judge=judge_records),
    Target("claim", make_unfinished, at(".lock", TEXT), run_claim, writes=CLAIMED),
    Target(
        "report",
        make_logs,
        LOGS | at("points.json", JSON, "points_"),
        run_report,
        judge=judge_report,
        writes=("figures.json",),
    ),
    Target("curves", make_curves, at("curves.csv", TEXT), run_curves, judge=judge_curves),
    Target("plan", make_plan, PLAN, run_plan, judge=judge_plan, writes=("plan.json",)),
]
