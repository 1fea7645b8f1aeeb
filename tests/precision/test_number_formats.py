"""The number formats against ml_dtypes, torch, torchao and numpy."""

import math
from itertools import pairwise, product

import ml_dtypes
import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3
from torchao.prototype.mx_formats.kernels import unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from flux_ref import rng
from flux_ref.precision import blocks, casts, fp8
from flux_ref.precision.formats import E2M1, E2M3, E4M3, E5M2, Scaling

FORMATS = {  # ml_dtypes' and torchao's names
    E4M3: (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    E5M2: (ml_dtypes.float8_e5m2, torch.float8_e5m2),
    E2M3: (ml_dtypes.float6_e2m3fn, DTYPE_FP6_E2M3),
    E2M1: (ml_dtypes.float4_e2m1fn, torch.float4_e2m1fn_x2),
}


def bits(x):
    """The bits of fp32 numbers; every NaN has the same."""
    return x.where(~x.isnan(), torch.nan).view(torch.int32)


def decoded(codes, kind):
    """What codes mean, by ml_dtypes."""
    return torch.from_numpy(codes.numpy().view(kind).astype(np.float32))


def positive(kind):
    """All finite values from 0 on, ascending."""
    values = decoded(torch.arange(2 ** (ml_dtypes.finfo(kind).bits - 1), dtype=torch.uint8), kind)
    return values[values.isfinite()]


def hard(kind):
    """All bf16 values, all values of a format, all ties between two of them, and the fp32 numbers beside the ties."""
    every_bf16 = torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    values = positive(kind)
    ties = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(ties, torch.tensor(end)) for end in (-math.inf, math.inf)]
    found = torch.cat((values, ties, *beside))
    return torch.cat((every_bf16, found, -found))


def theirs(x, kind):
    """What ml_dtypes makes of fp32 numbers, saturated. NaN stays NaN, also where a format has none."""
    largest = positive(kind).max()
    with np.errstate(invalid="ignore"):
        found = torch.from_numpy(x.clamp(-largest, largest).numpy().astype(kind).astype(np.float32))
    return found.where(~x.isnan(), torch.nan)


def test_every_value_is_rounded_as_ml_dtypes_rounds():
    for form, (kind, _) in FORMATS.items():
        x = hard(kind)
        assert form.largest == positive(kind).max()
        assert torch.equal(bits(casts.round_to_format(x, form)), bits(theirs(x, kind))), kind


def test_torchs_casts_and_decoded_values_are_those_of_ml_dtypes():
    codes = torch.arange(256, dtype=torch.uint8)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        kind = getattr(ml_dtypes, name)
        dtype = getattr(torch, name)
        assert torch.equal(bits(codes.view(dtype).float()), bits(decoded(codes, kind))), name
        for scale in (1.0, 0.7, 2.0**-30, 3e30):
            found = fp8.cast(hard(kind), torch.tensor(scale), dtype).float()
            assert torch.equal(bits(found), bits(theirs(hard(kind) * scale, kind))), (name, scale)


def mixed():
    """(96, 128) of all magnitudes that blocks of training have, with zeros, powers of two and tiny blocks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 128, generator=generator)
    x[:64] *= torch.exp2(torch.randint(-60, 60, (64, 1), generator=generator).float())
    x[64:] *= torch.exp2(torch.arange(-140.0, -108)[:, None])
    x[3, :32] = 0
    x[5, :64] = torch.exp2(torch.arange(64) - 32.0)
    return x


def test_mx_scales_and_codes_are_those_of_torchao():
    """But for codes below a scale of 2**-127, whose code is 0: MX has this scale, torchao divides by another."""
    for (form, (kind, name)), rule in product(FORMATS.items(), ("floor", "rceil")):
        scales, codes = (one.view(torch.uint8) for one in to_mx(mixed(), name, 32, ScaleCalculationMode[rule.upper()]))
        codes = unpack_uint4(codes).view(mixed().shape) if form is E2M1 else codes
        values, own, whole = casts.quantize(mixed(), form, Scaling(rule, 1, 32))
        differs = bits(values) != bits(decoded(codes, kind))
        if form is E2M1:
            differs |= casts.fp4_codes(values) != codes
        is_least = (scales == 0).repeat_interleave(32, 1)
        assert whole is None and torch.equal(casts.scale_codes(own), scales), (kind, rule)
        assert not (differs & ~is_least).any(), (kind, rule)
    assert casts.fp4_codes(torch.tensor([torch.nan])).item() == 0, "FP4 has no NaN"


def test_nvfp4_scales_and_codes_are_those_of_torchao():
    for seed in range(24):
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        x = (torch.randn(64, 512, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed - 12)).to(dtype)
        x[0] *= 1e-6
        whole = per_tensor_amax_to_scale(x.float().abs().amax())
        scales, codes = nvfp4_quantize(x, 16, whole)
        values, own, own_whole = casts.quantize(x.float(), E2M1, Scaling("two-level", 1, 16))
        assert torch.equal(own_whole, whole) and torch.equal(own, scales.float())
        assert torch.equal(casts.fp4_codes(values), unpack_uint4(codes).view(x.shape))


def test_a_block_of_any_shape_has_the_scale_of_its_values_in_a_row_and_one_that_is_not_finite_has_nan():
    x = mixed()
    x[70, 40] = math.inf
    for (rows, columns), rule in product(((16, 16), (32, 32), (1, 0), (0, 0)), ("floor", "rceil")):
        parts = casts.blocks(x, Scaling(rule, rows, columns)).transpose(1, 2)
        flat = parts.flatten(2).flatten(0, 1)
        found = casts.quantize(x, E4M3, Scaling(rule, rows, columns))[1]
        want = casts.quantize(flat, E4M3, Scaling(rule, 1, flat.shape[1]))[1].view(parts.shape[:2])
        assert torch.equal(bits(found), bits(want)) and found.isnan().sum() == 1, (rows, columns, rule)
    assert casts.scale_codes(torch.tensor([math.nan, 2.0**-8])).tolist() == [255, 119]


def test_casts_by_powers_of_two_divide_by_nothing():
    """Triton's division is not correctly rounded: a scale would differ, and a code would be cut off."""

    def codes(x):
        values, scales, _ = casts.quantize(x, E2M1, Scaling("rceil", 1, 32))
        return casts.fp4_codes(values), casts.scale_codes(scales)

    targets = {str(node.target) for node in make_fx(codes)(mixed()).graph.nodes}
    assert "aten.mul.Tensor" in targets and not [name for name in targets if "div" in name or "reciprocal" in name]


def test_chances_are_the_words_of_the_stream_in_every_part():
    """Against numpy's generator. A part of a batch gets the part of the numbers."""
    for seed, step, number in ((0, 0, 0), (7, 5, 2**63 - 1), (2**63 - 1, 2**40, 3)):
        words = rng.words(seed, rng.ROUNDING, 480, sample=number, epoch=step)
        want = [(int(word) >> shift & 0xFFFF) * 2.0**-16 for word in words for shift in range(0, 64, 16)]
        for start, rows in ((0, 48), (640, 16)):
            found = blocks.chances(torch.tensor([seed, step, number, start]), torch.empty(rows, 40)).flatten()
            assert found.tolist() == want[start : start + rows * 40], (seed, start)


def test_a_chance_decides_between_the_two_values_around_a_number():
    """Upwards where share + chance reaches 1; the share of a negative number counts from the value below it, too."""
    chances = torch.arange(16) / 16
    for form, (kind, _) in FORMATS.items():
        for lower, upper in pairwise(positive(kind).tolist()):
            for share in (0.0, 0.25, 0.75):
                x = torch.full((16,), lower + share * (upper - lower))
                want = torch.where(share + chances >= 1, upper, lower)
                assert torch.equal(casts.round_to_format(x, form, chances), want), (kind, lower)
                want = torch.where(1 - share + chances >= 1, -lower, -upper)
                assert torch.equal(casts.round_to_format(-x, form, chances), want), (kind, lower)


def test_hadamard_is_sylvesters_matrix():
    """Its rows are orthonormal, and it turns each size numbers: entry (i, j) is negative where i & j has odd parity."""
    for size in (16, 32):
        found = casts.hadamard(torch.eye(size).repeat(1, 2), size) * math.sqrt(size)
        signs = [[(-1.0) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
        torch.testing.assert_close(found, torch.tensor(signs).repeat(1, 2))
