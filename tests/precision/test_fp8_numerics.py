"""FP8 products: fp32 sums on a CPU, and the layouts and counts that reach a device, eager and compiled.

test_number_formats.py has the casts.
"""

from itertools import product

import pytest
import torch
from fp8_net import Net
from torch.utils.flop_counter import FlopCounterMode

from flux_ref.precision import fp8
from flux_ref.precision.fp8 import scaled_mm

EPS = 2.0**-24  # half a unit in the last place of fp32, relative
FAMILIES = ((torch.float8_e4m3fn, torch.float8_e5m2), (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))
PAIRS = [(a, b) for e4m3, e5m2 in FAMILIES for a, b in ((e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3))]


def test_sums_are_fp32s():
    """Within n * eps * sum |a b| of fp64, however the CPU orders the sum, and the rounding of the result to bf16."""
    generator = torch.Generator().manual_seed(1)
    inverses = torch.tensor([1 / 3.0, 1 / 0.7])
    bias = torch.linspace(-2, 2, 32).bfloat16()
    for (a_dtype, b_dtype), inner in product(PAIRS, (16, 1024)):
        a = (torch.randn(24, inner, generator=generator) * 3).to(a_dtype)
        b = (torch.randn(32, inner, generator=generator) * 3).to(b_dtype).t()
        found = scaled_mm(a, b, *inverses, bias).double()
        factor = inverses.double().prod()
        error = (found - a.double() @ b.double() * factor - bias.double()).abs()
        bound = (inner + 4) * EPS * (a.double().abs() @ b.double().abs() * factor + bias.double().abs())
        assert (error <= bound + 2.0**-8 * found.abs()).all(), (a_dtype, b_dtype, inner)


@pytest.fixture
def layouts(monkeypatch):
    """torch's product as a device would do it, on a CPU. Notes whether each was one of rows by columns."""
    found = []

    def multiply(a, b, scale_a, scale_b, *, bias, out_dtype, use_fast_accum):
        found.append(a.stride(1) == 1 and b.stride(0) == 1)
        out = torch.mm(a.float(), b.float()) * scale_a * scale_b
        return (out if bias is None else out + bias.float()).to(out_dtype)

    assert fp8.has_kernel(torch.device("cuda")) and not fp8.has_kernel(torch.device("cpu"))
    monkeypatch.setattr(fp8, "has_kernel", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    return found


def test_a_device_product_counts_its_operations(layouts):
    """compute.activation_memory_budget weighs what it recomputes; a product without a count would look free."""
    left, right = (torch.ones(rows, 48).to(torch.float8_e4m3fn) for rows in (32, 16))
    with FlopCounterMode(display=False) as counter:
        scaled_mm(left, right.t(), torch.ones(()), torch.ones(()))
    assert counter.get_flop_counts()["Global"][torch.ops.flux_ref.scaled_mm] == 2 * 32 * 48 * 16


@pytest.mark.parametrize("ways", [[False], pytest.param([False, True], marks=pytest.mark.nightly)])
@torch._inductor.config.patch(emulate_precision_casts=True, force_disable_caches=True)
def test_a_device_gets_the_layouts_that_it_takes(layouts, ways):
    """Nine products each: rows by columns on an H200, no transposed copies on a B200. Compiling changes no bit."""
    import torch._inductor.kernel.mm

    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    for arch, preset in (("sm90", "fp8"), ("sm90", "fp8_delayed"), ("sm100", "fp8_delayed")):
        found = []
        for compiles in ways:
            torch._dynamo.reset()
            layouts.clear()
            net = Net(arch, preset)
            leaf = x.clone().requires_grad_()
            out = torch.compile(net, fullgraph=True, dynamic=False)(leaf) if compiles else net(leaf)
            out.square().sum().backward()
            amaxes = [one.amax for linear in net.children() for one in (linear.of_input, linear.of_grad) if one.scales]
            found.append([out.detach(), leaf.grad, *(one.grad for one in net.parameters()), *amaxes])
            assert (len(layouts), sum(layouts)) == (9, 9 if arch == "sm90" else 3), (arch, compiles)
        assert all(map(torch.equal, found[0], found[-1])), (arch, preset)
    torch._dynamo.reset()
