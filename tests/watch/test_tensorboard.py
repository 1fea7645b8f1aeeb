"""What TensorBoard is given, read back by TensorBoard."""

import json
import os
import sys

import pytest
from conftest import called, micro_run
from run_files import column
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

from flux_ref import config, config_file
from flux_ref.run.tensorboard import Board
from flux_ref.sampling import euler
from tools.watch import commands as watch

STEPS = [{"step": n, "samples": 12 * n, "loss": 1 / n, "lr": 1e-3, "data_wait": "?"} for n in range(1, 6)]
EVALUATION = {"samples": 36, "val_loss": 0.25, "stderr": 0.5, "val_loss_per_timestep": [k / 8 for k in range(8)]}
BY_TIMESTEP = [f"validation by t/t={k / 8:.3f}" for k in range(8)]
FIGURES = ["train/loss", "train/lr", "validation/loss", "validation/stderr", *BY_TIMESTEP]


@pytest.fixture
def run(tmp_path):
    """A folder with records up to 60 samples and pictures at 24 and 60."""
    (tmp_path / "config.toml").write_text(config_file.dump(config.Config()))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in STEPS))
    (tmp_path / "eval.jsonl").write_text(json.dumps(EVALUATION) + "\n")
    (tmp_path / "samples").mkdir()
    for name in ("000000024", "000000060", "strip"):
        (tmp_path / "samples" / f"{name}.png").write_bytes(name.encode())
    return tmp_path


def seen(run):
    """What TensorBoard shows of a run: {tag: [(samples, value)]}."""
    found = EventAccumulator(str(run / "tensorboard"), size_guidance={TENSORS: 0}).Reload()
    tags = found.Tags()
    shown = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["images"]:
        shown[tag] = [(event.step, event.encoded_image_string) for event in found.Images(tag)]
    return shown | {tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}


def test_all_figures_come_back(run):
    for _ in range(3):  # the next time replaces the one before
        assert watch.main([str(run), "--tensorboard"]) == 0
        shown = seen(run)
        assert [*shown] == [*FIGURES, "pictures", "config"]
        assert shown["train/loss"] == [(12 * n, pytest.approx(1 / n)) for n in range(1, 6)]
        assert shown["validation/loss"] == [(36, 0.25)] and shown[BY_TIMESTEP[3]] == [(36, 0.375)]
        assert shown["pictures"] == [(24, b"000000024"), (60, b"000000060")]
        assert config_file.dump(config.Config()) in shown["config"]
    assert len([*(run / "tensorboard").iterdir()]) == 2  # the newest, and the one that TensorBoard may be reading


def test_a_resumed_run_shows_what_came_after_its_checkpoint_once(run):
    """A TensorBoard that looks on all the time sees the same."""
    Board(run).begin()
    looks_on = EventAccumulator(str(run / "tensorboard")).Reload()
    board = Board(run)
    assert "(2 records)" in board.begin(24)
    assert seen(run)["pictures"] == [(24, b"000000024")]
    for step in STEPS[2:]:
        board.add("metrics.jsonl", step | {"loss": 7.0})
    shown = seen(run)
    assert shown["train/loss"] == [(12, 1.0), (24, 0.5), (36, 7.0), (48, 7.0), (60, 7.0)]
    assert shown["train/loss"] == [(event.step, event.value) for event in looks_on.Reload().Scalars("train/loss")]
    assert [step for step, _ in shown["pictures"]] == [24, 60]


def test_a_run_writes_live_what_the_command_writes_afterwards(tmp_path, shapes_dir, monkeypatch):
    """Also the pictures that are drawn after the last record, and what a run resumes."""
    run = tmp_path / "run"
    options = ("--run.tensorboard=true", "--sample.count=1", "--sample.steps=1")
    arguments = micro_run(shapes_dir, run, *options)
    with monkeypatch.context() as patch:
        patch.setattr(euler.Artist, "paint", lambda *_: 1 / 0)
        assert called("train.py", *arguments) == 3
    live = seen(run)
    assert [step for step, _ in live["train/loss"]] == [12, 24, 36, 48, 60] and "pictures" not in live
    assert [value for _, value in live["validation/loss"]] == pytest.approx(column(run, "val_loss", "eval.jsonl"))
    assert watch.main([str(run), "--tensorboard"]) == 2, "an unfinished run is the owner of its folder"
    assert called("train.py", *arguments) == 0
    live = seen(run)
    assert live["pictures"] == [(60, (run / "samples/000000060.png").read_bytes())]
    assert watch.main([str(run), "--tensorboard"]) == 0 and seen(run) == live
    assert called("train.py", *micro_run(shapes_dir, run, "--run.overwrite=true", "--train.max_samples=12")) == 0
    assert not (run / "tensorboard").exists()


def test_what_is_missing_is_said(tmp_path, shapes_dir, attempt, capsys, monkeypatch):
    assert watch.main([str(tmp_path), "--tensorboard"]) == 2 and "holds no run" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text(config_file.dump(config.Config()))
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "flux_ref.run.tensorboard")
    assert watch.main([str(tmp_path), "--tensorboard"]) == 2 and "pip install tensorboard" in capsys.readouterr().err
    code, _, line = attempt(*micro_run(shapes_dir, tmp_path / "run", "--run.tensorboard=true"))
    assert code == 2 and "pip install tensorboard" in line and not (tmp_path / "run").exists()


def test_foreign_figures_do_no_harm(run):
    """A number beyond 64 bits, a list of other things, a folder in place of a picture."""
    (run / "samples" / "000000012.png").mkdir()
    bad = {"samples": 60, "val_loss": 1e99, "val_loss_per_timestep": [None, "x", 1.0]}
    (run / "eval.jsonl").write_text("".join(json.dumps(bad | {"samples": n}) + "\n" for n in (48.0, 1e30)))
    Board(run).begin()
    shown = seen(run)
    assert shown["validation/loss"] == [(48, float("inf"))] and shown["validation by t/t=0.250"] == [(48, 1.0)]
    assert len(shown["pictures"]) == 2 and os.listdir(run / "samples/000000012.png") == []
