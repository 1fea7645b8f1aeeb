"""The closed form of the net's arithmetic against what torch counts."""

import pytest
import torch
from conftest import ROOT
from torch.utils.flop_counter import FlopCounterMode

from flux_ref import config_file
from flux_ref.config import ModelConfig
from flux_ref.model import Flux
from tools import flops_and_bytes

ODD = ModelConfig(hidden=48, heads=3, double_blocks=2, single_blocks=3, mlp_ratio=3, rope_axes=(4, 6, 6),
                  text_tokens=5, t5_dim=7, clip_dim=11, latent_channels=2, latent_height=6, latent_width=4)  # fmt: skip


def test_operations_are_what_torch_counts():
    """On the meta device."""
    for cfg in (ODD, config_file.load(ROOT / "configs/tiny.toml").model):
        with torch.device("meta"):
            net = Flux(cfg)
            net.rope = net.make_rope()
            shapes = ((cfg.image_tokens, cfg.packed_channels), (cfg.text_tokens, cfg.t5_dim), (cfg.clip_dim,), ())
            inputs = [torch.empty(1, *shape) for shape in shapes]
        with FlopCounterMode(display=False) as forward:
            result = net(*inputs)
        with FlopCounterMode(display=False) as backward:
            result.sum().backward()
        for way, counted in (("forward", forward), ("backward", backward)):
            assert (
                sum(op.times * getattr(op, way) for op in flops_and_bytes.operations(cfg)) == counted.get_total_flops()
            ), way
    assert flops_and_bytes.per_sample(ModelConfig()) == pytest.approx(20.41e12, rel=1e-3)
