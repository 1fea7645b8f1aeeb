"""Watch runs on the terminal: losses beside the public band, rate, remaining time, alarms.

    python -m tools.watch RUN [RUN ...]      until the runs have ended; Ctrl-C leaves
    python -m tools.watch RUN --once         print the panel once
    python -m tools.watch RUN --tensorboard  in place of the panel, keep RUN/tensorboard up to date

Changes no file that a run has written. --every S: seconds between two readings (2).
"""

import itertools
import json
import os
import re
import shutil
import statistics
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

from flux_ref import config_file
from flux_ref.benchmark import alarms, convergence
from flux_ref.benchmark.alarms import Alarm
from flux_ref.benchmark.convergence import Band
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.formats import outside
from flux_ref.formats.jsonl import REACHED, outcome, records
from flux_ref.run import loss_chart
from flux_ref.run.attempt import attempt
from flux_ref.run.forecast import duration
from flux_ref.run.options import Options, between
from tools.shared import reference_samples

BOLD = "1"
DIM = "2"
RED = "31"
GREEN = "32"
YELLOW = "33"
# Each run's mark and colour. The colours can be read on a light and on a dark ground.
MARKS = {
    "●": "38;5;33",
    "◆": "38;5;208",
    "▲": "38;5;35",
    "■": "38;5;134",
    "○": "38;5;203",
    "◇": "38;5;37",
    "△": "38;5;137",
    "□": "38;5;205",
}
LEAST_COLUMNS = 40
MOST_COLUMNS = 100
CHART_ROWS = 12
USUAL = 50  # the usual rate is the median of so many logged steps
TAIL = 65_536  # bytes to read from the end of a log
SILENT = 5  # a run is silent after so many times the usual time between two records
FIGURES = {
    "metrics.jsonl": ("loss", "samples_per_s", "data_wait", "peak_memory_gb"),
    "eval.jsonl": ("val_loss", "seconds"),
}
LOSS = "  loss {loss:.4f}"
SPEED = "  {samples_per_s:,.5g} samples/s   wait {data_wait:.1%}   {peak_memory_gb:.1f} GB"
COLOUR_CODE = r"\x1b\[[\d;]+m"


@dataclass(frozen=True)
class Look:
    """What the files of a run say now."""

    folder: Path
    cfg: Config
    band: Band | None
    steps: list[dict]  # of metrics.jsonl
    evaluations: list[dict]  # of eval.jsonl
    outcome: str  # how the run ended; "" while it goes on
    written: float  # when the last record was, by the file system's clock
    since: float  # the same by a monotonic clock

    @property
    def samples(self) -> int:
        newest = [*self.steps[-1:], *self.evaluations[-1:]]
        return max((record["samples"] for record in newest), default=0)

    @property
    def rate(self) -> float:
        """The usual samples per second; 0 before the first record."""
        return statistics.median([record["samples_per_s"] for record in self.steps[-USUAL:]] or [0.0])

    @property
    def goal(self) -> tuple[float, str]:
        """Samples at which the run should end, and why."""
        needed = reference_samples.samples_to_target(self.cfg)
        most = self.cfg.train.max_samples
        if needed is not None and self.samples < needed < most:
            return needed, "the reference's mean"
        return most, "train.max_samples"

    @property
    def curve(self) -> list[tuple[int, float]]:
        return [(record["samples"], record["val_loss"]) for record in self.evaluations]

    @property
    def alarms(self) -> list[Alarm]:
        return alarms.of_losses(self.curve, self.band) + alarms.of_rates(self.steps)

    @property
    def state(self) -> tuple[str, str]:
        """The state in words, and its colour."""
        if self.outcome:
            return self.outcome, GREEN if self.outcome == REACHED else BOLD
        if not self.steps:
            return "starting", DIM
        rate = max(self.rate, 1e-9)
        usual_s = self.cfg.train.log_every_samples / rate
        pause_s = max((record["seconds"] for record in self.evaluations), default=0.0)
        silent_s = time.monotonic() - self.since
        if silent_s > SILENT * usual_s + 2 * pause_s + 10:
            return f"silent for {duration(silent_s)}", RED
        return f"training, {duration((self.goal[0] - self.samples) / rate)} left", BOLD

    @property
    def progress(self) -> str:
        """How far the run has come, in words."""
        goal, why = self.goal
        return f"{self.samples / goal:4.0%}  {self.samples:,} of {goal:,.0f} samples ({why})"


def look(folder: Path, before: Look | None = None) -> Look:
    """Read a run's folder. Raises: Refusal if the folder holds no run or a damaged file.

    before: the look before this one. Clocks that are set between two looks then change nothing.
    """
    cfg = config_file.of_run(folder)
    files = [folder / name for name in FIGURES if (folder / name).exists()]
    written = max((file.stat().st_mtime for file in files), default=time.time())
    since = time.monotonic()
    if before is None:
        since -= max(0.0, time.time() - written)
    elif before.written == written:
        since = before.since
    return Look(
        folder=folder,
        cfg=cfg,
        band=convergence.of_config(cfg),
        steps=records(folder / "metrics.jsonl", figures=FIGURES["metrics.jsonl"]),
        evaluations=records(folder / "eval.jsonl", figures=FIGURES["eval.jsonl"]),
        outcome=outcome(folder) or broken_off(folder / "result_0.txt"),
        written=written,
        since=since,
    )


def broken_off(log: Path) -> str:
    """How a run without an outcome ended, from the end of its log; "" while it goes on."""
    if not log.exists():
        return ""
    with outside.opened(log, "log") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        text = file.read().decode(errors="replace")
    last_start = text.rpartition('"key": "init_start"')[2]
    stop = re.search(r'"key": "run_stop".*"reason": ("(?:[^"\\]|\\.)*")', last_start)
    try:
        return f"ended: {json.loads(stop[1]).partition(';')[0]}"[:40] if stop else ""
    except ValueError:
        raise Refusal(f"{log} is damaged (the reason of its run_stop is no JSON); mend it") from None


def paint(text: str, colour: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m"


def cut(line: str, width: int) -> str:
    """The first `width` columns of a line, without control characters. Colour codes stay and take no column."""
    column = itertools.count()
    tokens = re.findall(COLOUR_CODE + r"|[^\x00-\x1f\x7f-\x9f]", line)
    return "".join(token for token in tokens if token[0] == "\x1b" or next(column) < width)


def panel(looks: list[Look], columns: int, coloured: bool) -> str:
    """The whole panel, as lines of at most `columns` columns."""
    lines = []
    width = max(LEAST_COLUMNS, columns)
    bar_width = max(8, width - 4 - max(len(run.progress) for run in looks))
    for mark, run in zip(MARKS, looks):
        lines += about(run, mark, width, bar_width)
    if any(run.curve for run in looks):
        lines += chart(looks, width)
    for mark, run in zip(MARKS, looks):
        for alarm in run.alarms:
            text = f"{mark} {alarm.level} at {alarm.samples:,} samples: {alarm.text}"
            colour = RED if alarm.level == "warning" else YELLOW
            wrapped = textwrap.wrap(text, width, subsequent_indent="    ", break_on_hyphens=False)
            lines += [paint(line, colour) for line in wrapped]
    text = "\n".join(cut(line, columns) for line in lines)
    return text if coloured else re.sub(COLOUR_CODE, "", text)


def about(run: Look, mark: str, width: int, bar_width: int) -> list[str]:
    """The state of a run in four lines. bar_width: columns of a bar of 100 %."""
    state, colour = run.state
    name = str(run.folder)[-max(8, width - len(state) - 4) :]  # the end of a path tells runs apart
    bar = "━" * round(min(1.0, run.samples / run.goal[0]) * bar_width)
    losses = "  no step logged yet"
    speed = []
    if run.steps:
        losses = LOSS.format(**run.steps[-1])
        speed = [SPEED.format(**run.steps[-1])]
    if run.curve:
        samples, loss = run.curve[-1]
        best = min(loss for _, loss in run.curve)
        losses += f"   validation {loss:.4f} at {samples:,} (best {best:.4f})"
    if run.cfg.eval.target:
        losses += f"   target {run.cfg.eval.target:g}"
    head = f"{paint(mark, MARKS[mark])} {name:<{width - len(state) - 2}}{paint(state, colour)}"
    return [head, f"  {bar:─<{bar_width}}  {run.progress}", losses, *speed, ""]


def chart(looks: list[Look], width: int) -> list[str]:
    """Validation losses over samples, with a mark for each run; the band is shaded, the target dashed.

    The loss axis holds all losses but those at the start of a run, which get an arrow in the highest row.
    """
    band = next((run.band for run in looks if run.band), None)
    target = max(run.cfg.eval.target for run in looks)
    columns = width - 9
    goes_on = any(not run.outcome for run in looks)
    most_x = max(run.goal[0] if goes_on else max(1, run.samples) for run in looks)
    low, high = loss_chart.span([run.curve for run in looks], target)
    grid = [[" "] * columns for _ in range(CHART_ROWS)]

    def row(loss: float) -> int:
        """Below 0 or at least CHART_ROWS: outside the chart."""
        return round((high - loss) / (high - low) * (CHART_ROWS - 1))

    def column(samples: float) -> int:
        return round(min(1.0, samples / most_x) * (columns - 1))

    if target:
        grid[row(target)] = [paint("╌", DIM)] * columns
    for x in range(columns):
        samples = x / (columns - 1) * most_x
        if band and band.samples[0] <= samples <= band.samples[-1]:
            top = max(0, row(band.at(samples, "high")))
            for y in range(top, min(CHART_ROWS, row(band.at(samples, "low")) + 1)):
                grid[y][x] = paint("░", DIM)
    for (mark, colour), run in zip(MARKS.items(), looks):
        for samples, loss in run.curve:
            y = row(loss)
            grid[max(0, y)][column(samples)] = paint(mark if y >= 0 else "↑", colour)
    labels = {}
    for loss, text in loss_chart.ticks(low, high, 5).items():
        labels[row(loss)] = text if len(text) < 8 else f"{loss:.1e}"
    lines = [f"{labels.get(y, ''):>7} │{''.join(cells)}" for y, cells in enumerate(grid)]
    axis = ["─"] * columns
    numbers = " " * (columns + 1)
    for samples, text in loss_chart.ticks(0, most_x, columns // 12).items():
        axis[column(samples)] = "┴"
        start = min(column(samples) - len(text) // 2, columns - len(text)) + 1
        numbers = numbers[:start] + text + numbers[start + len(text) :]
    foot = f"░ {band.source}" if band else "validation loss"
    foot = f"{foot:{columns - 16}}training samples"
    margin = " " * 8
    return [*lines, f"{margin}└{''.join(axis)}", f"{margin}{numbers}", f"{margin} {foot}", ""]


def follow(folders: list[Path], every_s: float) -> None:
    """Draw the panel again and again in the same place until all runs have ended."""
    sys.stdout.write("\x1b[2J")
    looks: list[Look | None] = [None] * len(folders)
    while True:
        looks = [look(folder, before) for folder, before in zip(folders, looks)]
        columns, rows = shutil.get_terminal_size()
        lines = panel(looks, min(MOST_COLUMNS, columns), not os.environ.get("NO_COLOR")).split("\n")
        lines = lines[: rows - 1]  # the terminal would scroll
        sys.stdout.write("\x1b[H" + "".join(f"\x1b[K{line}\n" for line in lines) + "\x1b[J")
        sys.stdout.flush()
        if all(run.outcome for run in looks):
            return
        time.sleep(every_s)


def keep_boards(folders: list[Path], every_s: float, once: bool) -> None:
    """Keep the folders that TensorBoard reads up to date until all runs have ended. once: write them and return."""
    from tools.watch.tensorboard import Board  # of an optional package

    boards = [Board(folder) for folder in folders]
    for folder in folders:
        print(f"tensorboard --logdir {folder}", flush=True)
    while not all([board.update() for board in boards]) and not once:
        time.sleep(every_s)


def main(argv: list[str]) -> int:
    return attempt("watch", lambda: show(argv))


def show(argv: list[str]) -> int:
    """Raises: Refusal."""
    parser = Options("python -m tools.watch", __doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--once", action="store_true")
    parser.add_argument("--tensorboard", action="store_true")
    parser.add_argument("--every", type=between(0.01, 3600, float), default=2.0, metavar="S")
    args = parser.parse_args(argv)
    if len(args.runs) > len(MARKS):
        raise Refusal(f"{len(args.runs)} runs are too many for one panel; give at most {len(MARKS)}")
    try:
        if args.tensorboard:
            keep_boards(args.runs, args.every, args.once)
        elif args.once or not sys.stdout.isatty():
            print(panel([look(folder) for folder in args.runs], 80, coloured=False), flush=True)
        else:
            follow(args.runs, args.every)
    except KeyboardInterrupt:
        pass  # Ctrl-C is how a user leaves
    return 0
