"""What TensorBoard reads of a run, also after a resume, and a run without the package."""

import sys

import numpy as np
from conftest import called, micro_run
from PIL import Image
from run_files import lines
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flux_ref.alive import Alive
from flux_ref.board import FIGURES, FOLDER
from flux_ref.errors import Fault

OPTIONS = ("--train.log_every_samples=12", "--sample.count=2", "--sample.steps=1", "--sample.every_samples=24")


def scalars(run) -> dict[str, list[tuple[int, float]]]:
    """{tag: (samples, value)} as TensorBoard shows them."""
    board = EventAccumulator(str(run / FOLDER)).Reload()
    return {tag: [(event.step, event.value) for event in board.Scalars(tag)] for tag in board.Tags()["scalars"]}


def test_tensorboard_shows_the_records_of_a_run_once_also_after_a_resume(shapes_dir, tmp_path, monkeypatch):
    run = tmp_path / "run"
    argv = micro_run(shapes_dir, run, *OPTIONS, "--checkpoint.every_samples=24")
    whole = 60
    at = Alive.at

    def struck(self, place: str) -> None:
        at(self, place)
        if place == "the end of step 3":
            raise Fault("struck")

    with monkeypatch.context() as patch:
        patch.setattr(Alive, "at", struck)
        assert called("train.py", *argv) == 3
    assert max(samples for samples, _ in scalars(run)["train/loss"]) == 36
    assert called("train.py", *argv) == 0
    shown = scalars(run)
    records = lines(run, "metrics.jsonl")
    assert records[-1]["samples"] == whole
    for name in FIGURES:
        want = [(record["samples"], record[name]) for record in records]
        assert np.allclose(shown[f"train/{name}"], want, rtol=1e-6), name
    evaluations = lines(run, "eval.jsonl")
    want = [(record["samples"], record["val_loss"]) for record in evaluations]
    assert np.allclose(shown["validation/loss"], want)
    by_time = [tag for tag in shown if tag.startswith("validation by t/")]
    assert len(by_time) == 8
    assert np.allclose(shown[by_time[3]], [(r["samples"], r["val_loss_per_timestep"][3]) for r in evaluations])
    board = EventAccumulator(str(run / FOLDER)).Reload()
    pictures = board.Images("pictures")
    assert {picture.step for picture in pictures} == {24, 48, 60} and pictures[-1].width == Image.open(
        run / "samples" / "000000060.png"
    ).width


def test_a_run_without_the_package_writes_no_board(shapes_dir, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert called("train.py", *micro_run(shapes_dir, tmp_path / "run")) == 0
    assert not (tmp_path / "run" / FOLDER).exists()
