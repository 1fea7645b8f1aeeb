"""FLUX.1's arithmetic and what it moves and keeps, by closed form: every operation of the net, forward and backward.

Operations are floating-point operations of matrix products, two per multiplication. Norms, activations, modulation's
products with tokens and RoPE count none: less than a hundredth, and not what matrix units do. They do move bytes.
"""

from typing import NamedTuple

from flux_ref.config import ModelConfig


class Op(NamedTuple):
    """An operation at one place of the net. All but `times` is of one occurrence; sizes are in elements.

    moved: activations read and written per sample, each input and each output once, as if an operation were one kernel.
    weights: those read in forward and, with their gradients, moved in backward; per pass, whatever its samples.
    kept: what backward reads of it per sample and no operation before has kept already.
    Left out: biases, vectors of one row per sample beside tokens, one number per token (of norms and attention).
    """

    part: str
    name: str  # of the module, or what is done
    times: int  # in the net
    rows: int  # per sample: tokens, or 1
    forward: int  # operations per sample
    backward: int
    forward_moved: int
    backward_moved: int
    forward_weights: int
    backward_weights: int
    keeps: str = ""
    kept: int = 0


def product(
    part: str, name: str, times: int, rows: int, inputs: int, outputs: int, keeps: str = "", kept: int = 0, first=False
) -> Op:
    """A linear: x @ w.T. Backward makes the gradients of x and w, of w alone if x is an input of the net (first)."""
    once = 2 * rows * inputs * outputs
    tokens = rows * (inputs + outputs)
    weight = inputs * outputs
    both = 1 if first else 2
    return Op(part, name, times, rows, once, both * once, tokens, both * tokens, weight, both * weight, keeps, kept)


def pointwise(part: str, name: str, times: int, rows: int, width: int, keeps: str, kept: int = 1, read: int = 1) -> Op:
    """`read` inputs of (rows, width) to one output; backward reads the output's gradient and what is kept, writes one.

    kept: in widths.
    """
    own = rows * width
    return Op(part, name, times, rows, 0, 0, (read + 1) * own, 3 * own, 0, 0, keeps, kept * own)


def attention(part: str, times: int, tokens: int, width: int) -> Op:
    """Scores, and their sum over values; twice that backward, where computing the scores again does not count."""
    once = 4 * tokens * tokens * width
    own = tokens * width
    keeps = "queries and keys after RoPE, values, output"
    return Op(part, "attention", times, tokens, once, 2 * once, 4 * own, 8 * own, 0, 0, keeps, 4 * own)


def operations(model: ModelConfig) -> list[Op]:
    """Every operation of the net, in the order of forward."""
    D = model.hidden
    N = model.image_tokens
    T = model.text_tokens
    M = model.mlp_ratio * D
    P = model.packed_channels
    ends = "embedders"
    return [
        product(ends, "img_in", 1, N, P, D, "x_t", N * P, first=True),
        product(ends, "txt_in", 1, T, model.t5_dim, D, "T5 states", T * model.t5_dim, first=True),
        product(ends, "time_in.in_layer", 1, 1, 256, D, "waves of t", 256, first=True),
        product(ends, "time_in.out_layer", 1, 1, D, D, "after SiLU", D),
        product(ends, "vector_in.in_layer", 1, 1, model.clip_dim, D, "pooled CLIP", model.clip_dim, first=True),
        product(ends, "vector_in.out_layer", 1, 1, D, D, "after SiLU", D),
        *_double(model.double_blocks, {"img": N, "txt": T}, D, M),
        *_single(model.single_blocks, N + T, D, M),
        product("final_layer", "adaLN_modulation.1", 1, 1, D, 2 * D, "conditioning after SiLU", D),
        pointwise("final_layer", "norm, scale, shift", 1, N, D, "image stream"),
        product("final_layer", "linear", 1, N, D, P, "its input", N * D),
    ]


def _double(times: int, streams: dict[str, int], D: int, M: int) -> list[Op]:
    part = "double_blocks"
    found = []
    for stream, rows in streams.items():
        found += [
            product(part, f"{stream}_mod.lin", times, 1, D, 6 * D, "conditioning after SiLU", D),
            pointwise(part, f"{stream} norm, scale, shift", times, rows, D, f"{stream} stream"),
            product(part, f"{stream}_attn.qkv", times, rows, D, 3 * D, "its input", rows * D),
            pointwise(part, f"{stream}_attn.norm, RoPE", times, rows, 2 * D, "queries and keys before their norm"),
        ]
    found.append(attention(part, times, sum(streams.values()), D))
    for stream, rows in streams.items():
        found += [
            product(part, f"{stream}_attn.proj", times, rows, D, D),
            pointwise(part, f"{stream} gate, add", times, rows, D, "output of proj", read=2),
            pointwise(part, f"{stream} norm, scale, shift", times, rows, D, f"{stream} stream"),
            product(part, f"{stream}_mlp.0", times, rows, D, M, "its input", rows * D),
            pointwise(part, f"{stream}_mlp GELU", times, rows, M, "output of mlp.0"),
            product(part, f"{stream}_mlp.2", times, rows, M, D, "its input", rows * M),
            pointwise(part, f"{stream} gate, add", times, rows, D, "output of mlp.2", read=2),
        ]
    return found


def _single(times: int, rows: int, D: int, M: int) -> list[Op]:
    part = "single_blocks"
    return [
        product(part, "modulation.lin", times, 1, D, 3 * D, "conditioning after SiLU", D),
        pointwise(part, "norm, scale, shift", times, rows, D, "stream"),
        product(part, "linear1", times, rows, D, 3 * D + M, "its input", rows * D),
        pointwise(part, "norm, RoPE", times, rows, 2 * D, "queries and keys before their norm"),
        attention(part, times, rows, D),
        pointwise(part, "GELU", times, rows, M, "the MLP's part of linear1's output"),
        product(part, "linear2", times, rows, D + M, D, "after GELU; attention's output is kept already", rows * M),
        pointwise(part, "gate, add", times, rows, D, "output of linear2", read=2),
    ]


def per_sample(model: ModelConfig) -> int:
    """Operations of one training sample, forward and backward; recomputation does not count.

    20.41e12 for schnell at the benchmark's shape.
    """
    return sum(op.times * (op.forward + op.backward) for op in operations(model))
