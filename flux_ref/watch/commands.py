"""Watching runs on the terminal: their losses against the public band, their rate, what is left, what looks wrong.

    python -m flux_ref.watch RUN [RUN ...]      until they have ended; Ctrl-C leaves
    python -m flux_ref.watch RUN --once         print the panel once, as in a log

Reads what a run's folder holds, and changes nothing. --every S: seconds between looks (2).
"""

import argparse
import itertools
import json
import os
import re
import shutil
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from flux_ref import config_file
from flux_ref.benchmark import alarms, convergence, flops, hardware
from flux_ref.benchmark.alarms import Alarm
from flux_ref.benchmark.convergence import Band
from flux_ref.config import Config
from flux_ref.errors import Refusal, attempt
from flux_ref.formats.jsonl import REACHED, json_object, outcome, records

BOLD, DIM, RED, GREEN, YELLOW, PLAIN = "1", "2", "31", "32", "33", "0"
MARKS = "●◆▲■○◇△□"
LEAST_COLUMNS, MOST_COLUMNS, CHART_ROWS = 40, 100, 12
USUAL = 50  # logged steps whose median rate is the usual one
TAIL = 65_536  # bytes of a log that hold its end
SILENT = 5  # times the usual time between two records
MOST_PAUSE_S = 3600
FIGURES = {"metrics.jsonl": ("loss", "samples_per_s", "data_wait", "peak_memory_gb")}
FIGURES["eval.jsonl"] = ("val_loss", "seconds")


@dataclass(frozen=True)
class Look:
    """What a run's folder says now."""

    folder: Path
    cfg: Config
    band: Band | None
    ranks: int
    device: str
    steps: list[dict]  # of metrics.jsonl
    evaluations: list[dict]
    outcome: str  # how it ended; "" while it has not
    silent_s: float  # since its last record

    @property
    def samples(self) -> int:
        return max((record["samples"] for record in (*self.steps[-1:], *self.evaluations[-1:])), default=0)

    @property
    def rate(self) -> float:
        """The usual samples per second; 0 before the first record."""
        return statistics.median([record["samples_per_s"] for record in self.steps[-USUAL:]] or [0.0])

    @property
    def goal(self) -> tuple[float, str]:
        """Samples at which it should end, and why."""
        cfg, needed = self.cfg, None
        if convergence.is_benchmark(cfg):
            needed = convergence.samples_to_target(cfg.mllog.ruleset, cfg.train.global_batch)
        if needed and self.samples < needed < cfg.train.max_samples:
            return needed, "the reference's mean"
        return cfg.train.max_samples, "train.max_samples"

    @property
    def curve(self) -> list[tuple[int, float]]:
        return [(record["samples"], record["val_loss"]) for record in self.evaluations]

    @property
    def alarms(self) -> list[Alarm]:
        bias = convergence.bias_of_config(self.cfg)
        return alarms.of_losses(self.curve, self.band, bias) + alarms.of_rates(self.steps)

    @property
    def state(self) -> tuple[str, str]:
        """In a word, and its colour."""
        if self.outcome:
            return self.outcome, GREEN if self.outcome == REACHED else BOLD
        if not self.steps:
            return "starting", DIM
        usual_s = self.cfg.train.log_every_samples / max(self.rate, 1e-9)
        pause_s = max((record["seconds"] for record in self.evaluations), default=0.0)
        if self.silent_s > SILENT * usual_s + 2 * pause_s + 10:
            return f"silent for {duration(self.silent_s)}", RED
        return f"training, {duration((self.goal[0] - self.samples) / max(self.rate, 1e-9))} left", BOLD


def look(folder: Path) -> Look:
    """Read a run's folder. Raises: Refusal if it holds none."""
    cfg, environment = config_file.of_run(folder), json_object(folder / "environment.json")
    ranks = environment.get("ranks", 1)
    if type(ranks) is not int or not 0 < ranks < 1e9:
        raise Refusal(f"{folder / 'environment.json'} is damaged (ranks is no number above 0); mend it")
    steps, evaluations = (records(folder / name, figures=figures) for name, figures in FIGURES.items())
    paths = [folder / name for name in FIGURES]
    written = max([path.stat().st_mtime for path in paths if path.exists()] or [time.time()])
    return Look(
        folder,
        cfg,
        convergence.of_config(cfg),
        ranks,
        str(environment.get("device", "")),
        steps,
        evaluations,
        outcome(folder) or broken_off(folder / "result_0.txt"),
        time.time() - written,
    )


def broken_off(log: Path) -> str:
    """How a run ended that has no outcome, from the end of its log; "" while it goes on."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        text = file.read().decode(errors="replace")
    last = max(text.rfind(f'"key": "{key}"') for key in ("init_start", "run_start", "block_start", "eval_start"))
    stop = text.rfind('"key": "run_stop"')
    reason = re.search(r'"reason": ("(?:[^"\\]|\\.)*")', text[stop:]) if stop > last else None
    try:
        return f"ended: {json.loads(reason[1])}"[:40] if reason else ""
    except ValueError:
        raise Refusal(f"{log} is damaged (the reason of its run_stop is no JSON); mend it") from None


def duration(seconds: float) -> str:
    """As people say it: 58 s, 12 min, 3 h 05 min."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def paint(text: str, colour: str, coloured: bool) -> str:
    return f"\x1b[{colour}m{text}\x1b[{PLAIN}m" if coloured else text


def bar(share: float, width: int) -> str:
    full = round(max(0.0, min(1.0, share)) * width)
    return "━" * full + "─" * (width - full)


def cut(line: str, width: int) -> str:
    """Its first `width` columns, without control characters. Colours take no column and all stay."""
    column = itertools.count()
    tokens = re.findall(r"\x1b\[\d+m|[^\x00-\x1f\x7f-\x9f]", line)
    return "".join(token for token in tokens if token[0] == "\x1b" or next(column) < width)


def panel(looks: list[Look], columns: int, coloured: bool) -> str:
    """All of it, as lines of at most so many columns."""
    lines, width = [], max(LEAST_COLUMNS, columns)
    for mark, one in zip(MARKS, looks):
        lines += about(one, mark, width, coloured)
    lines += chart(looks, width, coloured)
    for mark, one in zip(MARKS, looks):
        for alarm in one.alarms:
            head = f"{mark} {alarm.level} at {alarm.samples:,} samples: "
            lines += wrap(head + alarm.text, width, RED if alarm.level == "warning" else YELLOW, coloured)
    return "\n".join(cut(line, columns) for line in lines)


def about(one: Look, mark: str, width: int, coloured: bool) -> list[str]:
    """A run in four lines."""
    state, colour = one.state
    goal, why = one.goal
    share = one.samples / goal
    room = max(8, width - len(state) - 4)
    name = str(one.folder)
    head = f"{mark} {name if len(name) <= room else '…' + name[1 - room :]}"  # its end tells runs apart
    lines = [head + " " * (width - len(head) - len(state)) + paint(state, colour, coloured)]
    count = f"{share:4.0%}  {one.samples:,} of {goal:,.0f} samples ({why})"
    lines.append(f"  {bar(share, max(8, width - len(count) - 4))}  {count}")
    last = one.steps[-1] if one.steps else None
    losses = f"  loss {last['loss']:.4f}" if last else "  no step logged yet"
    if one.evaluations:
        newest, best = one.evaluations[-1], min(loss for _, loss in one.curve)
        losses += f"   validation {newest['val_loss']:.4f} at {newest['samples']:,} (best {best:.4f})"
    target = one.cfg.eval.target
    lines.append(losses + (f"   target {target:g}" if target else ""))
    if last:
        tflop = last["samples_per_s"] * flops.per_sample(one.cfg.model) / one.ranks / 1e12
        gpu = hardware.of_device(one.device)
        mfu = f" (MFU {tflop / gpu.bf16_tflops:.0%})" if gpu else ""
        lines.append(
            f"  {last['samples_per_s']:,.5g} samples/s   {tflop:,.4g} TFLOP/s per rank{mfu}"
            f"   wait {last['data_wait']:.1%}   {last['peak_memory_gb']:.1f} GB"
        )
    return [*lines, ""]


def wrap(text: str, width: int, colour: str, coloured: bool) -> list[str]:
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("   ")
        lines[-1] += f" {word}" if lines[-1].strip() else word
    return [paint(line, colour, coloured) for line in lines]


def chart(looks: list[Look], width: int, coloured: bool) -> list[str]:
    """Validation losses over samples, each run with its mark; the band shaded, the target dashed."""
    points = [(mark, *point) for mark, one in zip(MARKS, looks) for point in one.curve]
    if not points:
        return []
    band = next((one.band for one in looks if one.band), None)
    target = max(one.cfg.eval.target for one in looks)
    columns = width - 9
    most_x = max([1, *(x for _, x, _ in points)])
    if any(not one.outcome for one in looks):
        most_x = max(one.goal[0] for one in looks)
    values = [y for _, _, y in points] + ([target] if target else [])
    low, high = min(values), max(values)
    span = (high - low) or 1e-9
    grid = [[" "] * columns for _ in range(CHART_ROWS)]

    def row(loss: float) -> int:
        return min(CHART_ROWS - 1, max(0, round((high - loss) / span * (CHART_ROWS - 1))))

    for column in range(columns):
        samples = column / (columns - 1) * most_x
        if band and band.samples[0] <= samples <= band.samples[-1] and band.at(samples, "low") <= high:
            for cell in range(row(band.at(samples, "high")), row(band.at(samples, "low")) + 1):
                grid[cell][column] = paint("░", DIM, coloured)
        if target and grid[row(target)][column] == " ":
            grid[row(target)][column] = paint("╌", DIM, coloured)
    for mark, samples, loss in points:
        grid[row(loss)][round(min(1.0, samples / most_x) * (columns - 1))] = mark
    labels = {0: high, row(target): target} if target else {0: high}
    labels.setdefault(CHART_ROWS - 1, low)
    lines = [
        f"{format(labels[i], '7.4f') if i in labels else '':>7} │" + "".join(cells) for i, cells in enumerate(grid)
    ]
    foot = f"░ {band.source}" if band else "validation loss"
    end = f"{most_x:,.0f} samples"
    lines.append(" " * 8 + "└" + "─" * columns)
    lines.append(" " * 9 + foot + " " * max(1, columns - len(foot) - len(end)) + end)
    return [*lines, ""]


def follow(folders: list[Path], every_s: float) -> None:
    """Draw the panel over itself until all runs have ended."""
    sys.stdout.write("\x1b[2J")
    while True:
        looks = [look(folder) for folder in folders]
        columns, rows = shutil.get_terminal_size()
        lines = panel(looks, min(MOST_COLUMNS, columns), "NO_COLOR" not in os.environ).split("\n")
        lines = lines[: rows - 1]  # more would scroll
        sys.stdout.write("\x1b[H" + "".join(f"\x1b[K{line}\n" for line in lines) + "\x1b[J")
        sys.stdout.flush()
        if all(one.outcome for one in looks):
            return
        time.sleep(every_s)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "flux_ref.watch", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--every", type=float, default=2.0, metavar="S")
    args = parser.parse_args(argv)
    return attempt("watch", lambda: show(args.runs, args.once, args.every))


def show(runs: list[Path], once: bool, every_s: float) -> int:
    if not 0 < every_s <= MOST_PAUSE_S:
        raise Refusal(f"--every={every_s:g} must be above 0 and at most {MOST_PAUSE_S} seconds")
    if len(runs) > len(MARKS):
        raise Refusal(f"{len(runs)} runs are too many for one panel; give at most {len(MARKS)}")
    try:
        if once or not sys.stdout.isatty():
            print(panel([look(folder) for folder in runs], 80, coloured=False), flush=True)
        else:
            follow(runs, every_s)
    except UnicodeEncodeError as error:
        raise Refusal(f"stdout ({error.encoding}) cannot show the panel's signs; set PYTHONIOENCODING=utf-8") from None
    except KeyboardInterrupt:
        pass  # the way to leave
    return 0
