"""Pictures from captions: Euler's steps with guidance, which captions, and the sheet."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import MICRO
from PIL import Image
from torch import Tensor, nn

from eval import listed
from flux_ref import config_file, latents, rng
from flux_ref.pictures import artist, drawing, sheet

CAPTIONS = ("a small red circle at the middle", "a large blue square at the top left")


class Linear(nn.Module):
    """The velocity t * x + the mean of clip. It remembers the times that it was asked for."""

    def __init__(self):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))
        self.asked = []

    def forward(self, x_BNP: Tensor, t5_BTE: Tensor, clip_BV: Tensor, t_B: Tensor) -> Tensor:
        self.asked.append(t_B.tolist())
        return self.one * (t_B[:, None, None] * x_BNP + clip_BV.mean(dim=1)[:, None, None])


def test_steps_are_eulers_from_noise_with_guidance_away_from_the_empty_caption():
    """A second implementation on single numbers: each row has its own noise, caption and step."""
    for steps, guidance in ((1, 1.0), (5, 1.0), (3, 0.0), (4, 2.5)):
        cfg = config_file.load(MICRO, [f"--sample.steps={steps}", f"--sample.guidance={guidance}"])
        *texts, empty = [drawing.toy_encodings(caption, cfg.model) for caption in (*CAPTIONS, "")]
        net = Linear()
        z = artist.generate_latents(net, texts, empty, cfg, torch.device("cpu"), first=3)
        assert z.dtype == torch.float32 and not z.requires_grad
        times = np.linspace(1, 0, steps + 1)
        for row, text in enumerate(texts):
            x = rng.normals(cfg.sample.seed, rng.SAMPLING, cfg.model.latent_shape, sample=3 + row, epoch=0).astype(
                float
            )
            means = [float(part["clip"].mean()) for part in (empty, text)]
            for t, t_next in pairwise(times):
                x = x + (t_next - t) * (t * x + means[0] + guidance * (means[1] - means[0]))
            torch.testing.assert_close(
                (z[row] - latents.SHIFT) * latents.SCALE, torch.tensor(x).float(), rtol=1e-5, atol=1e-5
            )
        calls = 1 if guidance == 1 else 2
        assert net.asked == [pytest.approx([t] * 2) for t in times[:-1] for _ in range(calls)]


def test_a_list_of_prompts_has_one_on_each_line_whatever_python_takes_for_the_end_of_a_line(tmp_path):
    lines = ["a\u2028b", "c\x0bd\x0c", "e\x85f\x1c", "", "g"]
    (tmp_path / "list").write_bytes("\r\n".join(lines).encode())
    assert listed(str(tmp_path / "list")) == ["a\u2028b", "c\x0bd", "e\x85f", "g"]


def test_few_samples_are_looked_at_for_captions():
    looked = []

    class Samples:
        layout = SimpleNamespace(rows=dict)

        def __len__(self) -> int:
            return 10_000

        def read(self, sample: int, rows: dict) -> SimpleNamespace:
            looked.append(sample)
            return SimpleNamespace(caption=f"caption {min(sample // 5, 1)}", key="")

    assert [caption for caption, _ in artist.stored_captions(Samples(), 2)] == ["caption 0", "caption 1"]
    assert looked == [*range(6)]
    assert len(artist.stored_captions(Samples(), 8)) == 2 and len(looked) == 6 + 8 * artist.LOOKED_AT


def test_the_sheet_holds_each_picture_above_its_caption(tmp_path):
    pictures = [np.full((3, 64, 64), value, np.float32) for value in (-1.5, 0.0, 1.0, 0.5, 0.0, 0.0, 0.5)]
    path = sheet.save_new(pictures, ["a caption of many words, " * 5] * 6 + [""], tmp_path / "samples", "drawn")
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["drawn_1.png"]
    pixels = np.array(Image.open(path))
    assert pixels.shape == (2 * (160 + 36) + 3 * 6, 6 * 160 + 7 * 6, 3)
    for top, left, value in ((6, 6, 0), (6, 172, 128), (6, 338, 255), (208, 6, 191)):
        assert (pixels[top : top + 160, left : left + 160] == value).all()
    for top in (166, 368):
        assert (pixels[top : top + 36, 6:166] < 100).any(), "captions are below, also for the empty one"
