"""What torch counts of the net's arithmetic against the closed form."""

import pytest

from flux_ref.config import ModelConfig
from tools import flops_and_bytes

ODD = ModelConfig(hidden=48, heads=3, double_blocks=2, single_blocks=3, mlp_ratio=3, rope_axes=(4, 6, 6),
                  text_tokens=5, t5_dim=7, clip_dim=11, latent_channels=2, latent_height=6, latent_width=4)  # fmt: skip


def closed_form(m):
    D, R, patch = m.hidden, m.mlp_ratio, m.packed_channels
    tokens = m.text_tokens + m.image_tokens
    first = m.image_tokens * patch * D + m.text_tokens * m.t5_dim * D + 256 * D + m.clip_dim * D
    rest = 2 * D * D  # the embedders of time and CLIP
    rest += m.double_blocks * (tokens * (4 + 2 * R) * D * D + 2 * 6 * D * D + 2 * tokens * tokens * D)
    rest += m.single_blocks * (tokens * (4 + 2 * R) * D * D + 3 * D * D + 2 * tokens * tokens * D)
    rest += 2 * D * D + m.image_tokens * D * patch  # the head
    return 2 * (2 * first + 3 * rest)  # the first embedders' inputs need no gradient


def test_a_sample_takes_three_times_the_operations_of_forward_but_for_gradients_of_what_is_given():
    assert flops_and_bytes.per_sample(ODD) == closed_form(ODD)
    assert closed_form(ModelConfig()) == pytest.approx(20.41e12, rel=1e-3)
