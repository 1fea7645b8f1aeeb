"""Native products: what torch is given on each device, judged by the rules of its source, and what the bytes mean."""

import math
import re
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from flux_ref import config_file
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.speed import casts, fp8_product, native
from flux_ref.speed.block_product import decoded
from flux_ref.speed.number_formats import E2M1
from flux_ref.speed.policy import parse
from flux_ref.speed.sides import SIDES

M, N, K = 160, 96, 256  # 160 and 96 rows do not fill a tile of 128
BF16, FP32, FP8, FP4 = torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float4_e2m1fn_x2
TILES, PLAIN = SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE
PAIRS = [
    (arch, name, right)
    for arch, sides in native.FOUND.items()
    if arch != "sm103"  # as sm100
    for name in sides
    for right in (name, f"{name}_2d")
    if right in SIDES
]


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
    output_dtype: torch.dtype

    def run(self) -> Tensor:
        return scaled_mm(*self[:-1], output_dtype=self.output_dtype)


def tensors() -> tuple[Tensor, Tensor]:
    """(M, K) and (N, K), with blocks of 1e-12 to 1e4, zeros of both signs, and blocks of zeros."""
    generator, found = torch.Generator().manual_seed(3), []
    for rows in (M, N):
        spread = torch.exp2(torch.randint(-40, 13, (rows // 32, 1, K // 32, 1), generator=generator).float())
        x = (torch.randn(rows // 32, 32, K // 32, 32, generator=generator) * spread).flatten(2).flatten(0, 1)
        x[:32, :64], x[40, 70] = 0.0, -0.0
        found.append(x)
    return found[0], found[1]


def scaled(x: Tensor, side: str) -> tuple[Tensor, Tensor, Tensor]:
    return casts.scaled(x, SIDES[side].form, SIDES[side].scaling)


def asked(patch, arch: str, left: str, right: str, both: tuple[Tensor, Tensor]) -> Call:
    """What torch is asked for. both: the tensors to multiply."""
    calls = []

    def note(*given, output_dtype):
        calls.append(Call(*given, output_dtype))
        return torch.empty(given[0].shape[0], given[1].shape[1], dtype=output_dtype)

    with patch.context() as inner:
        inner.setattr(native, "scaled_mm", note)
        native.product(arch, SIDES[left], SIDES[right])(scaled(both[0], left), scaled(both[1], right))
    return calls[0]


def broken(arch: str, call: Call) -> list[str]:
    """The rules of torch's ScaledBlas.cpp that a call breaks."""
    packed = 2 if call.mat_a.dtype == FP4 else 1
    (m, k), n = call.mat_a.shape, call.mat_b.shape[1]
    k *= packed
    names, is_amd = [kind.name for kind in call.recipe_a], arch.startswith("gfx")
    row_dtype = torch.float8_e4m3fnuz if arch == "gfx942" else FP8
    kernels = {  # recipe: dtypes of codes, dtypes of scales, values that share a scale, architectures
        ("RowWise",): ({row_dtype}, [FP32], k, ("sm90", "sm100", "sm103", "gfx942", "gfx950")),
        ("BlockWise1x32",): ({FP8, FP4}, [torch.float8_e8m0fnu], 32, ("sm100", "sm103", "gfx950")),
        ("BlockWise1x16", "TensorWise"): ({FP4}, [FP8, FP32], 16, ("sm100", "sm103")),
    }
    if call.recipe_a != call.recipe_b or tuple(names) not in kernels:
        return ["recipe"]
    dtypes, scale_dtypes, block, archs = kernels[tuple(names)]
    is_row = names == ["RowWise"]
    swizzle = [TILES if not is_amd and not is_row else PLAIN, PLAIN][: len(names)]
    multiple, multiple_k = (32, 32 * packed) if is_amd and not is_row else (1, 16)
    rules = {
        "architecture": arch in archs,
        "dtype of codes": call.mat_a.dtype == call.mat_b.dtype and call.mat_a.dtype in dtypes,
        "layout": call.mat_a.stride() == (k // packed, 1) and call.mat_b.stride() == (1, k // packed),
        "shared size": k == call.mat_b.shape[0] * packed,
        "multiples": not m % multiple and not n % max(16, multiple) and not k % multiple_k,
        "multiples of 16 bytes": not call.mat_a.shape[1] % 16,
        "output": call.output_dtype == BF16,
        "swizzle": call.swizzle_a == call.swizzle_b == swizzle,
    }
    for side, rows, shape in (("a", m, (m, 1)), ("b", n, (1, n))):
        scales, columns = getattr(call, f"scale_{side}"), math.ceil(k / block)
        if swizzle[0] == TILES:
            rows, columns = math.ceil(rows / 128) * 128, math.ceil(columns / 4) * 4
        rules |= {
            f"dtype of scales {side}": [one.dtype for one in scales] == scale_dtypes,
            f"number of scales {side}": [one.numel() for one in scales] == [rows * columns, 1][: len(names)],
            f"shape of scales {side}": not is_row or scales[0].shape == shape,
            f"layout of scales {side}": all(one.is_contiguous() for one in scales),
        }
    return [rule for rule, holds in rules.items() if not holds]


def torch_refuses(call: Call) -> str:
    """What torch's own rules say against a call, by tensors without a device; "": nothing.

    torch 2.11 to 2.13 judge meta tensors, 2.14 and 2.15 judge tensors of a CPU before they ask for its kernel.
    """
    if META_JUDGES:
        call = Call(*tree_map_only(Tensor, lambda one: one.to("meta"), tuple(call)))
    try:
        call.run()
    except NotImplementedError:
        return ""  # every rule holds; only a kernel for these tensors is missing
    except (RuntimeError, ValueError, IndexError) as error:  # torch 2.11 fails to write one of its messages
        return "" if "CPU does not support" in str(error) else str(error)
    return ""


def meta_judges() -> bool:
    codes, scale = torch.empty(32, 32, device="meta").to(FP8), [torch.empty(7, device="meta")]
    recipe = [ScalingType.RowWise]
    try:
        scaled_mm(codes, codes.t(), scale, recipe, scale, recipe)
    except (RuntimeError, ValueError):
        return True
    return False


META_JUDGES = meta_judges()


def judged_by_torch(arch: str, name: str) -> bool:
    """torch judges AMD's blocks only where it is built for AMD; up to 2.13 it counts two FP4 codes as one."""
    return (arch != "gfx950" or name == "e4m3_row") and not (name == "mxfp4" and META_JUDGES)


def test_calls_keep_torchs_rules(monkeypatch):
    """On tensors, on turned tensors, and at the least sizes that each kernel is said to take."""
    wrong = []
    for arch, left, right in PAIRS:
        m, n, k = native.product(arch, SIDES[left], SIDES[right]).multiples
        x, w = tensors()
        cases = {"real": (x, w), "turned": (x.t().contiguous().t(), w.t().contiguous().t())}
        if left == right:
            cases["least"] = (torch.ones(m, k), torch.ones(n, k))
        for name, both in cases.items():
            call = asked(monkeypatch, arch, left, right, both)
            wrong += [(arch, left, right, name, rule) for rule in broken(arch, call)]
            if judged_by_torch(arch, left) and (said := torch_refuses(call)):
                wrong.append((arch, left, right, name, said))
    assert not wrong


def test_torch_and_the_rules_above_see_a_wrong_call(monkeypatch):
    call = asked(monkeypatch, "sm100", "mxfp8", "mxfp8", tensors())
    few = call._replace(scale_a=[call.scale_a[0][:-32]])
    bare = call._replace(swizzle_a=[PLAIN], swizzle_b=[PLAIN])
    bf16 = call._replace(mat_a=torch.zeros(M, K, dtype=BF16))
    for one in (few, bare, bf16):
        assert torch_refuses(one) and broken("sm100", one)
    assert broken("sm89", call) == ["architecture"]


def test_sizes_that_a_kernel_does_not_take_are_refused():
    accepted = []
    for arch, side, right in PAIRS:
        kernel = native.product(arch, SIDES[side], SIDES[right])
        for place, multiple in enumerate(kernel.multiples):
            if multiple > 1:
                sizes = list(kernel.multiples)
                sizes[place] += multiple // 2
                try:
                    kernel.require(tuple(sizes))
                    accepted.append((arch, side, right, place))
                except Refusal as refusal:
                    assert re.search(r"M, N and K that .* divide, not .* set precision\.native=false", str(refusal))
        kernel.require(kernel.multiples)
    assert not accepted


def test_what_is_native_is_counted_before_a_run_and_wrong_sizes_are_refused():
    def counted(arch: str, preset: str, rows: int = 32, **model: object) -> tuple[int, int]:
        keys = {f"model__{name}": value for name, value in model.items()}
        cfg = config_file.replace(Config(name="schnell"), precision__preset=preset, **keys)
        return native.require_native_sizes(cfg, arch, rows)

    every = 3 * 228
    assert counted("sm100", "mxfp8") == counted("gfx950", "mxfp8") == (every, 0)
    assert counted("sm90", "mxfp8") == counted("cpu", "mxfp8") == (0, every)
    assert counted("gfx950", "mxfp6_fp4") == (2 * 228 + 38, 190), "torch multiplies no MXFP6"
    assert counted("sm100", "fp8") == (0, 0), "its products are not of blocks"
    assert counted("sm100", "mxfp4_backward") == (2 * 228 + 76, 0)
    narrow = {"hidden": 96, "heads": 3, "rope_axes": (16, 8, 8)}
    assert counted("sm100", "mxfp8", **narrow) == (every, 0)
    with pytest.raises(
        Refusal, match=r"precision\.native=true: .* \(32, 32, 128\) divide, not .*; set precision\.native=f"
    ):
        counted("gfx950", "mxfp8", **narrow)


def meant(codes: Tensor, scales: list[Tensor], rows: int, tiled: bool) -> Tensor:
    """What a side means to the device, fp32 (rows, S): torch decodes FP8, a table decodes FP4."""
    if codes.dtype == FP4:
        packed = codes.view(torch.uint8).long()
        values = torch.tensor(E2M1.table())[torch.stack([packed % 16, packed // 16], 2).flatten(1)]
    else:
        values = codes.float()
    block_scales = scales[0].float()
    if codes.dtype == FP4 or scales[0].dtype == torch.float8_e8m0fnu:
        block = 32 if scales[0].dtype == torch.float8_e8m0fnu else 16
        columns = values.shape[1] // block
        row, column = torch.arange(rows)[:, None], torch.arange(columns)
        tile = row // 128 * math.ceil(columns / 4) + column // 4
        place = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4 if tiled else row * columns + column
        block_scales = block_scales[place].repeat_interleave(block, 1)
    return values * block_scales.view(rows, -1) * (scales[1] if len(scales) > 1 else 1.0)


def on_a_device(seen: list):
    """scaled_mm as a device does it, on a CPU. seen: notes the call and what its sides mean."""

    def multiply(*given, output_dtype) -> Tensor:
        call = Call(*given, output_dtype)
        tiled = call.swizzle_a[0] == TILES
        left = meant(call.mat_a, call.scale_a, len(call.mat_a), tiled)
        right = meant(call.mat_b.t(), [call.scale_b[0].t(), *call.scale_b[1:]], call.mat_b.shape[1], tiled)
        seen.append((call, left, right))
        return (left @ right.t()).to(output_dtype)

    return multiply


def test_a_device_is_given_the_sides_that_are_emulated(monkeypatch):
    """Codes and scales mean the decoded sides, bit for bit, also where a block holds a NaN or an infinity."""
    seen, wrong = [], []
    monkeypatch.setattr(native, "scaled_mm", on_a_device(seen))
    for arch, left, right in PAIRS:
        for bad in (None, torch.nan, torch.inf):
            x, w = tensors()
            if bad:
                x[100, 200] = bad
            found = native.product(arch, SIDES[left], SIDES[right])(scaled(x, left), scaled(w, right))
            for side, expected in zip(seen.pop()[1:], (decoded(x, SIDES[left]), decoded(w, SIDES[right]))):
                if not torch.allclose(side, expected, rtol=0, atol=0, equal_nan=True):
                    wrong.append((arch, left, right, bad))
            if found.dtype != BF16 or found.shape != (M, N) or found.isfinite().all() == bool(bad):
                wrong.append((arch, left, right, bad, "result"))
    assert not wrong


def test_torch_has_a_product_for_these_pairs_only():
    names = ("bf16", *SIDES)
    found = {}
    for arch in ("cpu", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx90a", "gfx942", "gfx950", "gfx1201"):
        for left in names:
            for right in names:
                if native.product(arch, SIDES.get(left), SIDES.get(right)):
                    found.setdefault(arch, set()).add((left, right))
    rows = {("e4m3_row", "e4m3_row")}
    mxfp8 = {("mxfp8", "mxfp8")}
    mxfp4 = set(product(("mxfp4", "mxfp4_2d"), repeat=2))
    nvfp4 = set(product(("nvfp4", "nvfp4_2d"), repeat=2))
    blackwell = rows | mxfp8 | mxfp4 | nvfp4
    assert found == {
        "sm90": rows,
        "sm100": blackwell,
        "sm103": blackwell,
        "gfx942": rows,
        "gfx950": rows | mxfp8 | mxfp4,
    }
    options = [parse(f"* *: nvfp4+sr+h16 x {right}", 44).pair for right in ("nvfp4_2d", "mxfp4", "bf16")]
    assert [bool(native.product("sm100", *pair)) for pair in options] == [True, False, False]


def test_a_tracer_sees_sizes_and_operations(monkeypatch):
    """torch's own check of an operator, and the operations that activation budgets weigh."""
    monkeypatch.setattr(native, "scaled_mm", on_a_device([]))
    for left in ("mxfp8", "nvfp4"):
        kernel = native.product("sm100", SIDES[left], SIDES[left])
        sides = [scaled(x, left) for x in tensors()]
        with FlopCounterMode(display=False) as counter:
            kernel(*sides)
        assert counter.get_flop_counts()["Global"][torch.ops.flux_ref.native_mm] == 2 * M * N * K
        arguments = (*kernel.side(*sides[0]), *kernel.side(*sides[1]), kernel.form.name)
        arguments += (list(kernel.recipe), kernel.tiled)
        checks = torch.library.opcheck(native._device_mm, arguments, test_utils=("test_schema", "test_faketensor"))
        assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.slow
def test_a_compiler_keeps_bits_and_layouts(monkeypatch):
    """A side that is turned, as in backward: its codes still lie row by row."""
    seen = []
    monkeypatch.setattr(native, "scaled_mm", on_a_device(seen))
    x, right = tensors()[0].t().contiguous().bfloat16().t(), scaled(tensors()[1], "nvfp4")

    def multiply(x):
        return native.product("sm100", SIDES["nvfp4"], SIDES["nvfp4"])(scaled(x.float(), "nvfp4"), right)

    torch._dynamo.reset()
    results = [multiply(x), torch.compile(multiply, fullgraph=True, dynamic=False)(x)]
    torch._dynamo.reset()
    (eager, left, _), (compiled, compiled_left, _) = seen
    assert torch.equal(*results) and torch.equal(left, compiled_left)
    assert not broken("sm100", eager) and not broken("sm100", compiled)


@pytest.mark.gpu
def test_this_device_computes_what_is_emulated(device, monkeypatch):
    """Within bf16's rounding and the order of the sums. A CPU stands in for a B200."""
    arch = fp8_product.architecture(device)
    if device.type == "cpu":
        arch = "sm100"
        monkeypatch.setattr(native, "scaled_mm", on_a_device([]))
    pairs = [(left, right) for where, left, right in PAIRS if where == arch.replace("sm103", "sm100")]
    if not pairs:
        pytest.skip(f"torch has no native product on {arch}")
    wrong = []
    for left, right in pairs:
        x, w = (x.to(device) for x in tensors())
        found = native.product(arch, SIDES[left], SIDES[right])(scaled(x, left), scaled(w, right)).float()
        a, b = decoded(x, SIDES[left]), decoded(w, SIDES[right])
        bound = 2.0**-8 * (a @ b.t()).abs() + 2.0**-13 * (a.abs() @ b.abs().t())
        if not ((found - a @ b.t()).abs() <= bound).all():
            wrong.append((left, right, ((found - a @ b.t()).abs() / bound).max().item()))
    assert not wrong
