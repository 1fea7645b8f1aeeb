"""The number formats against ml_dtypes, torch and torchao, and against plain formulas."""

import math
from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
import torch
from fp8_net import decode
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torchao.prototype.mx_formats.constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from torchao.prototype.mx_formats.kernels import unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

from flux_ref import rng
from flux_ref.speed import casts, chances
from flux_ref.speed.number_formats import E2M1, E2M3, E3M2, E4M3, E5M2, FORMATS, Format, Scaling

THEIRS = {  # ml_dtypes'
    **{"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e4m3fnuz": ml_dtypes.float8_e4m3fnuz},
    **{"e5m2fnuz": ml_dtypes.float8_e5m2fnuz, "e3m2": ml_dtypes.float6_e3m2fn, "e2m3": ml_dtypes.float6_e2m3fn},
    "e2m1": ml_dtypes.float4_e2m1fn,
}
TORCHS = {"e4m3": "e4m3fn", "e5m2": "e5m2", "e4m3fnuz": "e4m3fnuz", "e5m2fnuz": "e5m2fnuz"}
MX = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2, E2M3: DTYPE_FP6_E2M3, E3M2: DTYPE_FP6_E3M2}
MX[E2M1] = torch.float4_e2m1fn_x2
LEAST_SCALE = 0  # code of 2**-127


def every_bf16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()


def around(form: Format) -> torch.Tensor:
    """All values of a format, all ties between neighbours, and the fp32 numbers beside the ties; both signs."""
    values = sorted({abs(value) for value in form.table() if math.isfinite(value)})
    ties = torch.tensor([(a + b) / 2 for a, b in pairwise(values)])
    beside = torch.cat((torch.nextafter(ties, torch.tensor(-math.inf)), torch.nextafter(ties, torch.tensor(math.inf))))
    positive = torch.cat((torch.tensor(values), ties, beside, torch.tensor([math.inf, 3e38, 1e-38, 1e-45, 0.0])))
    return torch.cat((positive, -positive))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


def test_codes_mean_what_ml_dtypes_and_torch_say():
    wrong = []
    for name, form in FORMATS.items():
        codes = np.arange(2 * form.sign, dtype=np.uint8)
        ours = decode(form, torch.from_numpy(codes))
        theirs = [torch.from_numpy(codes.view(THEIRS[name]).astype(np.float32))]
        if name in TORCHS:
            theirs.append(torch.from_numpy(codes).view(getattr(torch, f"float8_{TORCHS[name]}")).float())
        for values in theirs:
            nan = values.isnan()
            if not torch.equal(ours.isnan(), nan) or not torch.equal(bits(ours)[~nan], bits(values)[~nan]):
                wrong.append(name)
        assert form.largest == max(value for value in form.table() if math.isfinite(value))
    assert not wrong


def test_every_value_is_rounded_as_ml_dtypes_rounds():
    """All values of bf16, ties, neighbours of ties, subnormal numbers, zeros, infinities, NaN."""
    for name, form in FORMATS.items():
        x = torch.cat((every_bf16(), around(form)))
        ours = casts.rounded(x, form)
        codes = casts.encode(form, ours)
        nan = x.isnan()
        inside = x.clamp(-form.largest, form.largest)[~nan].numpy()
        theirs = inside.astype(THEIRS[name])
        assert np.array_equal(ours[~nan], theirs.astype(np.float32)), name
        assert np.array_equal(codes[~nan], theirs.view(np.uint8)), name
        assert ours[nan].isnan().all() and (codes[nan] == (form.nan or 0)).all(), name
        assert torch.equal(bits(decode(form, codes))[~nan], bits(ours)[~nan]), name


def mixed(seed: int = 0) -> torch.Tensor:
    """(64, 128) of all magnitudes that blocks of training have, with zeros and powers of two."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 128, generator=generator)
    x *= torch.exp2(torch.randint(-60, 60, (64, 1), generator=generator).float())
    x[3, :32], x[5, :64] = 0, torch.exp2(torch.arange(64) - 32.0)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mx_scales_and_codes_are_those_of_torchao(dtype):
    """Also for tiny blocks, but for codes below a scale of 2**-127: MX has this scale, torchao divides by another."""
    generator = torch.Generator().manual_seed(1)
    tiny = torch.randn(32, 128, generator=generator) * torch.exp2(torch.arange(-140.0, -108)[:, None])
    x, wrong, least = torch.cat((mixed(), tiny)).to(dtype), [], 0
    for form, theirs in MX.items():
        for rule in ("floor", "ceil", "rceil"):
            scales, codes = to_mx(x, theirs, 32, ScaleCalculationMode[rule.upper()])
            codes, scales = codes.view(torch.uint8), scales.view(torch.uint8)
            codes = unpack_uint4(codes).view(x.shape) if form is E2M1 else codes
            values, own, whole = casts.scaled(x.float(), form, Scaling(rule, 1, 32))
            is_least = (scales == LEAST_SCALE).repeat_interleave(32, 1)
            wrong += [(form.name, rule, "scales")] * (not torch.equal(casts.scale_codes(own), scales))
            wrong += [(form.name, rule, "codes")] * (
                not torch.equal(casts.encode(form, values)[~is_least], codes[~is_least])
            )
            least += int(is_least.sum())
            exact = (x.double() * 2.0**127).float() if dtype == torch.float32 else x.float() * 2.0**64 * 2.0**63
            want = casts.rounded(exact, form)[is_least]
            wrong += [(form.name, rule, "least")] * (not torch.equal(values[is_least], want))
            assert whole == 1
    assert not wrong and least


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
    x = mixed()
    for rows, columns in ((1, 16), (16, 16), (32, 32), (1, 0), (0, 0)):
        height = rows or 64
        width = columns or 128
        flat = x.unflatten(1, (-1, width)).unflatten(0, (-1, height)).transpose(1, 2).flatten(2).flatten(0, 1)
        for form in (E4M3, E5M2, E2M1):
            for rule in ("floor", "ceil", "rceil", "linear"):
                found = casts.scaled(x, form, Scaling(rule, rows, columns))[1]
                want = casts.scaled(flat, form, Scaling(rule, 1, height * width))[1]
                assert torch.equal(found, want.view(64 // height, 128 // width)), (rows, columns, form.name, rule)


def test_linear_scales_follow_their_formula():
    """The least of 2**max_exponent and the largest value of the format / the largest magnitude; stored inverted."""
    x = mixed()
    for form in (E4M3, E5M2, E2M1):
        for most in (44, 20):
            found = casts.scaled(x, form, Scaling("linear", 1, 32, most))[1]
            amax = x.abs().view(64, 4, 32).amax(2).numpy()
            with np.errstate(divide="ignore"):
                linear = np.float32(form.largest) * (1 / amax)  # as torch divides
            want = 1 / np.minimum(linear, np.float32(2.0**most))
            assert np.array_equal(found.numpy(), want), (form.name, most)


def test_square_blocks_serve_both_directions():
    x = mixed()
    for scaling in (Scaling("floor", 32, 32), Scaling("rceil", 16, 16), Scaling("two-level", 16, 16)):
        values, scales, _ = casts.scaled(x, E2M1, scaling)
        turned, turned_scales, _ = casts.scaled(x.t(), E2M1, scaling)
        assert torch.equal(values, turned.t()) and torch.equal(scales, turned_scales.t())


def test_what_is_not_finite_spoils_its_block_alone():
    x = torch.ones(4, 64)
    x[0, 3], x[1, 40] = math.nan, -math.inf
    for rule in ("floor", "ceil", "rceil", "linear"):
        values, scales, _ = casts.scaled(x, E4M3, Scaling(rule, 1, 32))
        decoded = values * scales.repeat_interleave(32, 1)
        want = torch.zeros(4, 2, dtype=torch.bool)
        want[0, 0] = want[1, 1] = True
        assert torch.equal(decoded.isnan(), want.repeat_interleave(32, 1)), rule
        assert rule == "linear" or torch.equal(casts.scale_codes(scales) == casts.SCALE_NAN, want)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_compiler_divides_by_nothing_and_keeps_every_bit(form):
    """Triton's division is not correctly rounded, and `encode` would cut off a code."""
    numbers = torch.cat((every_bf16(), around(form)))
    chance = torch.rand(numbers.shape, generator=torch.Generator().manual_seed(4))
    targets = set()

    def backend(graph: torch.fx.GraphModule, _):
        targets.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    def both(x: torch.Tensor, chance: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        values = casts.rounded(x, form, chance)
        return values, casts.encode(form, values)

    torch._dynamo.reset()
    compiled = torch.compile(both, backend=aot_autograd(fw_compiler=backend), fullgraph=True)
    for drawn in (None, chance):
        (values, codes), (want, want_codes) = compiled(numbers, drawn), both(numbers, drawn)
        assert torch.equal(values.view(torch.int32), want.view(torch.int32)) and torch.equal(codes, want_codes)
    assert "aten.mul.Tensor" in targets and not {name for name in targets if "div" in name or "reciprocal" in name}


def test_stochastic_rounding_is_unbiased_and_takes_neighbours_only():
    generator, count, wrong = torch.Generator().manual_seed(0), 2**20, []
    for name, form in FORMATS.items():
        least = form.value(1)
        for value in (least * 0.3, -1.37, form.largest * 0.99):
            found = casts.rounded(torch.full((count,), value), form, torch.rand(count, generator=generator)).double()
            grid = sorted(v for v in form.table() if math.isfinite(v))
            below, above = max(v for v in grid if v <= value), min(v for v in grid if v >= value)
            p = (np.float32(value) - below) / (above - below) if above > below else 0.0
            error = abs(found.mean().item() - float(np.float32(value)))
            bound = 4 * (above - below) * math.sqrt(p * (1 - p) / count) + 1e-7 * abs(value)
            wrong += [(name, value, error, bound)] * (error > bound or not set(found.tolist()) <= {below, above})
    assert not wrong


def test_hadamard_is_orthogonal_and_changes_no_product():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 96, generator=generator), torch.randn(32, 96, generator=generator)
    for size in (16, 32):
        h = casts.hadamard(torch.eye(size), size)
        torch.testing.assert_close(h @ h.t(), torch.eye(size), rtol=0, atol=1e-6)
        assert torch.equal(h.abs(), torch.full((size, size), 1 / math.sqrt(size)))
        torch.testing.assert_close(
            casts.hadamard(a, size) @ casts.hadamard(b, size).t(), a @ b.t(), rtol=1e-4, atol=1e-4
        )
        torch.testing.assert_close(casts.hadamard(casts.hadamard(a, size), size), a, rtol=0, atol=1e-5)


def test_chances_are_the_words_of_the_stream_on_every_device_and_in_every_part():
    """The device's arithmetic runs on a CPU here, too. A part of a batch gets the part of the numbers."""
    whole = torch.empty(48, 40)
    for seed, step, product in ((0, 0, 0), (7, 5, 2**63 - 1), (2**63 - 1, 2**40, 3)):
        found = chances.chances(torch.tensor([seed, step, product, 0]), whole)
        words = rng.words(seed, rng.ROUNDING, whole.numel() // 4, sample=product, epoch=step)
        want = [(int(word) >> shift & 0xFFFF) * 2.0**-16 for word in words for shift in range(0, 64, 16)]
        assert found.flatten().tolist() == want
        assert torch.equal(chances.by_torch(torch.tensor([seed, step, product, 0]), whole), found)
        for ranks in (2, 3):
            for draw in (chances.chances, chances.by_torch):
                rows = 48 // ranks
                parts = [draw(torch.tensor([seed, step, product, rows * 40 * i]), whole[:rows]) for i in range(ranks)]
                assert torch.equal(torch.cat(parts), found)
    with pytest.raises(AssertionError):
        chances.chances(torch.tensor([0, 0, 0, 17]), whole)  # would give the numbers of element 16
