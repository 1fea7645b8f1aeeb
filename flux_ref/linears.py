"""Every linear of FLUX.1 with its sizes: what policies of precision and counts of arithmetic go through."""

from typing import NamedTuple

from flux_ref.config import ModelConfig


class Linear(NamedTuple):
    """A linear of the net, or of one block.

    name: Black Forest Labs', in its block.
    tokens: of a sample that it sees; 0: it sees one vector.
    """

    name: str
    tokens: int
    inputs: int
    outputs: int


def linears(model: ModelConfig) -> dict[str, list[Linear]]:
    """The linears by part of the net, in the order of forward. Blocks of a kind are equal."""
    D = model.hidden
    M = model.mlp_ratio * D
    N = model.image_tokens
    T = model.text_tokens
    double = []
    for stream, tokens in (("img", N), ("txt", T)):
        double += [
            Linear(f"{stream}_mod.lin", 0, D, 6 * D),
            Linear(f"{stream}_attn.qkv", tokens, D, 3 * D),
            Linear(f"{stream}_attn.proj", tokens, D, D),
            Linear(f"{stream}_mlp.0", tokens, D, M),
            Linear(f"{stream}_mlp.2", tokens, M, D),
        ]
    return {
        "embedders": [
            Linear("img_in", N, model.packed_channels, D),
            Linear("txt_in", T, model.t5_dim, D),
            Linear("time_in.in_layer", 0, 256, D),
            Linear("time_in.out_layer", 0, D, D),
            Linear("vector_in.in_layer", 0, model.clip_dim, D),
            Linear("vector_in.out_layer", 0, D, D),
        ],
        "double_blocks": double,
        "single_blocks": [
            Linear("modulation.lin", 0, D, 3 * D),
            Linear("linear1", N + T, D, 3 * D + M),
            Linear("linear2", N + T, D + M, D),
        ],
        "final_layer": [
            Linear("adaLN_modulation.1", 0, D, 2 * D),
            Linear("linear", N, D, model.packed_channels),
        ],
    }
