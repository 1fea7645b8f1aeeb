"""The closed form of the model's operations against torch's counter."""

import pytest
import torch
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode

from flux_ref import config, flops
from flux_ref.config import ModelConfig
from flux_ref.model import Flux


@pytest.mark.parametrize(
    "cfg",
    [
        ModelConfig(),
        config.load(ROOT / "configs/tiny.toml").model,
        ModelConfig(hidden=48, heads=3, double_blocks=2, single_blocks=3, mlp_ratio=3, rope_axes=(4, 6, 6),
                    text_tokens=5, t5_dim=7, clip_dim=11, latent_channels=2, latent_height=6, latent_width=4),
    ],
    ids=["schnell", "tiny", "odd"],
)  # fmt: skip
def test_forward_is_what_torch_counts(cfg):
    with torch.device("meta"):
        net = Flux(cfg)
        net.rope = net.make_rope()
        inputs = (
            torch.empty(1, cfg.image_tokens, cfg.packed_channels),
            torch.empty(1, cfg.text_tokens, cfg.t5_dim),
            torch.empty(1, cfg.clip_dim),
            torch.empty(1),
        )
    with FlopCounterMode(display=False) as counter:
        net(*inputs)
    assert sum(flops.forward(cfg).values()) == counter.get_total_flops()


def test_schnell_takes_20_42_tflop_per_sample():
    assert flops.per_sample(ModelConfig()) == pytest.approx(20.42e12, rel=1e-3)
