"""Pictures from captions: the times, the Euler steps, guidance and the grid."""

import math
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import MICRO
from PIL import Image
from torch import Tensor, nn

from flux_ref import config_file, latents, rng
from flux_ref.config import Config
from flux_ref.pictures import artist, drawing, sheet

CPU = torch.device("cpu")
CAPTIONS = ("a small red circle at the middle", "a large blue square at the top left")


class Velocity(nn.Module):
    """A net made of a function of (x, clip, t). It remembers the times that it was asked for."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.one = nn.Parameter(torch.ones(()))
        self.function = function
        self.asked = []

    def forward(self, x_BNP: Tensor, t5_BTE: Tensor, clip_BV: Tensor, t_B: Tensor) -> Tensor:
        self.asked.append(t_B.tolist())
        return self.one * self.function(x_BNP, clip_BV, t_B[:, None, None])


def micro_config(**values: object) -> Config:
    return config_file.replace(config_file.load(MICRO), **values)


def start_noise(cfg: Config) -> Tensor:
    """The noise from which generation starts, one per caption."""
    draws = [rng.normals(cfg.sample.seed, rng.SAMPLING, cfg.model.latent_shape, sample=i, epoch=0) for i in (0, 1)]
    return torch.from_numpy(np.stack(draws))


def generated(net: Velocity, cfg: Config) -> Tensor:
    """The latents of CAPTIONS, at unit variance."""
    *texts, empty = [drawing.toy_encodings(caption, cfg.model) for caption in (*CAPTIONS, "")]
    z = artist.generate_latents(net, texts, empty, cfg, CPU)
    assert z.dtype == torch.float32 and not z.requires_grad
    return (z - latents.SHIFT) * latents.SCALE


def test_true_velocity_leads_from_noise_to_data():
    for steps in (1, 7):
        cfg = micro_config(sample__steps=steps)
        data = torch.randn(len(CAPTIONS), *cfg.model.latent_shape, generator=torch.Generator().manual_seed(0))
        velocity = latents.pack(start_noise(cfg) - data)
        net = Velocity(lambda x, clip, t, velocity=velocity: velocity)
        torch.testing.assert_close(generated(net, cfg), data, rtol=1e-5, atol=1e-5)
        assert len(net.asked) == steps, "without guidance the net is asked once a step"


def test_steps_are_eulers():
    """Velocity t * x multiplies x by 1 + t * (t_next - t) in each step."""
    cfg = micro_config(sample__steps=5)
    net = Velocity(lambda x, clip, t: t * x)
    times = np.linspace(1, 0, 6)
    factor = math.prod(1 + t * (t_next - t) for t, t_next in pairwise(times))
    torch.testing.assert_close(generated(net, cfg), factor * start_noise(cfg), rtol=1e-5, atol=1e-5)
    assert net.asked == [pytest.approx([t] * len(CAPTIONS)) for t in times[:-1]]


def test_guidance_extrapolates_from_the_empty_caption():
    """empty + guidance * (conditioned - empty), each row with its own caption."""
    for guidance in (0.0, 2.5):
        cfg = micro_config(sample__steps=3, sample__guidance=guidance)
        net = Velocity(lambda x, clip, t: clip.mean(dim=1)[:, None, None].expand_as(x))
        pooled = [drawing.toy_encodings(caption, cfg.model)["clip"].mean() for caption in ("", *CAPTIONS)]
        velocity = torch.tensor([pooled[0] + guidance * (conditioned - pooled[0]) for conditioned in pooled[1:]])
        expected = start_noise(cfg) - velocity[:, None, None, None]
        torch.testing.assert_close(generated(net, cfg), expected, rtol=1e-5, atol=1e-5)


def test_a_list_of_prompts_has_one_on_each_line_whatever_python_takes_for_the_end_of_a_line(tmp_path):
    lines = ["a\u2028b", "c\x0bd\x0c", "e\x85f\x1c", "", "g"]
    (tmp_path / "list").write_bytes("\r\n".join(lines).encode())
    assert drawing._listed(str(tmp_path / "list")) == ["a\u2028b", "c\x0bd", "e\x85f", "g"]


def test_few_samples_are_looked_at_for_captions():
    looked = []

    class Samples:
        layout = SimpleNamespace(rows=dict)

        def __len__(self) -> int:
            return 10_000

        def read(self, sample: int, rows: dict) -> SimpleNamespace:
            looked.append(sample)
            return SimpleNamespace(caption=f"caption {sample // 5}", key=str(sample))

    assert [caption for caption, _ in artist.stored_captions(Samples(), 3)] == ["caption 0", "caption 1", "caption 2"]
    assert looked == [*range(11)]
    Samples.read = lambda self, sample, rows: looked.append(sample) or SimpleNamespace(caption="one", key="")
    assert len(artist.stored_captions(Samples(), 8)) == 1 and len(looked) == 11 + 8 * artist.LOOKED_AT


def test_the_grid_holds_each_picture_above_its_caption(tmp_path):
    values = (-1.5, 0.0, 1.0, 0.5, 0.0, 0.0, 0.5)
    pictures = [np.full((3, 64, 64), value, np.float32) for value in values]
    sheet.save(pictures, ["a caption of many words, " * 5] * 6 + [""], tmp_path / "samples" / "sheet.png")
    with Image.open(tmp_path / "samples" / "sheet.png") as image:
        pixels = np.array(image)
    assert pixels.shape == (2 * (160 + 36) + 3 * 6, 6 * 160 + 7 * 6, 3)
    for top, left, value in ((6, 6, 0), (6, 172, 128), (6, 338, 255), (208, 6, 191)):
        assert (pixels[top : top + 160, left : left + 160] == value).all()
    for top in (166, 368):
        assert (pixels[top : top + 36, 6:166] < 100).any(), "captions are below, also for the empty one"
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["sheet.png"]
