"""What torch counts of the net's arithmetic against the closed form."""

import pytest

from flux_ref.config import ModelConfig
from tools import flops_and_bytes

ODD = ModelConfig(hidden=48, heads=3, double_blocks=2, single_blocks=3, mlp_ratio=3, rope_axes=(4, 6, 6),
                  text_tokens=5, t5_dim=7, clip_dim=11, latent_channels=2, latent_height=6, latent_width=4)  # fmt: skip


def test_a_sample_takes_three_times_the_operations_of_forward_but_for_gradients_of_what_is_given():
    D, R, text, image, patch = 48, 3, 5, 6, 8
    tokens = text + image
    first = image * patch * D + text * 7 * D + 256 * D + 11 * D  # the embedders' inputs need no gradient
    rest = 2 * D * D  # the embedders of time and CLIP
    rest += 2 * (tokens * (4 + 2 * R) * D * D + 2 * 6 * D * D + 2 * tokens * tokens * D)  # double blocks
    rest += 3 * (tokens * (4 + 2 * R) * D * D + 3 * D * D + 2 * tokens * tokens * D)  # single blocks
    rest += 2 * D * D + image * D * patch  # the head
    assert flops_and_bytes.per_sample(ODD) == 2 * (2 * first + 3 * rest)
    assert flops_and_bytes.per_sample(ModelConfig()) == pytest.approx(20.41e12, rel=1e-3)
