"""Native products: what torch is given on each device, against docs/precision.md and torch, and what the bytes mean."""

import math
import re
from itertools import product
from typing import NamedTuple

import pytest
import torch
from conftest import ROOT
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm
from torch.utils.flop_counter import FlopCounterMode

from flux_ref import config_file
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.precision import blocks, casts, fp8
from flux_ref.precision.formats import E2M1
from flux_ref.precision.hooks import Precision
from flux_ref.precision.layers import SIDES, Side
from flux_ref.precision.policy import parse

M, N, K = 160, 96, 256  # 160 and 96 rows do not fill a tile of 128
FP4 = torch.float4_e2m1fn_x2
TILES, PLAIN = SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE
SCALES = {"fp32": torch.float32, "E8M0": torch.float8_e8m0fnu, "E4M3": torch.float8_e4m3fn}
# Of docs/precision.md: architectures, side, codes, recipe, swizzle, multiples of M, N and K.
ROW = re.compile(r"\| ([\w, ]+) \| (\w+) x \2 \| (\w+) \| ([^|]+) \| ([^|]+) \| (\d+), (\d+), (\d+) \|")


class Call(NamedTuple):
    """What scaled_mm is given."""

    mat_a: Tensor
    mat_b: Tensor
    scale_a: list[Tensor]
    recipe_a: list[ScalingType]
    scale_b: list[Tensor]
    recipe_b: list[ScalingType]
    swizzle_a: list[SwizzleType]
    swizzle_b: list[SwizzleType]


class Kind(NamedTuple):
    """What a row of the page says of a call."""

    codes: torch.dtype
    recipe: list[ScalingType]
    scales: list[torch.dtype]
    swizzle: list[SwizzleType]
    multiples: tuple[int, ...]


def kinds() -> dict[tuple[str, str], Kind]:
    """The table of the page, by architecture and side."""
    found = {}
    for archs, side, codes, recipe, swizzle, *multiples in ROW.findall((ROOT / "docs/precision.md").read_text()):
        scales = re.findall(r"(\w+) \((\w+)\)", recipe)
        for arch in archs.split(", "):
            found[arch, side] = Kind(
                getattr(torch, codes),
                [getattr(ScalingType, name) for name, _ in scales],
                [SCALES[dtype] for _, dtype in scales],
                [getattr(SwizzleType, name) for name in swizzle.split(", ")],
                tuple(map(int, multiples)),
            )
    return found


KINDS = kinds()
PAIRS = [
    (arch, left + left_form, left + right_form)
    for arch, left in KINDS
    for left_form, right_form in product(("", "_2d"), repeat=2)
    if {left + left_form, left + right_form} <= SIDES.keys()
]


def meant(codes: Tensor, scales: list[Tensor], tiled: bool) -> Tensor:
    """What a side means to the device, fp32 (rows, S): torch decodes FP8, a table decodes FP4."""
    if codes.dtype == FP4:
        packed = codes.view(torch.uint8).long()
        values = torch.tensor(E2M1.table())[torch.stack([packed % 16, packed // 16], 2).flatten(1)]
    else:
        values = codes.float()
    found = scales[0].float()
    if scales[0].dtype != torch.float32:
        block = 32 if scales[0].dtype == torch.float8_e8m0fnu else 16
        columns = values.shape[1] // block
        row = torch.arange(len(values))[:, None]
        column = torch.arange(columns)
        tile = row // 128 * math.ceil(columns / 4) + column // 4
        place = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4 if tiled else row * columns + column
        found = found[place].repeat_interleave(block, 1)
    return values * found.view(len(values), -1) * (scales[1] if len(scales) > 1 else 1.0)


def on_a_device(seen: list):
    """scaled_mm as a device does it, on a CPU. seen: notes the call and what its sides mean."""

    def multiply(*given, output_dtype) -> Tensor:
        call = Call(*given)
        left = meant(call.mat_a, call.scale_a, call.swizzle_a[0] == TILES)
        right = meant(call.mat_b.t(), [call.scale_b[0].t(), *call.scale_b[1:]], call.swizzle_b[0] == TILES)
        seen.append((call, left, right))
        return (left @ right.t()).to(output_dtype)

    return multiply


@pytest.fixture
def seen(monkeypatch) -> list:
    """The calls of a device, for which a CPU stands in, each with what its sides mean."""
    found = []
    monkeypatch.setattr(blocks, "scaled_mm", on_a_device(found))
    return found


def tensors() -> tuple[Tensor, Tensor]:
    """(M, K) and (N, K), with blocks of 1e-12 to 1e4, zeros of both signs, and blocks of zeros."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for rows in (M, N):
        spread = torch.exp2(torch.randint(-40, 13, (rows // 32, 1, K // 32, 1), generator=generator).float())
        x = (torch.randn(rows // 32, 32, K // 32, 32, generator=generator) * spread).flatten(2).flatten(0, 1)
        x[:32, :64] = 0.0
        x[40, 70] = -0.0
        found.append(x)
    return found[0], found[1]


def decoded(x: Tensor, side: Side) -> Tensor:
    """What an emulated product multiplies."""
    values, whole = blocks.held(blocks.scaled(x, side), side)
    return values.float() if whole is None else values.float() * whole


def scaled(x: Tensor, side: str) -> tuple[Tensor, Tensor, Tensor]:
    return casts.scaled(x, SIDES[side].form, SIDES[side].scaling)


def multiplied(arch: str, left: str, right: str, x: Tensor, w: Tensor) -> Tensor:
    return blocks.kernel(arch, SIDES[left], SIDES[right])(scaled(x, left), scaled(w, right))


def breaks(call: Call, kind: Kind) -> bool:
    """Whether a call is not what the page says, or its tensors do not lie as torch demands."""
    sides = ((call.mat_a, call.scale_a, call.recipe_a, call.swizzle_a),)
    sides += ((call.mat_b.t(), call.scale_b, call.recipe_b, call.swizzle_b),)
    return any(
        (codes.dtype, recipe, [scale.dtype for scale in scales], swizzle) != kind[:4]
        or not all(tensor.is_contiguous() for tensor in (codes, *scales))
        for codes, scales, recipe, swizzle in sides
    )


def torch_refuses(call: Call) -> bool:
    """Whether torch's own rules speak against a call. torch 2.14 and later judge a CPU's tensors before the device."""
    try:
        scaled_mm(*call, output_dtype=torch.bfloat16)
    except NotImplementedError:
        return False  # every rule holds; only a kernel for these tensors is missing
    except (RuntimeError, ValueError) as error:
        return "CPU does not support" not in str(error)
    return False


def test_a_device_is_given_the_sides_that_are_emulated_in_the_calls_of_the_page(seen):
    """Codes and scales mean the decoded sides, bit for bit, also of turned tensors and where a value is not finite."""
    wrong = []
    for (arch, left, right), bad in product(PAIRS, (None, "turned", torch.nan, torch.inf)):
        x, w = tensors()
        if bad == "turned":
            x = x.t().contiguous().t()
            w = w.t().contiguous().t()
        elif bad:
            x[100, 200] = bad
        kind = KINDS[arch, left.removesuffix("_2d")]
        found = multiplied(arch, left, right, x, w)
        call, *sides = seen.pop()
        wants = (decoded(x, SIDES[left]), decoded(w, SIDES[right]))
        faults = {
            "meaning": not all(torch.allclose(*both, rtol=0, atol=0, equal_nan=True) for both in zip(sides, wants)),
            "call": breaks(call, kind),
            "result": (found.dtype, found.shape) != (torch.bfloat16, (M, N)),
            "finite": found.isfinite().all() == isinstance(bad, float),
            "sizes": blocks.kernel(arch, SIDES[left], SIDES[right]).multiples != kind.multiples,
        }
        wrong += [(arch, left, right, bad, fault) for fault, is_there in faults.items() if is_there]
    assert not wrong


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="before torch 2.14 only devices judge a call")
def test_torch_takes_the_calls_also_of_the_least_sizes_and_refuses_wrong_ones(seen):
    """torch judges AMD's blocks only where it is built for AMD."""
    wrong = []
    for (arch, side), kind in KINDS.items():
        if arch == "gfx950":
            continue
        m, n, k = kind.multiples
        for x, w in (tensors(), (torch.ones(m, k), torch.ones(n, k))):
            multiplied(arch, side, side, x, w)
            if torch_refuses(seen.pop()[0]):
                wrong.append((arch, side, len(x)))
    assert not wrong
    multiplied("sm100", "mxfp8", "mxfp8", *tensors())
    call = seen.pop()[0]
    few = call._replace(scale_a=[call.scale_a[0][:-32]])
    bare = call._replace(swizzle_a=[PLAIN], swizzle_b=[PLAIN])
    bf16 = call._replace(mat_a=torch.zeros(M, K, dtype=torch.bfloat16))
    assert all(map(torch_refuses, (few, bare, bf16)))


def test_what_is_native_is_counted_before_a_run_and_wrong_sizes_are_refused():
    def counted(arch: str, preset: str, **model: object) -> tuple[int, int]:
        keys = {f"model__{name}": value for name, value in model.items()}
        cfg = config_file.replace(Config(name="schnell"), precision__preset=preset, **keys)
        return Precision(cfg).native(32, arch)

    every = 3 * 228
    narrow = {"hidden": 96, "heads": 3, "rope_axes": (16, 8, 8)}
    assert counted("sm100", "mxfp8") == counted("gfx950", "mxfp8") == counted("sm100", "mxfp8", **narrow) == (every, 0)
    assert counted("sm90", "mxfp8") == counted("cpu", "mxfp8") == (0, every)
    assert counted("gfx950", "mxfp6_fp4") == (2 * 228 + 38, 190), "torch multiplies no MXFP6"
    assert counted("sm100", "fp8") == (0, 0), "its products are not of blocks"
    assert counted("sm100", "under80") == (2 * 228 + 76, 0)
    message = r"^precision\.native=true: .* \(32, 32, 128\) divide, not .*; set precision\.native=false"
    with pytest.raises(Refusal, match=message):
        counted("gfx950", "mxfp8", **narrow)


def test_torch_has_a_product_for_the_pairs_of_the_page_only():
    archs = ("cpu", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx90a", "gfx942", "gfx950", "gfx1201")
    names = ("bf16", *SIDES)
    found = [key for key in product(archs, names, names) if blocks.kernel(key[0], *map(SIDES.get, key[1:]))]
    assert sorted(found) == sorted(PAIRS)
    options = [parse(f"* *: nvfp4+sr+h16 x {right}").pair for right in ("nvfp4_2d", "mxfp4", "bf16")]
    assert [bool(blocks.kernel("sm100", *pair)) for pair in options] == [True, False, False]


def test_a_tracer_sees_sizes_and_operations(seen):
    """torch's own check of an operator, and the operations that activation budgets weigh."""
    for left in ("mxfp8", "nvfp4"):
        kernel = blocks.kernel("sm100", SIDES[left], SIDES[left])
        x, w = (scaled(tensor, left) for tensor in tensors())
        with FlopCounterMode(display=False) as counter:
            kernel(x, w)
        assert counter.get_flop_counts()["Global"][torch.ops.flux_ref.native_mm] == 2 * M * N * K
        arguments = (*kernel.side(*x), *kernel.side(*w), kernel.form.name, kernel.recipe, kernel.tiled)
        checks = torch.library.opcheck(blocks._device_mm, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.slow
def test_a_compiler_keeps_bits_and_layouts(seen):
    """A side that is turned, as in backward: its codes still lie row by row."""
    x, w = tensors()
    x = x.t().contiguous().bfloat16().t()

    def multiply(x: Tensor) -> Tensor:
        return multiplied("sm100", "nvfp4", "nvfp4", x.float(), w)

    torch._dynamo.reset()
    results = [multiply(x), torch.compile(multiply, fullgraph=True, dynamic=False)(x)]
    torch._dynamo.reset()
    (eager, left, _), (compiled, compiled_left, _) = seen
    assert torch.equal(*results) and torch.equal(left, compiled_left)
    assert not breaks(eager, KINDS["sm100", "nvfp4"]) and not breaks(compiled, KINDS["sm100", "nvfp4"])


@pytest.mark.gpu
def test_this_device_computes_what_is_emulated(device, monkeypatch):
    """Within bf16's rounding and the sums' own: Hopper keeps 12 or 13 bits of them. A CPU stands in for a B200."""
    arch = fp8.architecture(device)
    if device.type == "cpu":
        arch = "sm100"
        monkeypatch.setattr(blocks, "scaled_mm", on_a_device([]))
    pairs = [(left, right) for where, left, right in PAIRS if where == arch]
    if not pairs:
        pytest.skip(f"torch has no native product on {arch}")
    wrong = []
    for left, right in pairs:
        x, w = (x.to(device) for x in tensors())
        a = decoded(x, SIDES[left])
        b = decoded(w, SIDES[right])
        want = a @ b.t()
        bound = 2.0**-8 * want.abs() + 2.0**-11 * (a.abs() @ b.abs().t())
        error = (multiplied(arch, left, right, x, w).float() - want).abs()
        if not (error <= bound).all():
            wrong.append((left, right, (error / bound).max().item()))
    assert not wrong
