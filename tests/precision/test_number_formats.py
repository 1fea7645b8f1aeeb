"""The number formats against ml_dtypes, torch and torchao, and against plain formulas."""

import math
from itertools import pairwise, product

import ml_dtypes
import numpy as np
import pytest
import torch
from fp8_net import decode
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3
from torchao.prototype.mx_formats.kernels import unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from flux_ref import rng
from flux_ref.precision import blocks, casts, fp8
from flux_ref.precision.formats import E2M1, E2M3, E4M3, E5M2, FORMATS, Format, Scaling

THEIRS = {  # ml_dtypes'
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
TORCHS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
}
MX = {  # torchao's
    E4M3: torch.float8_e4m3fn,
    E5M2: torch.float8_e5m2,
    E2M3: DTYPE_FP6_E2M3,
    E2M1: torch.float4_e2m1fn_x2,
}
LEAST_SCALE = 0  # code of 2**-127


def bits(x: Tensor) -> Tensor:
    """The bits of fp32 numbers; every NaN has the same."""
    return x.where(~x.isnan(), torch.nan).view(torch.int32)


def all_codes(form: Format) -> Tensor:
    return torch.arange(2 * form.sign, dtype=torch.uint8)


def hard(form: Format) -> Tensor:
    """All bf16 values, all values of a format, all ties between two of them, and the fp32 numbers beside the ties."""
    every_bf16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    values = sorted({abs(value) for value in form.table() if math.isfinite(value)})
    ties = torch.tensor([(a + b) / 2 for a, b in pairwise(values)])
    beside = [torch.nextafter(ties, torch.tensor(end)) for end in (-math.inf, math.inf)]
    positive = torch.cat((torch.tensor(values), ties, *beside))
    return torch.cat((every_bf16, positive, -positive))


def theirs(x: Tensor, form: Format) -> np.ndarray:
    """What ml_dtypes makes of fp32 numbers, saturated."""
    with np.errstate(invalid="ignore"):  # NaN, in formats without NaN
        return x.clamp(-form.largest, form.largest).numpy().astype(THEIRS[form.name])


def test_codes_mean_what_ml_dtypes_says():
    wrong = []
    for name, form in FORMATS.items():
        want = torch.from_numpy(all_codes(form).numpy().view(THEIRS[name]).astype(np.float32))
        largest = want[want.isfinite()].max()
        if not torch.equal(bits(decode(form, all_codes(form))), bits(want)) or form.largest != largest:
            wrong.append(name)
    assert not wrong


def test_every_value_is_rounded_as_ml_dtypes_rounds():
    wrong = []
    for name, form in FORMATS.items():
        x = hard(form)
        values = casts.rounded(x, form)
        codes = casts.encode(form, values)
        want = theirs(x, form)
        known = ~x.isnan().numpy()
        same = torch.equal(bits(values)[known], bits(torch.from_numpy(want.astype(np.float32)))[known])
        if not same or not np.array_equal(codes[known], want.view(np.uint8)[known]):
            wrong.append(name)
        if not values[~known].isnan().all() or not (codes[~known] == (form.nan or 0)).all():
            wrong.append(f"NaN of {name}")
    assert not wrong


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torchs_casts_and_decoded_values_are_those_of_ml_dtypes(compiles):
    """Inductor's vectorised casts are code of their own. On a CPU with AVX10.2 it may use the CPU's instructions."""
    torch._dynamo.reset()
    functions = (fp8.cast, torch.Tensor.float)
    cast, decoded = (torch.compile(one, dynamic=False) if compiles else one for one in functions)
    wrong = []
    for name, dtype in TORCHS.items():
        form = FORMATS[name]
        if not torch.equal(bits(decoded(all_codes(form).view(dtype))), bits(decode(form, all_codes(form)))):
            wrong.append(name)
        for scale in (1.0, 0.7, 2.0**-30, 3e30):
            want = torch.from_numpy(theirs(hard(form) * scale, form).astype(np.float32))
            if not torch.equal(bits(cast(hard(form), torch.tensor(scale), dtype).float()), bits(want)):
                wrong.append((name, scale))
    torch._dynamo.reset()
    assert not wrong


def mixed() -> Tensor:
    """(64, 128) of all magnitudes that blocks of training have, with zeros and powers of two."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 128, generator=generator)
    x *= torch.exp2(torch.randint(-60, 60, (64, 1), generator=generator).float())
    x[3, :32] = 0
    x[5, :64] = torch.exp2(torch.arange(64) - 32.0)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mx_scales_and_codes_are_those_of_torchao(dtype):
    """Also for tiny blocks, but for codes below a scale of 2**-127: MX has this scale, torchao divides by another."""
    generator = torch.Generator().manual_seed(1)
    tiny = torch.randn(32, 128, generator=generator) * torch.exp2(torch.arange(-140.0, -108)[:, None])
    x = torch.cat((mixed(), tiny)).to(dtype)
    wrong = []
    for (form, kind), rule in product(MX.items(), ("floor", "rceil")):
        scales, codes = (one.view(torch.uint8) for one in to_mx(x, kind, 32, ScaleCalculationMode[rule.upper()]))
        codes = unpack_uint4(codes).view(x.shape) if form is E2M1 else codes
        values, own, whole = casts.scaled(x.float(), form, Scaling(rule, 1, 32))
        differs = casts.encode(form, values) != codes
        is_least = (scales == LEAST_SCALE).repeat_interleave(32, 1)
        if whole != 1 or not torch.equal(casts.scale_codes(own), scales) or (differs & ~is_least).any():
            wrong.append((form.name, rule))
    assert not wrong


def test_nvfp4_scales_and_codes_are_those_of_torchao():
    for seed in range(24):
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        x = (torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 12)).to(dtype)
        x[0] *= 1e-6
        whole = per_tensor_amax_to_scale(x.float().abs().amax())
        scales, codes = nvfp4_quantize(x, 16, whole)
        values, own, own_whole = casts.scaled(x.float(), E2M1, Scaling("two-level", 1, 16))
        assert torch.equal(own_whole, whole) and torch.equal(casts.encode(E4M3, own), scales.view(torch.uint8))
        assert torch.equal(casts.encode(E2M1, values), unpack_uint4(codes).view(x.shape))


def test_a_block_of_any_shape_has_the_scale_of_its_values_in_a_row():
    """linear: 1 / the least of 2**44 and the largest value of the format / the largest magnitude."""
    x = mixed()
    wrong = []
    for rows, columns in ((1, 16), (16, 16), (32, 32), (1, 0), (0, 0)):
        height = rows or 64
        width = columns or 128
        flat = x.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2).flatten(0, 1)
        for form, rule in product((E4M3, E5M2, E2M1), ("floor", "rceil", "linear")):
            found = casts.scaled(x, form, Scaling(rule, rows, columns))[1]
            want = casts.scaled(flat, form, Scaling(rule, 1, height * width))[1]
            if rule == "linear":
                want = 1 / (form.largest / flat.abs().amax(1)).clamp(max=2.0**44)
            if not torch.equal(found, want.view(64 // height, 128 // width)):
                wrong.append((rows, columns, form.name, rule))
    assert not wrong


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_compiler_divides_by_nothing_and_keeps_every_bit(form):
    """Triton's division is not correctly rounded, and `encode` would cut off a code."""
    numbers = hard(form)
    chance = torch.rand(numbers.shape, generator=torch.Generator().manual_seed(4))
    targets = set()

    def backend(graph: torch.fx.GraphModule, _):
        targets.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def both(x: Tensor, chance: Tensor | None) -> tuple[Tensor, Tensor]:
        values = casts.rounded(x, form, chance)
        return values.view(torch.int32), casts.encode(form, values)

    torch._dynamo.reset()
    compiled = torch.compile(both, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    for drawn in (None, chance):
        assert all(map(torch.equal, compiled(numbers, drawn), both(numbers, drawn)))
    assert "aten.mul.Tensor" in targets and not {name for name in targets if "div" in name or "reciprocal" in name}


def test_chances_are_the_words_of_the_stream_in_every_part():
    """Against numpy's generator. A part of a batch gets the part of the numbers."""
    whole = torch.empty(48, 40)
    for seed, step, number in ((0, 0, 0), (7, 5, 2**63 - 1), (2**63 - 1, 2**40, 3)):
        words = rng.words(seed, rng.ROUNDING, whole.numel() // 4, sample=number, epoch=step)
        want = [(int(word) >> shift & 0xFFFF) * 2.0**-16 for word in words for shift in range(0, 64, 16)]
        for ranks in (1, 2, 3):
            rows = 48 // ranks
            starts = [rows * 40 * rank for rank in range(ranks)]
            parts = [blocks.chances(torch.tensor([seed, step, number, start]), whole[:rows]) for start in starts]
            assert torch.cat(parts).flatten().tolist() == want, (seed, ranks)


def test_a_chance_decides_between_the_two_values_around_a_number():
    """Upwards where share + chance reaches 1; the share of a negative number counts from the value below it, too."""
    chances = torch.arange(16) / 16
    for form in FORMATS.values():
        values = sorted({abs(value) for value in form.table() if math.isfinite(value)})
        for lower, upper in pairwise(values):
            for share in (0.0, 0.25, 0.75):
                x = torch.full((16,), lower + share * (upper - lower))
                want = torch.where(share + chances >= 1, upper, lower)
                assert torch.equal(casts.rounded(x, form, chances), want), (form.name, lower)
                want = torch.where(1 - share + chances >= 1, -lower, -upper)
                assert torch.equal(casts.rounded(-x, form, chances), want), (form.name, lower)


def test_hadamard_is_sylvesters_matrix():
    x = torch.randint(-8, 9, (4, 64), generator=torch.Generator().manual_seed(0)).float()
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    for size, times in ((16, 4), (32, 5)):
        matrix = torch.ones(1, 1)
        for _ in range(times):
            matrix = torch.kron(matrix, two)
        want = (x.view(4, -1, size) @ matrix).view(4, 64) / math.sqrt(size)
        torch.testing.assert_close(casts.hadamard(x, size), want)


def test_a_block_that_is_not_finite_has_the_scale_nan():
    for value, rule in product((math.nan, math.inf), ("floor", "rceil")):
        x = torch.ones(2, 32)
        x[1, 3] = value
        scales = casts.scaled(x, E4M3, Scaling(rule, 1, 32))[1]
        assert casts.scale_codes(scales).flatten().tolist() == [119, 255], (value, rule)
