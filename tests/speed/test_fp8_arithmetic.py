"""FP8 on a CPU: the same bits as ml_dtypes and numpy up to the sum, on every CPU, and never by torch's own product.

Casts of NaN may differ in the sign: compiled code keeps it or not, as the CPU's vector instructions do.
"""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from fp8_net import low
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flux_ref.speed import fp8_product
from flux_ref.speed.fp8_product import cast, scaled_mm
from flux_ref.speed.linear import PolicyLinear

EPS = 2.0**-24  # half a unit in the last place of fp32, relative
CODES = np.arange(256, dtype=np.uint8)
FORMATS = {
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
    torch.float8_e4m3fnuz: ml_dtypes.float8_e4m3fnuz,
    torch.float8_e5m2fnuz: ml_dtypes.float8_e5m2fnuz,
}
VALUES = {dtype: CODES.view(known).astype(np.float32) for dtype, known in FORMATS.items()}  # of the codes
FAMILIES = (list(FORMATS)[:2], list(FORMATS)[2:])
PAIRS = [(a, b) for e4m3, e5m2 in FAMILIES for a, b in ((e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3))]


def encoded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The codes of fp32 values: to the nearest, ties to even, saturated."""
    largest = np.float32(torch.finfo(dtype).max)
    return np.clip(x, -largest, largest).astype(FORMATS[dtype]).view(np.uint8)


def hard_inputs() -> np.ndarray:
    """Every bf16 value, every value of each format, every tie between two of them, and the fp32 neighbours of these."""
    values = [(np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)]
    for known in VALUES.values():
        finite = np.unique(known[np.isfinite(known)])
        values += [finite, (finite[1:] + finite[:-1]) / 2, 2 * finite[-1:]]
    values = np.concatenate(values)
    with np.errstate(all="ignore"):
        return np.concatenate([values, *(np.nextafter(values, np.float32(end)) for end in (-math.inf, math.inf))])


def wrong_casts(function) -> list[str]:
    """What a cast gives that ml_dtypes does not, over formats and scales."""
    x = hard_inputs()
    wrong = []
    for dtype, known in VALUES.items():
        for scale in (1.0, 0.7, 2.0**-30, 3e30):
            with np.errstate(all="ignore"):
                want = encoded(x * np.float32(scale), dtype)
            got = function(torch.from_numpy(x), torch.tensor(scale), dtype).view(torch.uint8).numpy()
            is_nan = np.isnan(known)
            differs = (got != want) & ~(is_nan[got] & is_nan[want])
            wrong += [f"{dtype} {scale}: {x[i]!r} is {got[i]:#x}, want {want[i]:#x}" for i in differs.nonzero()[0][:3]]
    return wrong


def decoded_wrongly(function) -> list[torch.dtype]:
    """The formats of which a decoding of all 256 codes is not that of ml_dtypes."""
    found = {dtype: function(torch.from_numpy(CODES).view(dtype)).numpy() for dtype in FORMATS}
    return [dtype for dtype in FORMATS if not np.array_equal(found[dtype], VALUES[dtype], equal_nan=True)]


def test_casts_and_decoded_values_are_those_of_ml_dtypes():
    """Eager torch casts and decodes in software."""
    assert wrong_casts(cast) == [] and decoded_wrongly(torch.Tensor.float) == []


@pytest.mark.slow
def test_compiled_casts_and_decoded_values_are_those_of_ml_dtypes():
    """Inductor's vectorised casts are code of their own. On a CPU with AVX10.2 it may use the CPU's instructions."""
    torch._dynamo.reset()
    assert wrong_casts(torch.compile(cast, fullgraph=True, dynamic=False)) == []
    assert decoded_wrongly(torch.compile(torch.Tensor.float, fullgraph=True, dynamic=False)) == []
    torch._dynamo.reset()


def test_one_product_with_its_scales_and_bias_is_numpys_bit_for_bit():
    """Every pair of values of two formats, one pair per element of the result: a sum has one term that is not 0."""
    scales = np.array([1 / 3.7, 1 / 0.013], np.float32)
    wrong = []
    for a_dtype, b_dtype in PAIRS:
        a_codes, b_codes = (CODES[np.isfinite(VALUES[dtype])] for dtype in (a_dtype, b_dtype))
        a_MK = np.zeros((len(a_codes), 16), np.uint8)
        b_NK = np.zeros((256, 16), np.uint8)
        a_MK[:, 3] = a_codes
        b_NK[: len(b_codes), 3] = b_codes
        bias = np.linspace(-2, 2, 256).astype(ml_dtypes.bfloat16)
        want = np.multiply.outer(VALUES[a_dtype][a_codes], VALUES[b_dtype][b_NK[:, 3]]) * scales[0] * scales[1]
        want = want + bias.astype(np.float32)
        for dtype, theirs in ((torch.float32, np.float32), (torch.bfloat16, ml_dtypes.bfloat16)):
            got = scaled_mm(
                torch.from_numpy(a_MK).view(a_dtype),
                torch.from_numpy(b_NK).view(b_dtype).t(),
                *torch.from_numpy(scales),
                row_times_column=True,
                bias_N=torch.from_numpy(bias.astype(np.float32)).bfloat16(),
                out_dtype=dtype,
            )
            if got.dtype != dtype or not np.array_equal(got.float().numpy(), want.astype(theirs).astype(np.float32)):
                wrong.append((a_dtype, b_dtype, dtype))
    assert wrong == []


def test_sums_are_fp32s():
    """Within n * eps * sum |a b| of fp64, however the CPU orders the sum; eps covers both scales."""
    rng = np.random.default_rng(1)
    factor = 1 / (3.0 * float(np.float32(0.7)))
    wrong = []
    for a_dtype, b_dtype in PAIRS:
        for inner in (16, 48, 1024):
            a_MK = encoded(rng.normal(size=(24, inner)).astype(np.float32) * 3, a_dtype)
            b_NK = encoded(rng.normal(size=(32, inner)).astype(np.float32) * 3, b_dtype)
            a = VALUES[a_dtype][a_MK].astype(np.float64)
            b = VALUES[b_dtype][b_NK].astype(np.float64).T
            got = scaled_mm(
                torch.from_numpy(a_MK).view(a_dtype),
                torch.from_numpy(b_NK).view(b_dtype).t(),
                torch.tensor(1 / 3.0),
                torch.tensor(1 / 0.7),
                row_times_column=True,
                out_dtype=torch.float32,
            )
            error = np.abs(got.double().numpy() - a @ b * factor)
            if (error > (inner + 4) * EPS * (np.abs(a) @ np.abs(b)) * factor).any():
                wrong.append(f"{a_dtype} {b_dtype} {inner}: {error.max()}")
    assert wrong == []


def forward_and_backward(call) -> list[torch.Tensor]:
    x = torch.randn(2, 16, 96, dtype=torch.bfloat16, requires_grad=True)
    out = call(x)
    out.square().mean().backward()
    return [out, x.grad]


def linear_of(arch: str) -> PolicyLinear:
    return low(nn.Linear(96, 64).bfloat16(), arch=arch)


class Operations(TorchDispatchMode):
    """Writes down the names of all operations, by whatever name of torch's they are called."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))


def test_a_cpu_never_calls_torchs_fp8_product():
    for arch in ("cpu", "gfx942"):
        with Operations() as operations:
            assert all(tensor.isfinite().all() for tensor in forward_and_backward(linear_of(arch)))
        assert "aten.mm.default" in operations.names
        assert [name for name in operations.names if "scaled" in name] == []
    assert not fp8_product.has_kernel(torch.device("cpu")) and fp8_product.has_kernel(torch.device("cuda"))


@pytest.mark.slow
def test_compiled_code_for_a_cpu_does_not_call_it_either(monkeypatch):
    monkeypatch.setattr(torch, "_scaled_mm", None)
    for arch in ("cpu", "gfx942"):
        torch._dynamo.reset()
        compiled = torch.compile(linear_of(arch), fullgraph=True, dynamic=False)
        assert all(tensor.isfinite().all() for tensor in forward_and_backward(compiled))
    torch._dynamo.reset()


def test_a_device_product_counts_its_operations(monkeypatch):
    """parallel.activation_budget weighs what it recomputes; a product without a count would look free."""
    monkeypatch.setattr(fp8_product, "has_kernel", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **options: torch.mm(a.float(), b.float()).bfloat16())
    one = torch.ones(())
    left = torch.ones(32, 48).to(torch.float8_e4m3fn)
    right = torch.ones(16, 48).to(torch.float8_e4m3fn).t()
    with FlopCounterMode(display=False) as counter:
        scaled_mm(left, right, one, one, row_times_column=True)
    assert counter.get_flop_counts()["Global"][torch.ops.flux_ref.scaled_mm] == 2 * 32 * 48 * 16
