"""FLUX.1's arithmetic by closed form: every matrix product and attention of the net, forward and backward.

Operations are floating-point operations, two per multiplication. Norms, activations, modulation's products with tokens
and RoPE count none: less than a hundredth, and not what matrix units do.
"""

import re
from collections import Counter
from math import prod
from typing import NamedTuple

from flux_ref.config import ModelConfig
from flux_ref.model import parameter_table
from flux_ref.precision.policy import layers

FIRST = ("img_in", "txt_in", "time_in.in_layer", "vector_in.in_layer")  # their inputs need no gradient


class Op(NamedTuple):
    """An operation at one place of the net. forward, backward: operations per sample of one occurrence."""

    name: str  # of the module, with * for the number of a block
    times: int  # in the net
    rows: int  # per sample: tokens, or 1
    forward: int
    backward: int


def operations(model: ModelConfig) -> list[Op]:
    """Every operation of the net: the linears, then attention.

    Backward of a linear makes the gradients of its input and weight. Backward of attention counts twice: computing the
    scores again does not count.
    """
    tokens = model.image_tokens + model.text_tokens
    rows = {"img_in": model.image_tokens, "txt_in": model.text_tokens, "final_layer.linear": model.image_tokens}
    rows |= {name: layer.tokens for name, layer in layers(model).items()}
    counts: Counter[tuple[str, int, int]] = Counter()
    for name, shape in parameter_table(model).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight":
            counts[re.sub(r"\.\d+\.", ".*.", module), rows.get(module, 1), prod(shape)] += 1
    found = []
    for (module, seen, size), times in counts.items():
        once = 2 * seen * size
        found.append(Op(module, times, seen, once, once if module in FIRST else 2 * once))
    scores_and_values = 4 * tokens * tokens * model.hidden
    for part, times in (("double_blocks", model.double_blocks), ("single_blocks", model.single_blocks)):
        found.append(Op(f"{part}.*.attention", times, tokens, scores_and_values, 2 * scores_and_values))
    return found


def per_sample(model: ModelConfig) -> int:
    """Operations of one training sample, forward and backward; recomputation does not count.

    20.41e12 for schnell at the benchmark's shape.
    """
    return sum(op.times * (op.forward + op.backward) for op in operations(model))
