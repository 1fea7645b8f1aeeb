"""FLUX.1's arithmetic by closed form: every matrix product and attention of the net, forward and backward.

Operations are floating-point operations, two per multiplication. Norms, activations, modulation's products with tokens
and RoPE count none: less than a hundredth, and not what matrix units do.
"""

from typing import NamedTuple

from flux_ref.config import ModelConfig


class Op(NamedTuple):
    """An operation at one place of the net. forward, backward: operations per sample of one occurrence."""

    part: str
    name: str  # of the module
    times: int  # in the net
    rows: int  # per sample: tokens, or 1
    forward: int
    backward: int


def linear(name: str, rows: int, inputs: int, outputs: int, first: bool = False) -> Op:
    """x @ w.T. Backward makes the gradients of x and w, of w alone if x is an input of the net (first)."""
    once = 2 * rows * inputs * outputs
    return Op("", name, 1, rows, once, once if first else 2 * once)


def attention(tokens: int, width: int) -> Op:
    """Scores, and their sum over values; twice that backward, where computing the scores again does not count."""
    once = 4 * tokens * tokens * width
    return Op("", "attention", 1, tokens, once, 2 * once)


def operations(model: ModelConfig) -> list[Op]:
    """Every operation of the net, block by block."""
    D = model.hidden
    M = model.mlp_ratio * D
    N = model.image_tokens
    T = model.text_tokens
    P = model.packed_channels
    double = []
    for stream, rows in (("img", N), ("txt", T)):
        double += [
            linear(f"{stream}_mod.lin", 1, D, 6 * D),
            linear(f"{stream}_attn.qkv", rows, D, 3 * D),
            linear(f"{stream}_attn.proj", rows, D, D),
            linear(f"{stream}_mlp.0", rows, D, M),
            linear(f"{stream}_mlp.2", rows, M, D),
        ]
    parts = {
        ("embedders", 1): [
            linear("img_in", N, P, D, first=True),
            linear("txt_in", T, model.t5_dim, D, first=True),
            linear("time_in.in_layer", 1, 256, D, first=True),
            linear("time_in.out_layer", 1, D, D),
            linear("vector_in.in_layer", 1, model.clip_dim, D, first=True),
            linear("vector_in.out_layer", 1, D, D),
        ],
        ("double_blocks", model.double_blocks): [*double, attention(N + T, D)],
        ("single_blocks", model.single_blocks): [
            linear("modulation.lin", 1, D, 3 * D),
            linear("linear1", N + T, D, 3 * D + M),
            attention(N + T, D),
            linear("linear2", N + T, D + M, D),
        ],
        ("final_layer", 1): [linear("adaLN_modulation.1", 1, D, 2 * D), linear("linear", N, D, P)],
    }
    return [op._replace(part=part, times=times) for (part, times), ops in parts.items() for op in ops]


def per_sample(model: ModelConfig) -> int:
    """Operations of one training sample, forward and backward; recomputation does not count.

    20.41e12 for schnell at the benchmark's shape.
    """
    return sum(op.times * (op.forward + op.backward) for op in operations(model))
