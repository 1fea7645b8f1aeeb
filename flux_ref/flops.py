"""Floating-point operations of FLUX.1, by closed form: two per multiplication of a matrix product.

Norms, activations, modulation's products with tokens and RoPE are left out: less than a hundredth, and not what
matrix units do.
"""

from flux_ref.config import ModelConfig


def forward(model: ModelConfig) -> dict[str, int]:
    """Operations of one sample's forward pass, by part."""
    D, N, T = model.hidden, model.image_tokens, model.text_tokens
    S, M, P = N + T, model.mlp_ratio * D, model.packed_channels
    attention = 2 * S * S * D  # scores, and their sum over values
    multiplications = {
        "embedders": N * P * D + T * model.t5_dim * D + (256 + model.clip_dim + 2 * D) * D,
        "double_blocks": model.double_blocks * (S * (4 * D * D + 2 * D * M) + attention),
        "single_blocks": model.single_blocks * (S * (4 * D * D + 2 * D * M) + attention),
        "modulation": (model.double_blocks * 12 + model.single_blocks * 3 + 2) * D * D,
        "final_layer": N * D * P,
    }
    return {part: 2 * count for part, count in multiplications.items()}


def per_sample(model: ModelConfig) -> int:
    """Operations of one training sample: forward, and twice as much backward; recomputation does not count.

    20.42e12 for schnell at the benchmark's shape.
    """
    return 3 * sum(forward(model).values())
