"""A linear under a policy."""

import pytest
import torch
from fp8_net import low
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config
from torch._inductor import metrics

from flux_ref.precision import blocks, policy
from flux_ref.precision.blocks import RoundingKey
from flux_ref.precision.formats import PRODUCTS, SIDES

BATCH, ROWS, K, N = 6, 32, 64, 96


def made(*rules, draws=(5, 9, 0, 3)):
    """draws: seed, step, first sample and number of the linear."""
    torch.manual_seed(0)
    found = low(nn.Linear(K, N), "bf16", rules=rules)
    found.draws = RoundingKey(*map(torch.tensor, draws))
    return found


def inputs():
    """An input whose first row is 0, and a gradient."""
    generator = torch.Generator().manual_seed(1)
    spread = torch.exp2(torch.randint(-8, 8, (BATCH, ROWS, 1), generator=generator).float())
    x = (torch.randn(BATCH, ROWS, K, generator=generator) * spread).bfloat16()
    x[0, 0] = 0
    return x, (torch.randn(BATCH, ROWS, N, generator=generator) * 1e-6).bfloat16()


def run(linear, x, grad, call=nn.Module.__call__):
    """The output and the gradients of input, weight and bias."""
    x = x.clone().requires_grad_()
    out = call(linear, x)
    return [out.detach(), *torch.autograd.grad(out, (x, linear.weight, linear.bias), grad)]


def test_every_product_comes_near_the_exact_one():
    """Relative errors as large as the formats' mantissas say, and no larger. A product without a rule is in bf16."""
    x, grad = inputs()
    *exact, grad_b = run(made("* *: bf16 x bf16").float(), x.float(), grad.float())
    for rules, bound in (
        (policy.PRESETS["mxfp8"], 0.06),
        (policy.PRESETS["under80"], 0.25),
        (policy.PRESETS["mxfp6_fp4"], 0.3),
        (policy.PRESETS["nvfp4"][:-1], 0.25),
        (("* grad_input: mxfp8 x bf16",), 0.06),
        (("* grad_weight: bf16 x mxfp8",), 0.06),
    ):
        linear = made(*rules)
        *found, bias = run(linear, x, grad)
        assert torch.equal(found[0][0, 0], linear.bias) and torch.allclose(bias.float(), grad_b, rtol=2**-7), rules
        for product, values, want in zip(PRODUCTS, found, exact):
            error = ((values.float() - want).norm() / want.norm()).item()
            low, high = (0.003, bound) if any(linear.pairs[product]) else (0, 0.005)
            assert low < error < high, (rules, product, error)


@pytest.mark.slow  # Inductor compiles
def test_inductor_fuses_a_stochastic_cast_into_few_kernels_of_equal_bits():
    """The rounds of the draws are some hundred operations."""
    side = SIDES["mxfp4+h32+sr"]

    def cast(x, place):
        return blocks.quantize(side, x, blocks.chances(place, x))[:2]

    metrics.reset()
    x = torch.randn((33, 96), dtype=torch.bfloat16)
    place = torch.tensor([3, 7, 11, 16])
    with inductor_config.patch(force_disable_caches=True):  # code from a cache is not counted
        found = torch.compile(cast, fullgraph=True, dynamic=False)(x, place)
    assert all(map(torch.equal, found, cast(x, place)))
    assert 0 < metrics.generated_kernel_count < 12


def test_equal_layers_share_one_compiled_graph_that_draws_for_each_layer_and_step():
    """A new graph for each block would take hours to compile. The graph must not keep the numbers of its first call."""
    rules = ("* grad_input: nvfp4+sr x nvfp4_2d",)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(lambda linear, x: linear(x), backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    grads = set()
    for seed, number, step in ((5, 3, 9), (5, 4, 9), (5, 4, 10), (6, 4, 10)):
        linear = made(*rules, draws=(seed, step, 0, number))
        want = run(linear, *inputs())
        assert all(map(torch.equal, run(linear, *inputs(), compiled), want)), (seed, number, step)
        grads.add(tuple(want[1].flatten().tolist()))
    assert len(graphs) == 2, "one forward, one backward"
    assert len(grads) == 4
