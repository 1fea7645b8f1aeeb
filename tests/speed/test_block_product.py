"""A linear under a policy against plain products of the decoded sides."""

from functools import partial

import pytest
import torch
from fp8_net import config, decode
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from flux_ref.model import JoinLinear, SplitLinear
from flux_ref.speed import casts, policy
from flux_ref.speed.block_product import Draws, decoded
from flux_ref.speed.chances import chances
from flux_ref.speed.linear import PolicyLinear
from flux_ref.speed.sides import PRODUCTS, SIDES

BATCH, ROWS, K, N = 6, 32, 64, 96
SEED, STEP, NUMBER = 5, 9, 3


def made(rule: str, linear: nn.Linear | None = None, first_sample: int = 0) -> PolicyLinear:
    torch.manual_seed(0)
    cfg = config("bf16", rules=tuple(rule.split("; ")))
    found = PolicyLinear(linear or nn.Linear(K, N).bfloat16(), "single.0.linear1", cfg, "cpu")
    found.draws = Draws(*map(torch.tensor, (SEED, STEP, first_sample, NUMBER)))
    return found


def inputs(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-8, 8, (BATCH, ROWS, 1), generator=generator).float())
    x = (torch.randn(BATCH, ROWS, K, generator=generator) * spread).bfloat16()
    return x, (torch.randn(BATCH, ROWS, N, generator=generator) * 1e-6).bfloat16()


def run(linear: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output and the gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    linear.zero_grad()
    out = linear(x)
    out.backward(grad)
    return [out.detach(), x.grad, linear.weight.grad, linear.bias.grad]


WHOLE = ("fp8", "fp8_delayed")  # fp8_product.py multiplies their sides
RULES = {
    **{name: "; ".join(rules) for name, rules in policy.PRESETS.items() if name not in ("bf16", "nvfp4", *WHOLE)},
    "nvfp4": "; ".join(policy.PRESETS["nvfp4"][:-1]),
    "one product": "* grad_input: mxfp8 x bf16",
}


@pytest.mark.parametrize("name", RULES)
def test_products_are_those_of_the_decoded_sides(name):
    """Each product written out: transform, cast along the sum, chances by place, fp32 product, rounding to bf16."""
    linear = made(RULES[name])
    x, grad = inputs()
    x_MK, g_MN, w_NK = x.flatten(0, 1), grad.flatten(0, 1), linear.weight.detach()

    def side(product: int, place: int, tensor: Tensor, kind: int, turned: bool) -> Tensor:
        how, chance = linear.pairs[PRODUCTS[product]][place], None
        if how and how.stochastic:
            chance = chances(torch.tensor([SEED, STEP, 9 * NUMBER + 3 * product + kind, 0]), tensor)
        if turned:
            tensor, chance = tensor.t(), None if chance is None else chance.t()
        return decoded(tensor, how, chance)

    out = side(0, 0, x_MK, 0, False) @ side(0, 1, w_NK, 1, False).t() + linear.bias.float()
    grad_x = side(1, 0, g_MN, 2, False) @ side(1, 1, w_NK, 1, True).t()
    grad_w = side(2, 0, g_MN, 2, True) @ side(2, 1, x_MK, 0, True).t()
    wants = [out.unflatten(0, (BATCH, ROWS)), grad_x.unflatten(0, (BATCH, ROWS)), grad_w, g_MN.sum(0)]
    for found, want in zip(run(linear, x, grad), wants):
        # The order of sums is the device's. Roundings to bf16 may then differ by one step.
        torch.testing.assert_close(found.float(), want.float(), rtol=2**-8, atol=2**-8 * want.abs().mean().item())


def test_every_preset_comes_near_the_exact_products():
    """Relative errors of the three products, as large as the formats' mantissas say, and no larger."""
    x, grad = inputs()
    exact = run(made("* *: bf16 x bf16").float(), x.float(), grad.float())
    wrong = []
    for name, bound in {"mxfp8": 0.06, "mxfp4_backward": 0.25, "mxfp6_fp4": 0.3, "nvfp4": 0.25}.items():
        for product, found, want in zip(PRODUCTS, run(made(RULES[name]), x, grad), exact):
            error = ((found.float() - want).norm() / want.norm()).item()
            plain = made(RULES[name]).pairs[product] == (None, None)
            wrong += [(name, product, error)] * (not (0.003 * (not plain) < error < (0.005 if plain else bound)))
    assert not wrong


def test_a_side_is_what_its_codes_and_scales_say():
    """decoded = codes by the table, times the block's scale, times the tensor's scale."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 64, generator=generator)
    for name, side in SIDES.items():
        values, scales, whole = casts.scaled(x, side.form, side.scaling)
        codes = decode(side.form, casts.encode(side.form, values))
        rows, columns = side.scaling.rows or 64, side.scaling.columns or 64
        want = codes * scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1) * whole
        assert torch.equal(decoded(x, side), want), name


def test_stochastic_rounding_is_the_same_at_1_2_and_3_ranks():
    """Each rank has its samples. The outputs and gradients of inputs are parts of those of the whole batch."""
    rule = "* forward: mxfp4+sr x mxfp4+sr; * grad_input: mxfp4+sr x mxfp4_2d"
    x, grad = inputs()
    whole = run(made(rule), x, grad)
    for ranks in (2, 3):
        share = BATCH // ranks
        parts = [
            run(made(rule, first_sample=first), x[first : first + share], grad[first : first + share])
            for first in range(0, BATCH, share)
        ]
        for i in range(2):
            assert torch.equal(torch.cat([part[i] for part in parts]), whole[i]), ranks
    again, later = made(rule), made(rule)
    later.draws.step.add_(1)
    assert torch.equal(run(again, x, grad)[0], whole[0]) and not torch.equal(run(later, x, grad)[0], whole[0])


def test_parts_and_splits_are_those_of_the_linear_taken_over():
    x, grad = inputs()
    rule = RULES["mxfp8"]
    plain = made(rule, nn.Linear(K, N).bfloat16())
    want = run(plain, x, grad)
    split, join = SplitLinear(K, (32, 32, 32)), JoinLinear(K, N)
    for other in (split, join):
        other.load_state_dict(plain.state_dict())
    found = made(rule, split.bfloat16())(x)
    assert [part.shape[-1] for part in found] == [32, 32, 32] and torch.equal(torch.cat(found, -1), want[0])
    assert torch.equal(made(rule, join.bfloat16())(*x.split((16, 48), -1)), want[0])
    assert {name for name, _ in plain.named_parameters()} == {"weight", "bias"}


def test_equal_layers_share_one_compiled_graph_that_draws_for_each_layer_and_step():
    """A new graph for each block would take hours to compile. The graph must not keep the numbers of its first call."""
    rule = "* forward: nvfp4 x nvfp4_2d; * grad_*: mxfp4+h32+sr x mxfp4+h32+sr"
    (x, grad), graphs = inputs(), []

    def backend(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(lambda linear, x: linear(x), backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    for seed, number, step in ((5, 3, 9), (5, 4, 9), (5, 4, 10), (6, 4, 10)):
        linear = made(rule)
        linear.draws = Draws(*map(torch.tensor, (seed, step, 0, number)))
        found = []
        for call in (linear, partial(compiled, linear)):
            leaf = x.clone().requires_grad_()
            out = call(leaf)
            found.append((out, *torch.autograd.grad(out, (leaf, linear.weight, linear.bias), grad)))
        assert all(map(torch.equal, *found)), (seed, number, step)
    assert len(graphs) == 2, "one forward, one backward"
