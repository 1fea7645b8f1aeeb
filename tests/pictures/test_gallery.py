"""Pictures during training: sheets at intervals and a strip, and a training that does not notice them."""

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from conftest import called, micro_run, require_identical, script, trained
from PIL import Image
from run_files import lines

from flux_ref import checkpoint
from flux_ref.alive import Alive
from flux_ref.errors import Interrupted
from flux_ref.pictures import sheet

PICTURES = ["--sample.count=4", "--sample.steps=2", "--sample.every_samples=20"]  # 24 in whole steps
OFTEN = ["--checkpoint.every_samples=24", "--checkpoint.keep=9"]
SHEETS = ["000000024.png", "000000048.png", "000000060.png"]
FP8 = ["--precision.preset=fp8_delayed", "--precision.dynamic_steps=1", "--parallel.dtype=bf16", "--model.hidden=48"]
FP8 += ["--model.rope_axes=[8, 4, 4]", "--train.global_batch=32", "--train.max_samples=96", "--eval.batch=16"]
FP8 += ["--parallel.kept_regions=-1"]


def figures(run: Path) -> list[dict]:
    """What training computed, without times and memory."""
    names = ("step", "samples", "loss", "grad_norm", "lr", "val_loss", "val_loss_per_timestep")
    records = lines(run, "metrics.jsonl") + lines(run, "eval.jsonl")
    return [{name: record[name] for name in names if name in record} for record in records]


def require_same(run: Path, other: Path) -> None:
    """The same losses and weights, bit for bit."""
    assert figures(run) == figures(other)
    for prefix in ("model.", "optimizer.", "fp8."):
        require_identical(trained(run, prefix), trained(other, prefix))


def require_strip(folder: Path, sheets: list[str]) -> None:
    """strip.png holds the pictures of these sheets, one row of pictures each, and the captions of the last."""
    rows = [np.asarray(Image.open(folder / name)) for name in sheets]
    strip = np.asarray(Image.open(folder / "strip.png"))[:, sheet.STRIP_LEFT :]
    step = sheet.HEIGHT + sheet.GAP
    assert len(strip) == len(sheets) * step + sheet.CAPTION_HEIGHT + sheet.GAP
    for number, row in enumerate(rows):
        end = step + (sheet.CAPTION_HEIGHT if number == len(rows) - 1 else 0)
        assert (strip[number * step :][:end] == row[:end]).all()


@pytest.fixture(scope="module")
def runs(shapes_dir, tmp_path_factory) -> tuple[Path, Path]:
    """A run without pictures, and the same with pictures."""
    folder = tmp_path_factory.mktemp("gallery")
    assert called("train.py", *micro_run(shapes_dir, folder / "plain")) == 0
    assert called("train.py", *micro_run(shapes_dir, folder / "drawn", *PICTURES, *OFTEN)) == 0
    return folder / "plain", folder / "drawn"


def test_training_does_not_notice_pictures_at_intervals(runs):
    plain, drawn = runs
    require_same(plain, drawn)
    assert sorted(path.name for path in (drawn / "samples").iterdir()) == [*SHEETS, "strip.png"]
    contents = [(drawn / "samples" / name).read_bytes() for name in SHEETS]
    assert len(set(contents)) == len(contents)
    require_strip(drawn / "samples", SHEETS)
    said = (drawn / "result_0.txt").read_text()
    assert all("pictures in" in said and name in said for name in SHEETS)


def test_a_resumed_run_continues_its_strip(runs, shapes_dir, tmp_path):
    plain, drawn = runs
    copy = Path(shutil.copytree(drawn, tmp_path / "run"))
    (copy / "outcome.json").unlink()
    for path in checkpoint.list_checkpoints(copy)[1:]:
        shutil.rmtree(path)
    (copy / "samples" / "strip.png").unlink()
    (copy / "samples" / "000000060.png").unlink()
    assert called("train.py", *micro_run(shapes_dir, copy, *PICTURES, *OFTEN)) == 0
    require_same(plain, copy)
    for path in (drawn / "samples").iterdir():
        assert (copy / "samples" / path.name).read_bytes() == path.read_bytes()


def test_a_signal_in_a_drawing_saves_as_in_training(runs, shapes_dir, tmp_path, monkeypatch):
    at = Alive.at

    def interrupted(self, place: str) -> None:
        at(self, place)
        if place == "sampling step 1":
            raise Interrupted(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Alive, "at", interrupted)
        assert called("train.py", *micro_run(shapes_dir, tmp_path / "run", *PICTURES)) == 128 + signal.SIGTERM
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "run")] == ["step_000000002"]
    assert called("train.py", *micro_run(shapes_dir, tmp_path / "run", *PICTURES)) == 0
    require_same(runs[0], tmp_path / "run")
    sheets = sorted(path.name for path in (tmp_path / "run" / "samples").glob("0*.png"))
    assert len(sheets) == 3
    require_strip(tmp_path / "run" / "samples", sheets)


@pytest.mark.slow
def test_two_ranks_with_delayed_fp8_and_gathered_weights_do_not_notice_pictures(shapes_dir, tmp_path):
    for name, own in (("plain", []), ("drawn", PICTURES)):
        done = script("train.py", *micro_run(shapes_dir, tmp_path / name, *FP8, *own), ranks=2)
        assert done.returncode == 0, done.stderr[-2000:]
    require_same(tmp_path / "plain", tmp_path / "drawn")
