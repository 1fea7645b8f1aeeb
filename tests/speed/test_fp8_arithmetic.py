"""FP8 on a CPU: the same bits as numpy up to the sum, on every CPU, and never by torch's own product.

The decoder and the encoder below follow the definitions of the formats in numpy and share no code with torch. Casts of
NaN may differ in the sign: compiled code keeps it or not, as the CPU's vector instructions do.
"""

import math
import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from conftest import ROOT
from fp8_net import low
from torch import nn
from torch._inductor.utils import run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flux_ref.speed import fp8_product
from flux_ref.speed.fp8_product import cast, scaled_mm
from flux_ref.speed.linear import PolicyLinear

ONE = torch.tensor(1.0)
EPS = 2.0**-24  # half a unit in the last place of fp32, relative
PRODUCT = re.compile(r"\b_scaled_\w*mm|functional\.scaled_\w*mm|\bF\.scaled_\w*mm")
CODES = np.arange(256, dtype=np.uint8)


class Format(NamedTuple):
    """An FP8 format: sign, exponent and mantissa. codes_of_nan and of infinity are without the sign."""

    mantissa_bits: int
    bias: int
    codes_of_nan: tuple[int, ...]
    infinity: int | None = None
    is_fnuz: bool = False  # its only NaN is the code of negative zero

    @property
    def values(self) -> np.ndarray:
        """The value of each of the 256 codes, fp64."""
        magnitude, mantissa_bits = CODES & 0x7F, self.mantissa_bits
        exponent, mantissa = magnitude >> mantissa_bits, magnitude & ((1 << mantissa_bits) - 1)
        significand = np.where(exponent > 0, mantissa + (1 << mantissa_bits), mantissa).astype(np.float64)
        values = np.ldexp(significand, np.maximum(exponent, 1).astype(int) - self.bias - mantissa_bits)
        if self.infinity is not None:
            values[magnitude == self.infinity] = math.inf
        values = np.where(CODES >> 7, -values, values)
        values[np.isin(CODES if self.is_fnuz else magnitude, self.codes_of_nan)] = math.nan
        return values

    def encoded(self, x: np.ndarray) -> np.ndarray:
        """The codes of fp32 values: to the nearest, ties to even, saturated, NaN to some NaN."""
        positive = self.values[:0x80]
        positive = positive[np.isfinite(positive)]  # ascending, as their codes
        magnitude = np.minimum(np.abs(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=1e300)), positive[-1])
        above = np.searchsorted(positive, magnitude)
        below = np.maximum(above - 1, 0)
        distance_up, distance_down = positive[above] - magnitude, magnitude - positive[below]
        take_upper = (distance_up < distance_down) | ((distance_up == distance_down) & (above % 2 == 0))
        codes = np.where(take_upper, above, below).astype(np.uint8)
        negative = np.signbit(x) & ~(self.is_fnuz & (codes == 0))
        return np.where(np.isnan(x), self.codes_of_nan[-1], codes | (negative.astype(np.uint8) << 7)).astype(np.uint8)


FORMATS = {
    torch.float8_e4m3fn: Format(3, 7, (0x7F,)),
    torch.float8_e5m2: Format(2, 15, (0x7D, 0x7E, 0x7F), infinity=0x7C),
    torch.float8_e4m3fnuz: Format(3, 8, (0x80,), is_fnuz=True),
    torch.float8_e5m2fnuz: Format(2, 16, (0x80,), is_fnuz=True),
}
FAMILIES = (list(FORMATS)[:2], list(FORMATS)[2:])
PAIRS = [(a, b) for e4m3, e5m2 in FAMILIES for a, b in ((e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3))]


def bits(x: np.ndarray) -> np.ndarray:
    """The bits of fp32 values, with one code for all NaN."""
    return np.where(np.isnan(x), np.float32(math.nan), x).astype(np.float32).view(np.uint32)


def hard_inputs() -> np.ndarray:
    """Every bf16 value, every value of each format, every tie between two of them, and the fp32 neighbours of these."""
    values = [(np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)]
    for known in FORMATS.values():
        finite = np.unique(known.values[np.isfinite(known.values)])
        ties = (finite[1:] + finite[:-1]) / 2
        values += [np.concatenate([finite, ties, 2 * finite[-1:]]).astype(np.float32)]
    values = np.concatenate(values)
    with np.errstate(all="ignore"):
        return np.concatenate([values, *(np.nextafter(values, np.float32(end)) for end in (-math.inf, math.inf))])


def wrong_casts(function) -> list[str]:
    """What a cast gives that numpy does not, over formats and scales."""
    x, wrong = hard_inputs(), []
    for dtype, known in FORMATS.items():
        for scale in (1.0, 0.7, 2.0**-30, 3e30):
            with np.errstate(all="ignore"):
                want = known.encoded(x * np.float32(scale))
            got = function(torch.from_numpy(x), torch.tensor(scale), dtype).view(torch.uint8).numpy()
            is_nan = np.isnan(known.values)
            differs = (got != want) & ~(is_nan[got] & is_nan[want])
            wrong += [f"{dtype} {scale}: {x[i]!r} is {got[i]:#x}, want {want[i]:#x}" for i in differs.nonzero()[0][:3]]
    return wrong


def wrong_decodings(function) -> list[str]:
    """The formats of which a decoding of all 256 codes is not numpy's."""
    return [
        str(dtype)
        for dtype, known in FORMATS.items()
        if (bits(function(torch.from_numpy(CODES).view(dtype)).numpy()) != bits(known.values)).any()
    ]


def test_casts_and_decoded_values_are_numpys_bit_for_bit():
    """Eager torch casts and decodes in software."""
    assert [known.values[:0x80][np.isfinite(known.values[:0x80])].max() for known in FORMATS.values()] == [
        torch.finfo(dtype).max for dtype in FORMATS
    ]
    assert wrong_casts(cast) == [] and wrong_decodings(torch.Tensor.float) == []


@pytest.mark.slow
def test_compiled_casts_and_decoded_values_are_numpys_bit_for_bit():
    """Inductor's vectorised casts are code of their own. On a CPU with AVX10.2 it may use the CPU's instructions."""
    torch._dynamo.reset()
    compiled = torch.compile(cast, fullgraph=True, dynamic=False)
    assert wrong_casts(compiled) == []
    assert wrong_decodings(torch.compile(lambda codes: codes.float(), fullgraph=True, dynamic=False)) == []
    torch._dynamo.reset()


def rounded_to_bf16(x: np.ndarray) -> np.ndarray:
    """fp32 rounded to the nearest bf16, ties to even."""
    pattern = x.astype(np.float32).view(np.uint32)
    pattern = (pattern + np.uint32(0x7FFF) + ((pattern >> 16) & 1)) & np.uint32(0xFFFF0000)
    return pattern.view(np.float32)


def test_one_product_with_its_scales_and_bias_is_numpys_bit_for_bit():
    """Every pair of values of two formats, one pair per element of the result: a sum has one term that is not 0."""
    rng, wrong = np.random.default_rng(0), []
    for a_dtype, b_dtype in PAIRS:
        a_codes, b_codes = (CODES[np.isfinite(FORMATS[dtype].values)] for dtype in (a_dtype, b_dtype))
        a, b = FORMATS[a_dtype].values[a_codes], FORMATS[b_dtype].values[b_codes]
        products = np.multiply.outer(a, b)
        wrong += [f"{a_dtype} {b_dtype} inexact"] * bool((products.astype(np.float32) != products).any())
        a_MK, b_NK = np.zeros((len(a), 16), np.uint8), np.zeros((-(-len(b) // 16) * 16, 16), np.uint8)
        a_MK[:, 3], b_NK[: len(b), 3] = a_codes, b_codes
        scales = np.array([3.7, 0.013], np.float32)
        bias = rounded_to_bf16(rng.normal(size=len(b_NK)).astype(np.float32))
        sides = torch.from_numpy(a_MK).view(a_dtype), torch.from_numpy(b_NK).view(b_dtype).t()
        factors = [np.float32(1) / scale for scale in scales]
        want = products.astype(np.float32) * factors[0] * factors[1] + bias[: len(b)]
        for dtype, round_to in ((torch.float32, np.asarray), (torch.bfloat16, rounded_to_bf16)):
            bias_N = torch.from_numpy(bias).bfloat16()
            inverses = torch.from_numpy(scales).reciprocal()
            got = scaled_mm(*sides, *inverses, row_times_column=True, bias_N=bias_N, out_dtype=dtype)
            got = got.float().numpy()[:, : len(b)]
            wrong += [f"{a_dtype} {b_dtype} {dtype}"] * bool((bits(got) != bits(round_to(want))).any())
    assert wrong == []


def test_sums_are_fp32s():
    """Within n * eps * sum |a b| of fp64, however the CPU orders the sum; eps covers both scales."""
    rng, wrong = np.random.default_rng(1), []
    for a_dtype, b_dtype in PAIRS:
        for inner in (16, 48, 1024):
            a_MK, b_NK = (
                FORMATS[dtype].encoded(rng.normal(size=(rows, inner)).astype(np.float32) * 3)
                for dtype, rows in ((a_dtype, 24), (b_dtype, 32))
            )
            a, b = FORMATS[a_dtype].values[a_MK], FORMATS[b_dtype].values[b_NK].T
            sides = torch.from_numpy(a_MK).view(a_dtype), torch.from_numpy(b_NK).view(b_dtype).t()
            got = scaled_mm(
                *sides, torch.tensor(1 / 3.0), torch.tensor(1 / 0.7), row_times_column=True, out_dtype=torch.float32
            )
            factor = 1 / (3.0 * float(np.float32(0.7)))
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
        result, codes = run_and_get_code(forward_and_backward, compiled)
        assert len(codes) == 2 and not any("scaled_mm" in code for code in codes)
        assert all(tensor.isfinite().all() for tensor in result)
    torch._dynamo.reset()


def test_a_device_product_counts_its_operations(monkeypatch):
    """parallel.activation_budget weighs what it recomputes; a product without a count would look free."""
    monkeypatch.setattr(fp8_product, "has_kernel", lambda device: True)
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **options: torch.mm(a.float(), b.float()).bfloat16())
    one = torch.ones(())
    left, right = torch.ones(32, 48).to(torch.float8_e4m3fn), torch.ones(16, 48).to(torch.float8_e4m3fn).t()
    with FlopCounterMode(display=False) as counter:
        scaled_mm(left, right, one, one, row_times_column=True)
    assert counter.get_flop_counts()["Global"][torch.ops.flux_ref.scaled_mm] == 2 * 32 * 48 * 16


def test_one_function_names_torchs_fp8_product():
    """bench/ceiling.py times the product on accelerators. A table in bench/kernels.py finds it among operations."""
    paths = (*ROOT.glob("*.py"), *ROOT.glob("flux_ref/**/*.py"), *ROOT.glob("bench/**/*.py"))
    mentions = {str(path.relative_to(ROOT)): len(PRODUCT.findall(path.read_text())) for path in paths}
    places = ("flux_ref/speed/fp8_product.py", "bench/ceiling.py", "bench/kernels.py")
    assert {path: count for path, count in mentions.items() if count} == dict.fromkeys(places, 1)
