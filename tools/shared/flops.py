"""FLUX.1's arithmetic by closed form: every matrix product and attention of the net, forward and backward.

Operations are floating-point operations, two per multiplication. Norms, activations, modulation's products with tokens
and RoPE count none: less than a hundredth, and not what matrix units do.
"""

from typing import NamedTuple

from flux_ref.config import ModelConfig
from flux_ref.precision.policy import linears

FIRST = ("img_in", "txt_in", "time_in.in_layer", "vector_in.in_layer")  # their inputs need no gradient


class Op(NamedTuple):
    """An operation at one place of the net. forward, backward: operations per sample of one occurrence."""

    part: str
    name: str  # of the module
    times: int  # in the net
    rows: int  # per sample: tokens, or 1
    forward: int
    backward: int


def operations(model: ModelConfig) -> list[Op]:
    """Every operation of the net: the linears, then attention.

    Backward of a linear makes the gradients of its input and weight. Backward of attention counts twice: computing the
    scores again does not count.
    """
    times = {"double_blocks": model.double_blocks, "single_blocks": model.single_blocks}
    found = []
    for part, ones in linears(model).items():
        for one in ones:
            rows = max(1, one.tokens)
            once = 2 * rows * one.inputs * one.outputs
            found.append(Op(part, one.name, times.get(part, 1), rows, once, once if one.name in FIRST else 2 * once))
    tokens = model.image_tokens + model.text_tokens
    scores_and_values = 4 * tokens * tokens * model.hidden
    for part, count in times.items():
        found.append(Op(part, "attention", count, tokens, scores_and_values, 2 * scores_and_values))
    return found


def per_sample(model: ModelConfig) -> int:
    """Operations of one training sample, forward and backward; recomputation does not count.

    20.41e12 for schnell at the benchmark's shape.
    """
    return sum(op.times * (op.forward + op.backward) for op in operations(model))
