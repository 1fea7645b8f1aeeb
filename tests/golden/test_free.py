"""What the pages call free passes: each free choice stands in the code, and every value that it reaches agrees.

python tests/golden/test_free.py        how much of each tolerance the choices use
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_golden import CFG, GIVEN, KEPT, arrays

from flux_ref import config_file, model, rng
from tools.golden import check, draws, precision, record, training

pytestmark = pytest.mark.slow
Made = dict[str, np.ndarray]
linear, silu, layer_norm, adamw = F.linear, F.silu, F.layer_norm, torch.optim.AdamW.step


def drawn(world) -> Made:
    """All that is drawn, and what is computed from it."""
    made = arrays(draws.draws(CFG) | training.init(CFG, world) | training.validation(CFG, world, GIVEN))
    return made | trained(world)


def trained(world) -> Made:
    return arrays(training.training(CFG, world, GIVEN) | training.on_two_ranks(CFG, world, GIVEN))


def trained_in_parts(world) -> Made:
    """Micro-batches of one row."""
    return arrays(training.training(config_file.replace(CFG, train__micro_batch=1), world, GIVEN))


def in_bf16(world) -> Made:
    batch = {name: torch.from_numpy(KEPT.arrays[f"batch.{name}"].copy()) for name in training.BATCH}
    of_net = precision.bf16(CFG, GIVEN, batch)
    return arrays(precision.operations(CFG, GIVEN) | of_net | training.step_in_bf16(CFG, world, GIVEN))


def everything(world) -> Made:
    return (
        trained(world) | in_bf16(world) | arrays(training.validation(CFG, world, GIVEN) | precision.fp8_linear(GIVEN))
    )


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


FREE = {  # what a page calls free: what is changed, and what is computed with it
    "Box-Muller in fp32": ([(rng, "normal", box_muller(np.float32, 1))], drawn),
    "(a + 0.5) in place of (a + 1)": ([(rng, "normal", box_muller(np.float64, 0.5))], drawn),
    "decay after the update": ([(torch.optim.AdamW, "step", decay_last)], trained),
    "micro-batches": ([], trained_in_parts),
    "sums in fp64": (
        [(F, "linear", exactly(linear)), (F, "layer_norm", exactly(layer_norm)), (F, "silu", exactly(silu)),
         (F, "rms_norm", exactly(F.rms_norm)), (model, "attention", attention(False, torch.float64))],
        everything,
    ),
    "a bias after the product's rounding": ([(F, "linear", bias_last)], in_bf16),
    "modulation rounded once": ([(model, "modulate", modulated_once)], in_bf16),
    "SiLU rounds each result": ([(F, "silu", lambda x, inplace=False: x * torch.sigmoid(x))], in_bf16),
    "a softmax in fp32": ([(model, "attention", attention(False, torch.float32))], in_bf16),
    "a rounded softmax": ([(model, "attention", attention(True, torch.float32))], in_bf16),
    "GELU by its formula in fp32": ([(F, "gelu", gelu_by_formula)], in_bf16),
}  # fmt: skip


def values_of(name: str, world) -> Made:
    """What is computed with a free choice."""
    changes, compute = FREE[name]
    with pytest.MonkeyPatch.context() as patches:
        for owner, attribute, instead in changes:
            patches.setattr(owner, attribute, instead)
        return compute(world)


def used(made: Made) -> dict[str, float]:
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


@pytest.mark.parametrize("name", FREE)
def test_what_a_page_calls_free_agrees(name):
    with record.one_process() as world:
        made = values_of(name, world)
    values = [value for value in KEPT.values if value.name in made]
    found = [check.compare(value, KEPT.arrays[value.name], made[value.name]) for value in values]
    assert len(found) == len(made) > 20
    assert [one.value.name + ": " + one.words for one in found if one] == []


if __name__ == "__main__":
    with record.one_process() as alone:
        for choice in FREE:
            print(choice)
            for why, share in used(values_of(choice, alone)).items():
                print(f"    {share:5.2f}  {why}", flush=True)
