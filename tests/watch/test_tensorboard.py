"""What TensorBoard is given, read back by TensorBoard."""

import io
import json
import sys
import threading
import time

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import TENSORS, EventAccumulator

from flux_ref import config, config_file
from tools.watch import commands as watch
from tools.watch.tensorboard import Board

STEPS = [{"step": n, "samples": 12 * n, "loss": 1 / n, "lr": 1e-3, "data_wait": "?"} for n in range(1, 6)]
EVALUATION = {"samples": 36, "val_loss": 0.25, "stderr": 0.5, "val_loss_per_timestep": [k / 8 for k in range(8)]}
BY_TIMESTEP = [
    f"validation by t/t={t}" for t in ("0.000", "0.125", "0.250", "0.375", "0.500", "0.625", "0.750", "0.875")
]
FIGURES = ["train/loss", "train/lr", "validation/loss", "validation/stderr", *BY_TIMESTEP]


def written(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def run(tmp_path):
    """A folder with records up to 60 samples and pictures at 24 and 60."""
    cfg = config_file.replace(config.Config(), run__dir=str(tmp_path))
    (tmp_path / "config.toml").write_text(config_file.dump(cfg))
    written(tmp_path / "metrics.jsonl", STEPS)
    written(tmp_path / "eval.jsonl", [EVALUATION])
    (tmp_path / "samples").mkdir()
    for name in ("000000024", "000000060", "strip"):
        Image.new("RGB", (4, 4), (len(name), int(name[-2:], 36) % 256, 0)).save(tmp_path / "samples" / f"{name}.png")
    return tmp_path


def seen(run):
    """What TensorBoard shows of a run: {tag: [(samples, value)]}."""
    found = EventAccumulator(str(run / "tensorboard"), size_guidance={TENSORS: 0}).Reload()
    tags = found.Tags()
    shown = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in tags["scalars"]}
    for tag in tags["images"]:
        shown[tag] = [(event.step, pixels(io.BytesIO(event.encoded_image_string))) for event in found.Images(tag)]
    return shown | {tag: found.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in tags["tensors"]}


def pixels(file) -> list:
    return np.asarray(Image.open(file).convert("RGB")).tolist()


def test_all_figures_and_pictures_come_back(run, capsys):
    for _ in range(3):  # the next time replaces the one before
        assert watch.main([str(run), "--tensorboard", "--once"]) == 0
        assert capsys.readouterr().out == f"tensorboard --logdir {run}\n"
        shown = seen(run)
        assert sorted(shown) == sorted([*FIGURES, "pictures", "config/text_summary"])
        assert shown["train/loss"] == [(12 * n, pytest.approx(1 / n)) for n in range(1, 6)]
        assert shown["validation/loss"] == [(36, 0.25)] and shown[BY_TIMESTEP[3]] == [(36, 0.375)]
        assert shown["pictures"] == [(at, pixels(run / f"samples/{at:09d}.png")) for at in (24, 60)]
        assert "model.hidden = 3072" in shown["config/text_summary"]
    assert len([*(run / "tensorboard").iterdir()]) == 2  # the newest, and the one that TensorBoard may be reading


def test_a_resumed_run_shows_what_came_after_its_checkpoint_once(run):
    """A TensorBoard that looks on all the time sees the same."""
    board = Board(run)
    assert not board.update(), "the run has not ended"
    looks_on = EventAccumulator(str(run / "tensorboard")).Reload()
    written(run / "metrics.jsonl", STEPS[:2])
    written(run / "eval.jsonl", [])
    board.update()
    assert [step for step, _ in seen(run)["train/loss"]] == [12, 24]
    written(run / "metrics.jsonl", [*STEPS[:2], *(step | {"loss": 7.0} for step in STEPS[2:])])
    board.update()
    want = [(12, 1.0), (24, 0.5), (36, 7.0), (48, 7.0), (60, 7.0)]
    assert seen(run)["train/loss"] == [(event.step, event.value) for event in looks_on.Reload().Scalars("train/loss")]
    assert seen(run)["train/loss"] == want


def test_the_command_goes_on_until_the_run_has_ended(run):
    watching = threading.Thread(target=watch.main, args=([str(run), "--tensorboard", "--every=0.01"],))
    watching.start()
    while not (run / "tensorboard").exists():
        time.sleep(0.01)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 6, "samples": 72, "loss": 0.125}) + "\n")
    assert watching.is_alive()
    (run / "outcome.json").write_text(json.dumps({"outcome": "target reached"}))
    watching.join(20)
    assert not watching.is_alive() and seen(run)["train/loss"][-1] == (72, 0.125)


def test_what_is_missing_is_said(tmp_path, run, capsys, monkeypatch):
    (tmp_path / "empty").mkdir()
    assert watch.main([str(tmp_path / "empty"), "--tensorboard"]) == 2 and "holds no run" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "tools.watch.tensorboard")
    assert watch.main([str(run), "--tensorboard"]) == 2 and "pip install tensorboard" in capsys.readouterr().err


def test_foreign_figures_do_no_harm(run):
    """A number beyond 64 bits, a list of other things, a folder in place of a picture."""
    (run / "samples" / "000000012.png").mkdir()
    bad = {"val_loss": 1e99, "val_loss_per_timestep": [None, "x", 1.0]}
    written(run / "eval.jsonl", [bad | {"samples": samples} for samples in (48.0, 1e30)])
    Board(run).update()
    shown = seen(run)
    assert shown["validation/loss"] == [(48, float("inf"))] and shown["validation by t/t=0.250"] == [(48, 1.0)]
    assert len(shown["pictures"]) == 2
