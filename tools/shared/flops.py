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
    keeps: str
    kept: int


def product(name: str, rows: int, inputs: int, outputs: int, keeps: str = "", kept: int = 0, first: bool = False) -> Op:
    """A linear: x @ w.T. Backward makes the gradients of x and w, of w alone if x is an input of the net (first).

    kept: 0 for all of x, if it keeps something.
    """
    once = 2 * rows * inputs * outputs
    tokens = rows * (inputs + outputs)
    weight = inputs * outputs
    both = 1 if first else 2
    kept = (kept or rows * inputs) if keeps else 0
    return Op("", name, 1, rows, once, both * once, tokens, both * tokens, weight, both * weight, keeps, kept)


def pointwise(name: str, rows: int, width: int, keeps: str, read: int = 1) -> Op:
    """`read` inputs of (rows, width) to one output; backward reads the output's gradient and what is kept, writes one.

    One width is kept.
    """
    own = rows * width
    return Op("", name, 1, rows, 0, 0, (read + 1) * own, 3 * own, 0, 0, keeps, own)


def attention(tokens: int, width: int) -> Op:
    """Scores, and their sum over values; twice that backward, where computing the scores again does not count."""
    once = 4 * tokens * tokens * width
    own = tokens * width
    keeps = "queries and keys after RoPE, values, output"
    return Op("", "attention", 1, tokens, once, 2 * once, 4 * own, 8 * own, 0, 0, keeps, 4 * own)


def operations(model: ModelConfig) -> list[Op]:
    """Every operation of the net, in the order of forward."""
    D = model.hidden
    N = model.image_tokens
    T = model.text_tokens
    P = model.packed_channels
    embedders = [
        product("img_in", N, P, D, "x_t", first=True),
        product("txt_in", T, model.t5_dim, D, "T5 states", first=True),
        product("time_in.in_layer", 1, 256, D, "waves of t", first=True),
        product("time_in.out_layer", 1, D, D, "after SiLU"),
        product("vector_in.in_layer", 1, model.clip_dim, D, "pooled CLIP", first=True),
        product("vector_in.out_layer", 1, D, D, "after SiLU"),
    ]
    final_layer = [
        product("adaLN_modulation.1", 1, D, 2 * D, "conditioning after SiLU"),
        pointwise("norm, scale, shift", N, D, "image stream"),
        product("linear", N, D, P, "its input"),
    ]
    found = []
    for part, times, ops in (
        ("embedders", 1, embedders),
        ("double_blocks", model.double_blocks, _double({"img": N, "txt": T}, D, model.mlp_ratio * D)),
        ("single_blocks", model.single_blocks, _single(N + T, D, model.mlp_ratio * D)),
        ("final_layer", 1, final_layer),
    ):
        found += [op._replace(part=part, times=times) for op in ops]
    return found


def _double(streams: dict[str, int], D: int, M: int) -> list[Op]:
    found = []
    for stream, rows in streams.items():
        found += [
            product(f"{stream}_mod.lin", 1, D, 6 * D, "conditioning after SiLU"),
            pointwise(f"{stream} norm, scale, shift", rows, D, f"{stream} stream"),
            product(f"{stream}_attn.qkv", rows, D, 3 * D, "its input"),
            pointwise(f"{stream}_attn.norm, RoPE", rows, 2 * D, "queries and keys before their norm"),
        ]
    found.append(attention(sum(streams.values()), D))
    for stream, rows in streams.items():
        found += [
            product(f"{stream}_attn.proj", rows, D, D),
            pointwise(f"{stream} gate, add", rows, D, "output of proj", read=2),
            pointwise(f"{stream} norm, scale, shift", rows, D, f"{stream} stream"),
            product(f"{stream}_mlp.0", rows, D, M, "its input"),
            pointwise(f"{stream}_mlp GELU", rows, M, "output of mlp.0"),
            product(f"{stream}_mlp.2", rows, M, D, "its input"),
            pointwise(f"{stream} gate, add", rows, D, "output of mlp.2", read=2),
        ]
    return found


def _single(rows: int, D: int, M: int) -> list[Op]:
    return [
        product("modulation.lin", 1, D, 3 * D, "conditioning after SiLU"),
        pointwise("norm, scale, shift", rows, D, "stream"),
        product("linear1", rows, D, 3 * D + M, "its input"),
        pointwise("norm, RoPE", rows, 2 * D, "queries and keys before their norm"),
        attention(rows, D),
        pointwise("GELU", rows, M, "the MLP's part of linear1's output"),
        product("linear2", rows, D + M, D, "after GELU; attention's output is kept already", kept=rows * M),
        pointwise("gate, add", rows, D, "output of linear2", read=2),
    ]


def per_sample(model: ModelConfig) -> int:
    """Operations of one training sample, forward and backward; recomputation does not count.

    20.41e12 for schnell at the benchmark's shape.
    """
    return sum(op.times * (op.forward + op.backward) for op in operations(model))
