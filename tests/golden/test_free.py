"""What the pages call free passes: each free choice stands in the code, and every value that it reaches agrees.

python tests/golden/test_free.py        how much of each tolerance the choices use
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_golden import KEPT

from flux_ref import model, rng
from tools.golden import check, draws, precision, record, training

pytestmark = pytest.mark.slow
linear, silu, layer_norm, adamw = F.linear, F.silu, F.layer_norm, torch.optim.AdamW.step
TRAINED = training.training, training.on_two_ranks
DRAWN = draws.draws, training.init, training.validation, *TRAINED
IN_BF16 = precision.operations, precision.bf16, training.step_in_bf16
EVERYTHING = *TRAINED, *IN_BF16, training.validation, precision.fp8_linear


def box_muller(kind: type, added: float) -> Callable:
    """The normals of pairs of words, computed in a floating point type."""

    def normal(word: np.ndarray) -> np.ndarray:
        u = (((word[0::2] >> 11) + added) * 2.0**-53).astype(kind)
        angle = ((word[1::2] >> 11) * (2.0 * np.pi * 2.0**-53)).astype(kind)
        radius = np.sqrt(kind(-2) * np.log(u))
        return np.stack((radius * np.cos(angle), radius * np.sin(angle)), axis=-1).ravel()

    return normal


def decay_last(self):
    """AdamW that decays the updated weights."""
    (group,) = self.param_groups
    decay, group["weight_decay"] = group["weight_decay"], 0.0
    adamw(self)
    group["weight_decay"] = decay
    torch._foreach_mul_(group["params"], 1 - float(group["lr"]) * decay)


def exactly(operation: Callable) -> Callable:
    """An operation with its sums in fp64."""

    def computed(*args, **options):
        wide = [arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args]
        return operation(*wide, **options).to(args[0].dtype)

    return computed


def bias_last(x, weight, bias=None):
    product = linear(x, weight)
    return product if bias is None else product + bias


def attention(rounds: bool, dtype: torch.dtype) -> Callable:
    """By plain products in a dtype. rounds: the softmax is rounded to the dtype of its operands."""

    def attend(q_BSHK, k_BSHK, v_BSHK):
        q, k, v = (x.transpose(1, 2).to(dtype) for x in (q_BSHK, k_BSHK, v_BSHK))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        weights = weights.to(q_BSHK.dtype).to(dtype) if rounds else weights
        return (weights @ v).transpose(1, 2).flatten(-2).to(q_BSHK.dtype)

    return attend


def modulated_once(x, shift, scale):
    normed = layer_norm(x.float(), x.shape[-1:], eps=model.NORM_EPS)
    return ((1 + scale.float()) * normed + shift.float()).to(x.dtype)


def gelu_by_formula(x, approximate):
    wide = x.float()
    return (0.5 * wide * (1 + torch.tanh(0.7978845608 * (wide + 0.044715 * wide**3)))).to(x.dtype)


MICRO_BATCHES = "micro-batches of one row"
FREE = {  # what a page calls free: what is changed, and the parts of `record` that are computed with it
    "Box-Muller in fp32": ([(rng, "normal", box_muller(np.float32, 1))], DRAWN),
    "(a + 0.5) in place of (a + 1)": ([(rng, "normal", box_muller(np.float64, 0.5))], DRAWN),
    "decay after the update": ([(torch.optim.AdamW, "step", decay_last)], TRAINED),
    "sums in fp64": (
        [(F, "linear", exactly(linear)), (F, "layer_norm", exactly(layer_norm)), (F, "silu", exactly(silu)),
         (F, "rms_norm", exactly(F.rms_norm)), (model, "attention", attention(False, torch.float64))],
        EVERYTHING,
    ),
    "a bias after the product's rounding": ([(F, "linear", bias_last)], IN_BF16),
    "modulation rounded once": ([(model, "modulated_norm", modulated_once)], IN_BF16),
    "SiLU rounds each result": ([(F, "silu", lambda x, inplace=False: x * torch.sigmoid(x))], IN_BF16),
    "a softmax in fp32": ([(model, "attention", attention(False, torch.float32))], IN_BF16),
    "a rounded softmax": ([(model, "attention", attention(True, torch.float32))], IN_BF16),
    "GELU by its formula in fp32": ([(F, "gelu", gelu_by_formula)], IN_BF16),
}  # fmt: skip


def values_of(name: str) -> record.Made:
    """What is computed with a free choice."""
    if name == MICRO_BATCHES:
        return record.arrays(training.training, train__micro_batch=1)
    changes, parts = FREE[name]
    with pytest.MonkeyPatch.context() as patches:
        for owner, attribute, instead in changes:
            patches.setattr(owner, attribute, instead)
        return record.arrays(*parts)


def used(made: record.Made) -> dict[str, float]:
    """By the kind of its place, the largest share of a tolerance that a value uses."""
    shares: dict[str, float] = {}
    for value in KEPT.values:
        want = KEPT.arrays[value.name]
        if value.name not in made or not value.atol + value.rtol:
            continue
        allowed = value.atol + value.rtol * np.abs(want)
        off = np.abs(made[value.name].astype(np.float64) - want)[allowed > 0] / allowed[allowed > 0]
        shares[value.why] = max(shares.get(value.why, 0.0), off.max(initial=0.0))
    return shares


@pytest.mark.parametrize("name", [*FREE, MICRO_BATCHES])
def test_what_a_page_calls_free_agrees(name):
    made = values_of(name)
    values = [value for value in KEPT.values if value.name in made]
    found = [check.compare(value, KEPT.arrays[value.name], made[value.name]) for value in values]
    assert len(found) == len(made) > 20
    assert [one.value.name + ": " + one.words for one in found if one] == []


if __name__ == "__main__":
    for choice in [*FREE, MICRO_BATCHES]:
        print(choice)
        for why, share in used(values_of(choice)).items():
            print(f"    {share:5.2f}  {why}", flush=True)
