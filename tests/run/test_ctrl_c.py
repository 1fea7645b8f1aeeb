"""Ctrl-C in a terminal: the first saves, the second ends the run at once."""

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import micro_run
from killing import LONG, Job
from run_files import count, lines, newest, saved_steps

from flux_ref.run import alive
from flux_ref.run.attempt import Terminal


def test_a_terminal_that_goes_away_ends_nothing():
    """As in `train.py 2>&1 | tee log`, where Ctrl-C ends tee first."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        terminal = Terminal(stream)
        print("lost", file=terminal, flush=True)
        print("lost, too", file=terminal, flush=True)
        assert terminal.fileno() == writer


def test_what_is_a_second_ctrl_c(monkeypatch, capfd):
    """torchrun sends SIGTERM for it, and may pass on the first one late. Some launchers send the first one twice."""
    ended = []
    now = [0.0]
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(alive, "time", SimpleNamespace(monotonic=lambda: now[0]))
    cases = (  # under torchrun; the signal after Ctrl-C, how long after it in s; whether the rank ends
        (False, signal.SIGINT, 0.1, False),
        (False, signal.SIGINT, 1.0, True),
        (False, signal.SIGTERM, 1.0, True),
        (False, signal.SIGUSR1, 1.0, False),
        (True, signal.SIGINT, 1.0, False),
        (True, signal.SIGTERM, 1.0, True),
    )
    for is_launched, number, after_s, ends in cases:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if is_launched:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "id")
        watcher = object.__new__(alive.Alive)
        watcher.signal, watcher.speaks = signal.SIGTERM, True
        now[0] = 0.0
        watcher._take(signal.SIGINT, None)
        now[0] = after_s
        watcher._take(number, None)
        assert (ended, watcher.signal) == ([130] * ends, signal.SIGINT), (is_launched, number, after_s)
        assert capfd.readouterr().err == alive.NOTICE.decode()
        ended.clear()


@pytest.mark.slow
def test_ctrl_c_saves_once_and_a_second_one_ends_at_once_without_a_half_checkpoint(shapes_dir, tmp_path):
    """The second comes to torchrun while its ranks write. Then plain python goes on and gets one."""
    run = tmp_path / "run"
    endless = ("--train.max_samples=1200000", "--checkpoint.every_samples=0", "--run.hang_s=0")
    argv = micro_run(shapes_dir, run, *LONG, *endless)
    with press(tmp_path / "torchrun", run, argv, ranks=2, save_s=600) as job:
        assert job.until(lambda: job.said.count("a rank writes and has got Ctrl-C") == 2), job.said
        time.sleep(2 * alive.ONE_PRESS_S)
        assert list((run / "checkpoints").glob(".step_*")), job.said
        job.process.send_signal(signal.SIGINT)
        assert job.wait() == 1 and "forcefully" not in job.said, job.said  # that is, with SIGKILL
        assert job.gone(5) and saved_steps(run) == [] and "saved in" not in job.said
    with press(tmp_path / "python", run, argv, ranks=0, save_s=0) as job:
        assert job.wait() == 130, job.said
    step = newest(run).info["step"]
    assert saved_steps(run) == [step] == [lines(run)[-1]["step"]] and not (run / "outcome.json").exists()
    assert f"stopped by SIGINT after step {step}; the same command goes on from there" in job.said
    assert job.said.count("train.py: stopped by SIGINT") == 1 and "Traceback" not in job.said


def press(log: Path, run: Path, argv: list[str], ranks: int, save_s: float) -> Job:
    """A job that has trained and got Ctrl-C once. save_s: seconds that a rank takes to write its part."""
    result = run / "result_0.txt"
    before = result.read_text().count('"key": "run_start"') if result.exists() else 0
    env = {"SAVE_S": str(save_s), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "100"}  # a busy machine may save late
    job = Job(log, "tests/helpers/slow_save.py", *argv, ranks=ranks, **env)

    def trains() -> bool:
        is_begun = result.exists() and result.read_text().count('"key": "run_start"') > before
        return is_begun and count(run / "metrics.jsonl") > 1

    assert job.until(trains), job.said
    job.process.send_signal(signal.SIGINT)
    assert job.until(lambda: "Ctrl-C: the run ends after one more step" in job.said), job.said
    return job
