"""FP8 products on a CPU: exact up to the sum, fp32 sums, on every CPU, and never torch's own product.

test_number_formats.py has the casts.
"""

from itertools import product

import pytest
import torch
from fp8_net import low
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flux_ref.precision import fp8
from flux_ref.precision.fp8 import scaled_mm

EPS = 2.0**-24  # half a unit in the last place of fp32, relative
FAMILIES = ((torch.float8_e4m3fn, torch.float8_e5m2), (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz))
PAIRS = [(a, b) for e4m3, e5m2 in FAMILIES for a, b in ((e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3))]


def finite(dtype: torch.dtype) -> Tensor:
    """All finite values of a format."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    return codes[codes.float().isfinite()]


def test_one_product_with_its_scales_and_bias_is_exact():
    """Every pair of values of two formats, one pair per element of the result: a sum has one term that is not 0."""
    scales = torch.tensor([1 / 3.7, 1 / 0.013])
    bias = torch.linspace(-2, 2, 256).bfloat16()
    wrong = []
    for (a_dtype, b_dtype), dtype in product(PAIRS, (torch.float32, torch.bfloat16)):
        a = finite(a_dtype)
        b = finite(b_dtype)
        a_MK = torch.zeros(len(a), 16).to(a_dtype)
        b_NK = torch.zeros(256, 16).to(b_dtype)
        a_MK[:, 3] = a
        b_NK[: len(b), 3] = b
        want = a.float()[:, None] * b_NK[:, 3].float() * scales[0] * scales[1] + bias.float()
        if not torch.equal(scaled_mm(a_MK, b_NK.t(), *scales, True, bias, dtype), want.to(dtype)):
            wrong.append((a_dtype, b_dtype, dtype))
    assert wrong == []


def test_sums_are_fp32s():
    """Within n * eps * sum |a b| of fp64, however the CPU orders the sum; eps covers both scales."""
    generator = torch.Generator().manual_seed(1)
    inverses = torch.tensor([1 / 3.0, 1 / 0.7])
    wrong = []
    for (a_dtype, b_dtype), inner in product(PAIRS, (16, 48, 1024)):
        a = (torch.randn(24, inner, generator=generator) * 3).to(a_dtype)
        b = (torch.randn(32, inner, generator=generator) * 3).to(b_dtype).t()
        found = scaled_mm(a, b, *inverses, True, out_dtype=torch.float32).double()
        factor = inverses.double().prod()
        error = (found - a.double() @ b.double() * factor).abs()
        if (error > (inner + 4) * EPS * (a.double().abs() @ b.double().abs()) * factor).any():
            wrong.append((a_dtype, b_dtype, inner, error.max()))
    assert wrong == []


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_cpu_never_calls_torchs_fp8_product(compiles, monkeypatch):
    monkeypatch.setattr(fp8, "_device_mm", None)
    torch._dynamo.reset()
    for arch in ("cpu", "gfx942"):
        linear = low(nn.Linear(96, 64).bfloat16(), arch=arch)
        x = torch.randn(2, 16, 96, dtype=torch.bfloat16, requires_grad=True)
        out = torch.compile(linear, fullgraph=True, dynamic=False)(x) if compiles else linear(x)
        out.square().mean().backward()
        assert out.isfinite().all() and x.grad.isfinite().all()
    torch._dynamo.reset()
    assert fp8.has_kernel(torch.device("cuda"))


def test_a_device_product_counts_its_operations(monkeypatch):
    """parallel.activation_budget weighs what it recomputes; a product without a count would look free."""
    monkeypatch.setattr(fp8, "has_kernel", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **options: torch.mm(a.float(), b.float()).bfloat16())
    left, right = (torch.ones(rows, 48).to(torch.float8_e4m3fn) for rows in (32, 16))
    with FlopCounterMode(display=False) as counter:
        scaled_mm(left, right.t(), torch.ones(()), torch.ones(()), row_times_column=True)
    assert counter.get_flop_counts()["Global"][torch.ops.flux_ref.scaled_mm] == 2 * 32 * 48 * 16
