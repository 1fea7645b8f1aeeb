"""Pictures from captions: Euler's steps with guidance, which captions, the sheet, and a training with pictures."""

import signal
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import MICRO, called, micro_run, script
from PIL import Image
from precision_ranks import FP8_RUN
from run_files import contents, require_equal_runs, saved_steps
from torch import nn

from flux_ref import config_file, dataset, flow, ranks, rng
from flux_ref.cli import Interrupted
from flux_ref.pictures import artist, encoders
from flux_ref.pictures.artist import LOOKED_AT, Artist
from flux_ref.watchdog import Watchdog


def nothing(place):
    """No progress is told."""


@pytest.fixture
def artist_of():
    """artist_of(*overrides): of the micro config, on one rank."""
    world = ranks.start(config_file.load(MICRO).parallel)
    yield lambda *overrides: Artist(config_file.load(MICRO, overrides), world, Path())
    ranks.stop()


class Linear(nn.Module):
    """The velocity t * x + the mean of clip. It remembers the times that it was asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def forward(self, x_BNP, t5_BTE, clip_BV, t_B):
        self.asked.append(t_B.tolist())
        return t_B[:, None, None] * x_BNP + clip_BV.mean(dim=1)[:, None, None]


def test_steps_are_eulers_from_noise_with_guidance_away_from_the_empty_caption(artist_of):
    """A second implementation in numpy: each row has its own noise and caption."""
    for steps, guidance in ((1, 1.0), (3, 0.0), (4, 2.5)):
        artist = artist_of(f"--pictures.steps={steps}", f"--pictures.guidance={guidance}", "--eval.batch=2")
        artist.take_prompts(["a", "b", "a red circle", "blue"], Path(), nothing)
        net = Linear()
        z = artist.generate_latents(net, 2, nothing)
        shape = artist.cfg.model.latent_shape
        x = np.stack([rng.normals(artist.cfg.pictures.seed, rng.SAMPLING, shape, sample=i, epoch=0) for i in (2, 3)])
        empty, *texts = [clip.float().numpy().mean() for _, clip in (artist.empty, *artist.encoded[2:])]
        drift = empty + guidance * (np.reshape(texts, (2, 1, 1, 1)) - empty)
        times = np.linspace(1, 0, steps + 1)
        for t, t_next in pairwise(times):
            x = x + (t_next - t) * (t * x + drift)
        np.testing.assert_allclose((z - flow.SHIFT) * flow.SCALE, x, rtol=1e-5, atol=1e-5)
        assert net.asked == [pytest.approx([t] * 2) for t in times[:-1] for _ in range(1 if guidance == 1 else 2)]


def test_few_samples_are_looked_at_for_captions(artist_of):
    """They come from all over the set."""
    looked, zeros = [], np.zeros(1, np.uint16)

    class Samples:
        def __len__(self):
            return 1000

        def sample(self, index):
            looked.append(index)
            return dataset.Meta("", caption=f"caption {index // 500}"), dict.fromkeys(("t5", "clip", "mean"), zeros)

    artist = artist_of("--pictures.count=8", "--pictures.guidance=1")
    artist.take_stored(Samples())
    assert {*artist.captions} == {"caption 0", "caption 1"} and len(artist.originals) == 2
    assert len({*looked}) == len(looked) == 8 * LOOKED_AT and max(np.diff(sorted(looked))) < 60


def test_the_sheet_holds_each_picture_above_its_caption_and_the_strip_first_rows(tmp_path):
    values = (-1.5, 0.0, 1.0, 0.0, 0.0, 0.0, 0.5)
    pictures = [np.full((3, 64, 64), value, np.float32) for value in values]
    for number in range(3):
        artist.save(pictures, ["a caption of many words, " * 5] * 6 + [""], tmp_path / f"{number:09}.png")
    pixels = np.array(Image.open(tmp_path / "000000002.png"))
    assert pixels.shape == (2 * (160 + 36) + 3 * 6, 6 * 160 + 7 * 6, 3)
    for number, value in enumerate(values):
        tile = pixels[6 + 202 * (number // 6) :, 6 + 166 * (number % 6) :][:196, :160]
        assert (tile[:160] == round((max(value, -1) + 1) * 127.5)).all()
        assert (tile[160:] < 100).any() == (number < 6), "captions are below, the empty one, too"
    artist.strip(tmp_path, 64)
    strip = np.asarray(Image.open(tmp_path / "strip.png"))[:-42, 90:]
    rows = strip.reshape(3, 166, *pixels.shape[1:])
    assert (rows == pixels[:166]).all()


def test_the_net_has_the_tensors_of_the_public_file():
    with torch.device("meta"):
        parameters = dict(encoders.new_autoencoder().named_parameters())
    assert len(parameters) == 244 and sum(parameter.numel() for parameter in parameters.values()) == 83_819_683


# A training with pictures

PICTURES = ["--pictures.count=2", "--pictures.steps=2", "--pictures.every_samples=20"]  # 24 in whole steps


def test_training_does_not_notice_pictures_nor_a_signal_in_one(shapes_dir, tmp_path, monkeypatch):
    """Pictures do not notice it either."""
    plain, drawn, stopped = (tmp_path / name for name in ("plain", "drawn", "stopped"))
    assert called("train.py", *micro_run(shapes_dir, plain)) == 0
    assert called("train.py", *micro_run(shapes_dir, drawn, *PICTURES)) == 0
    stop_point = Watchdog.stop_point

    def interrupted(self, place):
        stop_point(self, place)
        if place == "sampling step 1":
            raise Interrupted(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Watchdog, "stop_point", interrupted)
        assert called("train.py", *micro_run(shapes_dir, stopped, *PICTURES)) == 128 + signal.SIGTERM
    assert saved_steps(stopped) == [2]
    assert called("train.py", *micro_run(shapes_dir, stopped, *PICTURES)) == 0
    require_equal_runs(plain, drawn)
    require_equal_runs(plain, stopped)
    found = contents(drawn / "samples")
    assert sorted(found) == ["000000024.png", "000000048.png", "000000060.png", "originals.png", "strip.png"]
    assert found == contents(stopped / "samples") and len({*found.values()}) == 5


@pytest.mark.slow
def test_two_ranks_with_delayed_fp8_and_gathered_weights_do_not_notice_pictures(shapes_dir, tmp_path):
    for name, own in (("plain", []), ("drawn", PICTURES)):
        fp8 = (*FP8_RUN, "--precision.preset=fp8_delayed")
        done = script("train.py", *micro_run(shapes_dir, tmp_path / name, *fp8, *own), ranks=2)
        assert done.returncode == 0, done.stderr[-2000:]
    require_equal_runs(tmp_path / "plain", tmp_path / "drawn")
