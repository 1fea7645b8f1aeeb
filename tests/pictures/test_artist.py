"""Pictures from captions: Euler's steps with guidance, which captions, the sheet, and a training with pictures."""

import signal
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import MICRO, called, micro_run, require_identical, script, trained
from PIL import Image
from run_files import require_equal_runs, saved_steps, what_counts
from torch import Tensor, nn

from flux_ref import config_file, latents, ranks, rng, shards
from flux_ref.alive import Alive
from flux_ref.errors import Interrupted
from flux_ref.pictures import sheet
from flux_ref.pictures.artist import LOOKED_AT, Artist


def nothing(place: str) -> None:
    """No progress is told."""


@pytest.fixture
def artist_of():
    """artist_of(*overrides): of the micro config, on one rank."""
    cfg = config_file.load(MICRO)
    world = ranks.start(cfg.parallel)
    yield lambda *overrides: Artist(config_file.override(cfg, overrides), world, Path())
    ranks.stop()


class Linear(nn.Module):
    """The velocity t * x + the mean of clip. It remembers the times that it was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def forward(self, x_BNP: Tensor, t5_BTE: Tensor, clip_BV: Tensor, t_B: Tensor) -> Tensor:
        self.asked.append(t_B.tolist())
        return t_B[:, None, None] * x_BNP + clip_BV.mean(dim=1)[:, None, None]


def test_steps_are_eulers_from_noise_with_guidance_away_from_the_empty_caption(artist_of):
    """A second implementation on single numbers: each row has its own noise, caption and step."""
    for steps, guidance in ((1, 1.0), (3, 0.0), (4, 2.5)):
        artist = artist_of(f"--sample.steps={steps}", f"--sample.guidance={guidance}", "--eval.batch=2")
        captions = ["a", "b", "a small red circle at the middle", "a large blue square at the top left"]
        artist.take_prompts(captions, Path(), nothing)
        net = Linear()
        z = artist.generate_latents(net, 2, nothing)
        assert z.dtype == torch.float32 and not z.requires_grad
        times = np.linspace(1, 0, steps + 1)
        empty = shards.from_bf16_bits(artist.empty["clip"]).mean()
        for row in range(2):
            shape = artist.cfg.model.latent_shape
            x = rng.normals(artist.cfg.sample.seed, rng.SAMPLING, shape, sample=2 + row, epoch=0).astype(float)
            text = shards.from_bf16_bits(artist.encoded[2 + row]["clip"]).mean()
            for t, t_next in pairwise(times):
                x = x + (t_next - t) * (t * x + empty + guidance * (text - empty))
            found = (z[row] - latents.SHIFT) * latents.SCALE
            torch.testing.assert_close(found, torch.tensor(x).float(), rtol=1e-5, atol=1e-5)
        calls = 1 if guidance == 1 else 2
        assert net.asked == [pytest.approx([t] * 2) for t in times[:-1] for _ in range(calls)]


def test_few_samples_are_looked_at_for_captions(artist_of):
    looked = []

    class Samples:
        layout = SimpleNamespace(rows=dict)

        def __len__(self) -> int:
            return 10_000

        def read(self, sample: int, rows: dict) -> SimpleNamespace:
            looked.append(sample)
            if sample == 0:
                raise shards.BadSample("damaged")
            return SimpleNamespace(caption=f"caption {min(sample // 5, 1)}", key="")

    for count, want in ((2, range(6)), (8, range(8 * LOOKED_AT))):
        artist = artist_of(f"--sample.count={count}", "--sample.guidance=1")
        artist.take_stored(Samples())
        assert artist.captions == ["caption 0", "caption 1"] and looked == [*want]
        looked.clear()


def test_the_sheet_holds_each_picture_above_its_caption_and_the_strip_first_rows(tmp_path):
    values = (-1.5, 0.0, 1.0, 0.5, 0.0, 0.0, 0.5)
    pictures = [np.full((3, 64, 64), value, np.float32) for value in values]
    for number in range(1, 14):
        sheet.save(pictures, ["a caption of many words, " * 5] * 6 + [""], tmp_path / "samples" / f"{number:09}.png")
    pixels = np.array(Image.open(tmp_path / "samples" / "000000012.png"))
    assert pixels.shape == (2 * (160 + 36) + 3 * 6, 6 * 160 + 7 * 6, 3)
    for top, left, value in ((6, 6, 0), (6, 172, 128), (6, 338, 255), (208, 6, 191)):
        assert (pixels[top : top + 160, left : left + 160] == value).all()
    for top in (166, 368):
        assert (pixels[top : top + 36, 6:166] < 100).any(), "captions are below, also for the empty one"
    for samples, rows in ((13, 7), (12, 12)):  # at most STRIP_ROWS; of a resumed run only those up to now
        sheet.strip(tmp_path / "samples", 64, samples)
        strip = np.asarray(Image.open(tmp_path / "samples" / "strip.png"))
        assert len(strip) == rows * 166 + 42
        for row in range(rows):
            end = 166 + (36 if row == rows - 1 else 0)
            assert (strip[row * 166 :][:end, 90:] == pixels[:end]).all()


# A training with pictures

PICTURES = ["--sample.count=4", "--sample.steps=2", "--sample.every_samples=20"]  # 24 in whole steps
SHEETS = ["000000024.png", "000000048.png", "000000060.png", "strip.png"]
FP8 = ["--precision.preset=fp8_delayed", "--precision.dynamic_steps=1", "--parallel.dtype=bf16", "--model.hidden=48"]
FP8 += ["--model.rope_axes=[8, 4, 4]", "--train.global_batch=32", "--train.max_samples=96", "--eval.batch=16"]
FP8 += ["--parallel.kept_regions=-1"]


def test_training_does_not_notice_pictures_nor_a_signal_in_one(shapes_dir, tmp_path, monkeypatch):
    """Pictures do not notice it either."""
    plain, drawn, stopped = (tmp_path / name for name in ("plain", "drawn", "stopped"))
    assert called("train.py", *micro_run(shapes_dir, plain)) == 0
    assert called("train.py", *micro_run(shapes_dir, drawn, *PICTURES)) == 0
    at = Alive.at

    def interrupted(self, place: str) -> None:
        at(self, place)
        if place == "sampling step 1":
            raise Interrupted(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Alive, "at", interrupted)
        assert called("train.py", *micro_run(shapes_dir, stopped, *PICTURES)) == 128 + signal.SIGTERM
    assert saved_steps(stopped) == [2]
    assert called("train.py", *micro_run(shapes_dir, stopped, *PICTURES)) == 0
    for run in (drawn, stopped):
        require_equal_runs(plain, run)
        assert sorted(path.name for path in (run / "samples").iterdir()) == SHEETS
        said = (run / "result_0.txt").read_text()
        assert "4 pictures in " in said and SHEETS[-2] in said
    contents = [(drawn / "samples" / name).read_bytes() for name in SHEETS]
    assert contents == [(stopped / "samples" / name).read_bytes() for name in SHEETS]
    assert len(set(contents)) == len(contents)


@pytest.mark.slow
def test_two_ranks_with_delayed_fp8_and_gathered_weights_do_not_notice_pictures(shapes_dir, tmp_path):
    for name, own in (("plain", []), ("drawn", PICTURES)):
        done = script("train.py", *micro_run(shapes_dir, tmp_path / name, *FP8, *own), ranks=2)
        assert done.returncode == 0, done.stderr[-2000:]
    plain, drawn = tmp_path / "plain", tmp_path / "drawn"
    assert what_counts(plain) == what_counts(drawn)
    require_identical(trained(plain, ""), trained(drawn, ""))
