"""The panel: what it says of a folder, at 80 columns, and on a real terminal."""

import contextlib
import json
import math
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT

from flux_ref import config_file
from flux_ref.benchmark import convergence
from flux_ref.run import loss_chart
from tools.watch import commands as watch

BATCH = 1024
ALIVE = {"samples": 4096, "val_loss": 0.6, "seconds": 6.0}


def lines_of(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def put(tmp_path):
    """put(name, samples, ...) makes a run's folder that has come so far along the public median."""

    def make(name: str, samples: int, factor: float = 1.0, outcome: str = "", age_s: float = 0) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        overrides = ["--optim.lr=1.85e-4", "--optim.warmup_steps=0"]
        cfg = config_file.load(ROOT / "configs/schnell_gbs1024.toml", overrides)
        (folder / "config.toml").write_text(config_file.dump(cfg))
        band = convergence.public_band(BATCH)
        step = {"loss": 0.6, "samples_per_s": 1600.0, "data_wait": 0.01, "peak_memory_gb": 120.25}
        steps = [step | {"samples": at} for at in range(BATCH * 10, samples + 1, BATCH * 10)]
        curve = [(at, loss * factor) for at, loss in zip(band.samples, band.median) if at <= samples]
        evaluations = [{"samples": at, "val_loss": loss, "seconds": 6.0} for at, loss in curve]
        for file, records in (("metrics.jsonl", steps), ("eval.jsonl", evaluations)):
            (folder / file).write_text(lines_of(records))
            then = time.time() - age_s
            os.utime(folder / file, (then, then))
        if outcome:
            (folder / "outcome.json").write_text(json.dumps({"outcome": outcome}))
        return folder

    return make


def shown(*folders: Path, width: int = 80) -> str:
    text = watch.panel([watch.look(folder) for folder in folders], width, coloured=False)
    assert max(map(len, text.splitlines())) <= width
    return text


def test_a_run_under_way(put):
    text = shown(put("run", 5_000_000))
    median = convergence.public_band(BATCH).at(4_980_736, "median")
    for words in (
        "61%  4,997,120 of 8,247,827 samples (the reference's mean)",
        f"validation {median:.4f} at 4,980,736",
        "target 0.586",
        "1,600 samples/s   wait 1.0%   120.2 GB\n",
        "░ public MLPerf v5.1 runs at batch 1024",
        "╌",
    ):
        assert words in text, words
    assert re.search(r"run +training, 34 min left\n", text) and text.count("●") >= 12 and "warning" not in text


def test_states(put):
    assert "silent for 40 min" in shown(put("silent", 1_000_000, age_s=2400))
    assert "target reached" in shown(put("done", 3_000_000, outcome="target reached", age_s=2400))
    assert "starting" in shown(put("new", 0))


def test_alarms_are_told(put):
    text = shown(put("bad", 2_000_000, factor=1.05))
    assert "● warning at 524,288 samples: validation loss" in text
    slow = put("slow", 1_000_000)
    records = [json.loads(line) for line in (slow / "metrics.jsonl").read_text().splitlines()]
    records[60:] = [record | {"samples_per_s": 800.0} for record in records[60:]]
    (slow / "metrics.jsonl").write_text(lines_of(records))
    assert [(alarm.kind, alarm.level) for alarm in watch.look(slow).alarms] == [("slow", "note")]


def test_several_runs_share_a_chart(put):
    """A mark and a colour for each, bars of one length."""
    folders = put("one", 3_000_000), put("two", 2_000_000, factor=1.01), put("long", 16_000_000)
    text = shown(*folders, width=100)
    assert text.count("│") == watch.CHART_ROWS and text.count("◆") > 3
    assert len({len(bar) for bar in re.findall("[━─]{4,}(?=  )", text)}) == 1
    coloured = watch.panel([watch.look(folder) for folder in folders], 100, coloured=True)
    for mark in "●◆▲":
        assert coloured.count(mark) == coloured.count(f"\x1b[{watch.MARKS[mark]}m{mark}") > 0


def test_marks_and_band_are_at_their_places(put):
    """The chart against its own numbers: columns are samples, rows losses. Half a row is rounding."""
    for factor in (1.0, 1.5, 0.5):  # in the band, above all of the band, below all of the band
        folder = put(f"run_{factor}", 5_000_000, factor=factor)
        evaluations = folder / "eval.jsonl"
        evaluations.write_text(json.dumps(ALIVE | {"samples": 0, "val_loss": 3.0}) + "\n" + evaluations.read_text())
        one = watch.look(folder)
        rows = [line.partition("│")[2] for line in shown(folder).splitlines() if "│" in line]
        low, high = loss_chart.span([one.curve], one.cfg.eval.target)
        height = (high - low) / (len(rows) - 1)
        width = one.goal[0] / (len(rows[0]) - 1)
        cells = [(x * width, high - y * height, cell) for y, line in enumerate(rows) for x, cell in enumerate(line)]
        for samples, loss in one.curve:
            near = [c for x, y, c in cells if abs(x - samples) <= width / 2 and abs(y - min(loss, high)) <= height / 2]
            assert {*near} & {*"●↑"}, (factor, samples)
        assert rows[0][0] == "↑"
        shaded = [(samples, loss) for samples, loss, cell in cells if cell == "░"]
        assert len(shaded) > 50 or factor != 1.0
        for samples, loss in shaded:
            assert one.band.at(samples, "low") - height <= loss <= one.band.at(samples, "high") + height, factor


DAMAGE = [
    *((name, None) for name in ("result_0.txt", "outcome.json")),  # a folder of this name
    *((name, b"\xff\xfe\n") for name in ("metrics.jsonl", "eval.jsonl", "outcome.json", "config.toml")),
    ("outcome.json", b'["x"]'),
    ("eval.jsonl", json.dumps(ALIVE | {"val_loss": math.nan}).encode() + b"\n"),
    ("eval.jsonl", b'{"samples": 4096}\n'),
    ("metrics.jsonl", b'{"samples": 4096, "loss": null}\n'),
    ("result_0.txt", b':::MLLOG {"key": "run_stop", "metadata": {"reason": "a\\q"}}\n'),
    ("config.toml", b"train.seed = 1\n"),
]


def test_damage_is_one_line_with_the_files_name(put, tmp_path, capsys):
    wrong = []
    for i, (name, content) in enumerate(DAMAGE):
        path = put(f"run_{i}", 100_000) / name
        path.unlink(missing_ok=True)
        path.mkdir() if content is None else path.write_bytes(content)
        code = watch.main([str(path.parent)])
        err = capsys.readouterr().err
        if code != 2 or not err.startswith("watch: ") or err.count("\n") != 1 or name not in err:
            wrong.append((name, content, code, err))
    assert not wrong
    assert watch.main([str(tmp_path / "none")]) == 2 and "holds no run" in capsys.readouterr().err
    assert watch.main([str(path.parent)] * 20) == 2 and "at most 8" in capsys.readouterr().err


def test_a_run_that_broke_off_has_ended_until_it_goes_on(put):
    """After its first evaluation, while it wrote the second."""
    folder = put("run", 0)
    (folder / "eval.jsonl").write_text(json.dumps(ALIVE | {"samples": 0}) + "\n" + '{"sam')
    stop = ':::MLLOG {"key": "run_stop", "metadata": {"reason": "loss is not \\"finite\\""}}\n'
    (folder / "result_0.txt").write_text(':::MLLOG {"key": "init_start"}\n' + stop)
    text = shown(folder)
    assert 'ended: loss is not "finite"' in text and "validation 0.6000 at 0" in text and "│●" in text
    with (folder / "result_0.txt").open("a") as log:
        log.write(':::MLLOG {"key": "init_start"}\n')
    assert "starting" in shown(folder)


def test_a_clock_that_is_set_does_not_silence_a_run(put, monkeypatch):
    """Neither for a first look at records from the future, nor between two looks."""
    folder, real = put("run", 1_000_000), time.time
    before = watch.look(folder)
    for seconds in (-7200, 7200):
        monkeypatch.setattr(time, "time", lambda by=seconds: real() + by)
        assert watch.look(folder, before).since == before.since, seconds
        assert watch.look(folder).since <= time.monotonic()


def test_a_stdout_that_cannot_take_the_panel(put):
    command = [sys.executable, "-m", "tools.watch", str(put("run", 1_000_000))]
    env = os.environ | {"PYTHONUNBUFFERED": ""}  # Python buffers, as it usually does
    with open("/dev/full", "w") as file:
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.PIPE, env=env, text=True)
    assert done.returncode == 2 and "No space left" in done.stderr and done.stderr.count("\n") == 1


def test_a_narrow_terminal_gets_lines_that_fit(put):
    folder = put("run", 5_000_000, factor=1.05)
    for width in (5, 20, 40, 60, 80):
        narrow = shown(folder, width=width)
        assert "●" in narrow and (width < 40 or "left\n" in narrow), width
    text = watch.paint("abc", watch.RED)
    assert watch.cut(text + "\x1b[2Jd\n", 4) == text + "["  # colours take no column, control characters go
    assert watch.cut(text, 2) == watch.paint("ab", watch.RED)


def test_on_a_terminal_it_stays_until_the_run_has_ended(put):
    """Under a pseudo-terminal of 40 columns: coloured, drawn again in place, left when outcome.json comes."""
    folder = put("run", 1_000_000)
    main, side = pty.openpty()
    command = [sys.executable, "-m", "tools.watch", str(folder), "--every", "0.1"]
    environment = os.environ | {"COLUMNS": "40", "NO_COLOR": ""}
    panel = subprocess.Popen(command, cwd=ROOT, stdout=side, stderr=side, env=environment)
    os.close(side)
    text = b""
    while b"\x1b[H" not in text:
        text += os.read(main, 65536)
    (folder / "outcome.json").write_text('{"outcome": "target reached"}')
    with contextlib.suppress(OSError):  # the other side has closed
        while chunk := os.read(main, 65536):
            text += chunk
    assert panel.wait(timeout=20) == 0
    assert text.count(b"\x1b[H") >= 2 and b"\x1b[32mtarget reached" in text
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*[A-Za-z]|\r", "", text.decode()).split("\n"))) == 40
