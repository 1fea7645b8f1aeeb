"""Native products: what torch is given means what is emulated, and torch takes the calls."""

import math
import re
from collections import Counter
from itertools import product

import pytest
import torch
from fp8_net import config
from torch.nn.functional import SwizzleType, scaled_mm
from torch.utils.flop_counter import FlopCounterMode

from flux_ref import config_file
from flux_ref.precision import blocks, fp8
from flux_ref.precision.formats import SIDES
from flux_ref.precision.recipe import PrecisionRecipe

M, N, K = 160, 96, 256  # 160 and 96 rows do not fill a tile of 128
FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
PAIRS = [  # of every kernel
    (arch, name, (left, right))
    for arch in blocks.DEVICES
    for left, right in product([name for name in SIDES if "+" not in name], repeat=2)
    if (name := blocks.kernel(arch, (SIDES[left], SIDES[right]), (M, N, K)))
]


def meant(codes, scales, swizzle):
    """What a side means to the device, fp32 (rows, S): torch decodes FP8, a table decodes FP4."""
    assert codes.is_contiguous() and all(scale.is_contiguous() for scale in scales)
    if codes.dtype != blocks.FP4:
        values = codes.float()
    else:
        packed = codes.view(torch.uint8).int()
        values = torch.cat((FP4_VALUES, -FP4_VALUES))[torch.stack((packed % 16, packed // 16), 2).flatten(1)]
    block = 32 if scales[0].dtype == torch.float8_e8m0fnu else 16
    columns = values.shape[1] // block
    row = torch.arange(len(values))[:, None]
    column = torch.arange(columns)
    place = row * columns + column
    if swizzle[0] == SwizzleType.SWIZZLE_32_4_4:
        tile = row // 128 * math.ceil(columns / 4) + column // 4
        place = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
    found = values * scales[0].float()[place].repeat_interleave(block, 1)
    return found * scales[1] if len(scales) > 1 else found


@pytest.fixture
def seen(monkeypatch):
    """The calls of a device, for which a CPU stands in, each with what its sides mean."""
    found = []

    def multiply(*call, output_dtype):
        a, b, a_scales, _, b_scales, _, *swizzles = call
        sides = meant(a, a_scales, swizzles[0]), meant(b.t(), b_scales, swizzles[1])
        found.append((call, *sides))
        return (sides[0] @ sides[1].t()).to(output_dtype)

    monkeypatch.setattr(blocks, "scaled_mm", multiply)
    return found


def tensors():
    """(M, K) and (N, K), with blocks of 1e-12 to 1e4, zeros of both signs, and blocks of zeros."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.exp2(torch.randint(-40, 13, (M + N, K // 16), generator=generator).float())
    x = torch.randn(M + N, K, generator=generator) * spread.repeat_interleave(16, 1)
    x[:32, :64] = 0.0
    x[40, 70] = -0.0
    return x[:M], x[M:]


def decoded(side, x):
    """What an emulated product multiplies."""
    values, whole = blocks.fake_quantize(SIDES[side], x)
    return values.float() if whole is None else values.float() * whole


def multiplied(name, sides, x, w):
    return blocks.native(name, *(blocks.quantize(SIDES[side], one) for side, one in zip(sides, (x, w))))


def torch_refuses(call):
    """Whether torch's own rules speak against a call. torch 2.14 and later judge a CPU's tensors before the device."""
    try:
        scaled_mm(*call, output_dtype=torch.bfloat16)
    except NotImplementedError:
        return False  # every rule holds; only a kernel for these tensors is missing
    except (RuntimeError, ValueError) as error:
        return "CPU does not support" not in str(error)
    return False


def test_codes_and_scales_of_every_kernel_mean_the_emulated_sides(seen):
    """Bit for bit, also of turned tensors and where a value is not finite."""
    wrong = []
    for (_, name, sides), bad in product(PAIRS, (None, torch.nan, torch.inf)):
        x, w = (one.t().contiguous().t() for one in tensors())
        if bad:
            x[100, 200] = bad
        found = multiplied(name, sides, x, w)
        wants = map(decoded, sides, (x, w))
        same = all(torch.allclose(*both, rtol=0, atol=0, equal_nan=True) for both in zip(seen.pop()[1:], wants))
        if not same or (found.dtype, found.shape) != (torch.bfloat16, (M, N)) or found.isfinite().all() == bool(bad):
            wrong.append((name, sides, bad))
    assert not wrong


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="before torch 2.14 only devices judge a call")
def test_torch_takes_the_calls_also_of_the_least_sizes_and_refuses_wrong_ones(seen):
    """torch judges AMD's blocks only where it is built for AMD."""
    for side in ("mxfp8", "mxfp4", "nvfp4"):
        name = f"blackwell {side}"
        m, n, k = blocks.KERNELS[name].multiples
        for given in (tensors(), (torch.ones(m, k), torch.ones(n, k))):
            multiplied(name, (side, side), *given)
            assert not torch_refuses(seen[-1][0]), (name, len(given[0]))
    a, b, a_scales, *rest, _, _ = seen[0][0]
    assert torch_refuses((a, b, [a_scales[0][:-32]], *seen[0][0][3:])), "too few scales"
    assert torch_refuses((a, b, a_scales, *rest, [blocks.FLAT], [blocks.FLAT])), "scales without tiles"


def test_sides_and_sizes_decide_what_is_native_and_a_run_says_so(monkeypatch):
    narrow = {"model__hidden": 96, "model__heads": 3, "model__rope_axes": (16, 8, 8)}
    for arch, preset, values, want in (
        ("sm100", "mxfp8", {}, {"blackwell mxfp8": 684}),
        ("gfx950", "mxfp8", {}, {"mi350 mxfp8": 684}),
        ("gfx950", "mxfp8", narrow, {"emulated": 380, "mi350 mxfp8": 304}),
        ("sm90", "mxfp8", {}, {"emulated": 684}),
        ("sm100", "mxfp8", {"precision__native": False}, {"emulated": 684}),
        ("gfx950", "mxfp6_fp4", {}, {"emulated": 190, "mi350 mxfp4": 494}),
        ("sm100", "under80", {}, {"blackwell mxfp4": 456, "blackwell mxfp8": 76}),
    ):
        monkeypatch.setattr(fp8, "architecture", lambda device, arch=arch: arch)
        said = PrecisionRecipe(config_file.replace(config(preset), **values)).describe(32, torch.device("cpu"))
        found = Counter()
        for count, kernel in re.findall(r"(\d+) .* \((.*)\)", "\n".join(said)):
            found[kernel] += int(count)
        assert found == want, (arch, preset)


def test_a_tracer_sees_sizes_and_operations(seen):
    """torch's own check of an operator, and the operations that activation budgets weigh: half of an FP4 product's."""
    name = "blackwell nvfp4"
    sides = [blocks.quantize(SIDES["nvfp4"], tensor) for tensor in tensors()]
    with FlopCounterMode(display=False) as counter:
        blocks.native(name, *sides)
    assert counter.get_flop_counts()["Global"][torch.ops.flux_ref.native_mm] == M * N * K
    (a, a_scales), (b, b_scales) = (blocks.operand(blocks.KERNELS[name], *side) for side in sides)
    given = (a, b.t(), a_scales, b_scales, name)
    torch.library.opcheck(blocks._native_mm, given, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.gpu
def test_this_device_computes_what_is_emulated(device, request):
    """Within bf16's rounding and the sums' own: Hopper keeps 12 or 13 bits of them. A CPU stands in for a B200."""
    arch = fp8.architecture(device)
    if device.type == "cpu":
        arch = "sm100"
        request.getfixturevalue("seen")
    pairs = [found for where, *found in PAIRS if where == arch]
    if not pairs:
        pytest.skip(f"torch has no native product on {arch}")
    for name, sides in pairs:
        given = [x.to(device) for x in tensors()]
        a, b = map(decoded, sides, given)
        want = a @ b.t()
        bound = 2.0**-8 * want.abs() + 2.0**-11 * (a.abs() @ b.abs().t())
        error = (multiplied(name, sides, *given).float() - want).abs()
        assert (error <= bound).all(), (sides, (error / bound).max().item())
