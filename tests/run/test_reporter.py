"""What a run records: who is blamed, TensorBoard, the terminal."""

import errno
import itertools
import sys
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import called, micro_config, micro_run, refusal
from run_files import lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flux_ref.cli import Fault, Refusal, progress
from flux_ref.pictures import artist
from flux_ref.report import Reporter, require_finite
from flux_ref.trainer import NEVER
from flux_ref.watchdog import Watchdog


def test_what_went_first_is_blamed():
    """By (first bad loss, first bad norm) of each rank."""
    require_finite([(NEVER, NEVER), (NEVER, NEVER)])
    for flags, words in (
        ([(5, 4), (5, 4)], "gradient norm is not finite in step 5"),  # losses follow
        ([(5, 4), (4, 4)], "loss is not finite in step 5, first on rank 1;"),
        ([(2, 3), (3, 3)], "loss is not finite in step 3, first on rank 0;"),
        ([(NEVER, NEVER), (2, NEVER)], "in step 3, first on rank 1;"),
    ):
        assert words in refusal(require_finite, flags, kind=Fault)


def test_a_board_or_a_picture_that_fails_is_told_in_one_line(micro, capsys):
    report = Reporter(micro, SimpleNamespace(rank=0), lambda line: None)
    report.board = Mock()
    report.board.add_scalar.side_effect = FileNotFoundError(errno.ENOENT, "No such file", "tensorboard")
    for _ in range(2):
        report._show(lambda board: board.add_scalar("train/loss", 1.0, 12))
    report.close()
    assert capsys.readouterr().out.count("TensorBoard's curves NOT drawn: [Errno 2] No such file") == 1
    for error in (Refusal("no place"), OSError(errno.ENOSPC, "No space left", "loss.png"), ValueError("broken PNG")):
        with report.spare("loss.png"):
            raise error
        assert capsys.readouterr().out == f"loss.png NOT drawn: {error}; the run goes on without\n"
    with pytest.raises(KeyboardInterrupt), report.spare("loss.png"):
        raise KeyboardInterrupt


def test_in_a_log_file_a_bar_has_lines_of_its_own_and_messages_stand_as_they_are(tmp_path, capsys):
    """Also a run of so many steps that a loop over them would never end."""
    cfg = micro_config(run__dir=str(tmp_path), train__max_samples=10**12)
    report = Reporter(cfg, SimpleNamespace(rank=0), lambda line: None)
    report.begin(0)
    report.say("  one")
    report.say("two")
    report.bar.update(7200)
    report.close()
    for _ in progress(range(3), desc="short", leave=False):
        report.say("three")
    out, err = capsys.readouterr()
    assert out == "  one\ntwo\n" + 3 * "three\n"
    told = err.splitlines()
    assert [line for line in told if line != line.strip() or not line] == [], told
    for line, words in zip(
        told, ("| 0/1,000,000,000,008 [", "| 7,200/1,000,000,000,008 [", "short:   0%"), strict=True
    ):
        assert words in line, (line, words)


def test_tensorboard_shows_the_records_of_a_run_once_also_after_a_resume(shapes_dir, tmp_path, monkeypatch):
    run = tmp_path / "run"
    own = ("--train.log_every_samples=12", "--pictures.count=2", "--pictures.steps=1", "--pictures.every_samples=24")
    argv = micro_run(shapes_dir, run, *own, "--checkpoint.every_samples=36")
    stop_point = Watchdog.stop_point

    def struck(self, place):
        stop_point(self, place)
        if place == "the end of step 4":  # after the evaluation at the checkpoint, which is repeated
            raise Fault("struck")

    monkeypatch.setattr(artist, "time", SimpleNamespace(perf_counter=itertools.count(0, -1000).__next__))
    with monkeypatch.context() as patch:
        patch.setattr(Watchdog, "stop_point", struck)
        assert called("train.py", *argv) == 3
    time.sleep(1)  # TensorBoard sorts files by the second in their names, then .10 before .9, their number in a process
    assert called("train.py", *argv) == 0
    board = EventAccumulator(str(run / "tensorboard")).Reload()
    records, evaluations = lines(run), lines(run, "eval.jsonl")
    assert [record["samples"] for record in evaluations] == [36, 60]
    rates = [record["samples_per_s"] > 1 for record in records]
    assert rates == [True, True, False, True, False], "a drawing, of -1000 seconds here, is no part of the rate"
    by_time = [evaluation | {"val_loss": evaluation["val_loss_per_timestep"][3]} for evaluation in evaluations]
    wanted = {f"train/{name}": (records, name) for name in records[0] if name not in ("step", "samples")}
    wanted |= {"validation/loss": (evaluations, "val_loss"), "validation by t/t=3_8": (by_time, "val_loss")}
    for tag, (rows, name) in wanted.items():
        shown = np.unique([(event.step, event.value) for event in board.Scalars(tag)], axis=0)
        assert np.allclose(shown, [(row["samples"], row[name]) for row in rows], rtol=1e-6), tag
    assert len(board.Tags()["scalars"]) == len(wanted) + 7


def test_a_run_without_the_package_writes_no_board_and_says_why_if_it_is_broken(
    shapes_dir, tmp_path, monkeypatch, attempt
):
    broken = "def __getattr__(name):\n    raise TypeError('Descriptors cannot be created directly.\\nIf this')"
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "__init__.py").write_text(broken)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    for number, said in enumerate(("curves NOT drawn: Descriptors cannot be created directly. If this; ", "")):
        code, out, _ = attempt(*micro_run(shapes_dir, tmp_path / str(number), "--train.max_samples=12"))
        assert code == 0 and said in out and ("curves" in out) == bool(said)
        assert not (tmp_path / str(number) / "tensorboard").exists()
        monkeypatch.setitem(sys.modules, "tensorboard", None)
