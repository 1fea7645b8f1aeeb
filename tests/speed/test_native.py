"""Native products: what torch is given on each device, judged by the rules of its source, and what the bytes mean."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm
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


def asked(patch, arch: str, left: str, right: str, fakes: FakeTensorMode | None = None, both=None) -> Call:
    """What torch is asked for. fakes: to take fake tensors. both: sides to multiply."""
    calls = []

    def note(*given, output_dtype):
        calls.append(Call(*given, output_dtype))
        return torch.empty(given[0].shape[0], given[1].shape[1], dtype=output_dtype)

    with patch.context() as inner:
        inner.setattr(native, "scaled_mm", note)
        sides = [scaled(x, side) for x, side in zip(both or tensors(), (left, right))]
        product = native.product(arch, SIDES[left], SIDES[right])._replace(multiples=(1, 1, 1))
        if fakes is None:
            product(*sides)
        else:
            inner.setattr(native, "_device_mm", native.call)
            sides = [tuple(fakes.from_tensor(one) for one in side) for side in sides]
            with fakes:
                product(*sides)
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
    meta = Call(*[one.to("meta") if isinstance(one, Tensor) else one for one in call])
    meta = meta._replace(scale_a=[s.to("meta") for s in call.scale_a], scale_b=[s.to("meta") for s in call.scale_b])
    try:
        meta.run()
        if not META_JUDGES:
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


def like(x: Tensor, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8 if x.element_size() == 1 else x.dtype).view(dtype or x.dtype)


def wrong_calls(call: Call) -> dict[str, Call]:
    """One thing wrong in each."""
    a, (scale, *rest), (other, *_) = call.mat_a, call.scale_a, call.scale_b
    turned = a.view(torch.uint8).t().contiguous().t().view(torch.uint8)
    found = {
        "architecture": call,
        "left by columns": call._replace(mat_a=turned.view(a.dtype) if a.dtype != FP4 else None),
        "right by rows": call._replace(mat_b=like(a, K, N) if a.dtype != FP4 else None),
        "shared size": call._replace(mat_a=like(a, M, a.shape[1] // 2)),
        "codes in bf16": call._replace(mat_a=torch.zeros(M, K, dtype=BF16)),
        "codes in e5m2": call._replace(mat_a=like(a, *a.shape, dtype=torch.float8_e5m2)),
        "output": call._replace(output_dtype=FP32),
        "one scale": call._replace(scale_a=[like(scale, 1), *rest]),
        "too few scales": call._replace(scale_a=[like(scale, scale.numel() - 32), *rest]),
        "too many scales": call._replace(scale_b=[like(other, other.numel() + 512), *rest]),
        "dtype of scales": call._replace(scale_a=[torch.zeros(scale.shape, dtype=BF16), *rest]),
        "scales apart": call._replace(scale_a=[like(scale, *scale.shape, 2)[..., 0], *rest]),
        "recipe": call._replace(recipe_a=[ScalingType.BlockWise1x128], recipe_b=[ScalingType.BlockWise1x128]),
        "left recipe": call._replace(recipe_a=[ScalingType.TensorWise, *call.recipe_a[1:]]),
    }
    if call.recipe_a[0] != ScalingType.RowWise:
        opposite = [PLAIN if call.swizzle_a[0] == TILES else TILES, *call.swizzle_a[1:]]
        found |= {
            "swizzle": call._replace(swizzle_a=opposite),
            "no swizzle": call._replace(swizzle_b=[]),
        }
    if call.swizzle_a[0] == TILES:
        found["scales not padded"] = call._replace(scale_a=[like(scale, M * (scale.numel() // 256)), *rest])
    if rest:
        found["no scale of the tensor"] = call._replace(scale_b=[other])
        found["scales of a tensor"] = call._replace(scale_b=[other, torch.zeros(2)])
    return {name: one for name, one in found.items() if None not in one}


def judged_by_torch(arch: str, name: str) -> bool:
    """torch judges AMD's blocks only where it is built for AMD; up to 2.13 it counts two FP4 codes as one."""
    return (arch != "gfx950" or name == "e4m3_row") and not (name == "mxfp4" and META_JUDGES)


def test_calls_keep_torchs_rules(monkeypatch):
    """On tensors, fake tensors and turned tensors, and at the least sizes that each kernel is said to take."""
    wrong, mode = [], FakeTensorMode()
    for arch, left, right in PAIRS:
        calls = {"real": asked(monkeypatch, arch, left, right)}
        calls["fake"] = asked(monkeypatch, arch, left, right, mode)
        turned = tuple(x.t().contiguous().t() for x in tensors())
        calls["turned"] = asked(monkeypatch, arch, left, right, both=turned)
        m, n, k = native.product(arch, SIDES[left], SIDES[right]).multiples
        if left == right:
            calls["least"] = asked(monkeypatch, arch, left, right, both=(torch.ones(m, k), torch.ones(n, k)))
        wrong += [(arch, left, right, kind, rule) for kind, call in calls.items() for rule in broken(arch, call)]
        if judged_by_torch(arch, left):
            wrong += [(arch, left, right, said) for said in [torch_refuses(calls["real"])] if said]
    assert not wrong


def test_wrong_calls_break_torchs_rules(monkeypatch):
    """Each wrong size, layout, dtype, number of scales, recipe and swizzle; torch itself sees most of them."""
    unseen = {"architecture", "left by columns", "right by rows", "codes in e5m2", "output", "scales apart", "recipe"}
    unseen |= {"shared size"} if META_JUDGES else set()
    accepted = []
    for arch, left, right in PAIRS:
        for name, call in wrong_calls(asked(monkeypatch, arch, left, right)).items():
            is_elsewhere = name == "architecture"
            if not broken("sm89", call).count("architecture") if is_elsewhere else not broken(arch, call):
                accepted.append((arch, left, right, name))
            if judged_by_torch(arch, left) and name not in unseen and not torch_refuses(call):
                accepted.append((arch, left, right, name, "torch"))
        multiples = native.product(arch, SIDES[left], SIDES[right]).multiples
        for place, multiple in enumerate(multiples if left == right else ()):
            m, n, k = (size // (1 + (at == place)) for at, size in enumerate(multiples))
            if multiple == 1 or k % (SIDES[left].scaling.columns or 1) or (place == 2 and arch == "gfx950"):
                continue  # the older call of torch demands more of gfx950's K
            both = torch.ones(m, k), torch.ones(n, k)
            if not broken(arch, asked(monkeypatch, arch, left, right, both=both)):
                accepted.append((arch, left, "size", place))
            with pytest.raises(Refusal, match=r"M, N and K that .* divide, not .* set precision\.native=false"):
                native.product(arch, SIDES[left], SIDES[right])(*map(scaled, both, (left, right)))
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


def test_scales_lie_where_the_device_looks_for_them():
    wrong = []
    for rows, columns in ((1, 1), (32, 4), (128, 4), (129, 5), (160, 8), (300, 13)):
        codes = torch.arange(rows * columns).add(1).view(rows, columns)
        found, across = native.swizzled(codes), math.ceil(columns / 4)
        for row in range(rows):
            for column in range(columns):
                tile = row // 128 * across + column // 4
                place = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
                if found[place] != codes[row, column]:
                    wrong.append((rows, columns, row, column))
        if len(found) != 512 * across * math.ceil(rows / 128) or found.count_nonzero() != rows * columns:
            wrong.append((rows, columns, "padding"))
    assert not wrong


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
    found = [
        (arch, left or "bf16", right or "bf16")
        for arch in ("cpu", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx90a", "gfx942", "gfx950", "gfx1201")
        for left in (None, *SIDES)
        for right in (None, *SIDES)
        if native.product(arch, SIDES.get(left), SIDES.get(right))
    ]
    rows = [(arch, "e4m3_row", "e4m3_row") for arch in ("sm90", "sm100", "sm103", "gfx942", "gfx950")]
    blocks = [(arch, "mxfp8", "mxfp8") for arch in ("sm100", "sm103", "gfx950")]
    for arch, name in (
        ("sm100", "mxfp4"),
        ("sm103", "mxfp4"),
        ("gfx950", "mxfp4"),
        ("sm100", "nvfp4"),
        ("sm103", "nvfp4"),
    ):
        blocks += [(arch, left, right) for left in (name, f"{name}_2d") for right in (name, f"{name}_2d")]
    assert sorted(found) == sorted(rows + blocks)
    options = [parse(f"* *: nvfp4+sr+h16 x {right}", 44).pair for right in ("nvfp4_2d", "mxfp4", "bf16")]
    assert [bool(native.product("sm100", *pair)) for pair in options] == [True, False, False]


def test_a_tracer_sees_sizes_and_operations(monkeypatch):
    """torch's own check of an operator, and the operations that activation budgets weigh."""
    monkeypatch.setattr(native, "scaled_mm", on_a_device([]))
    for left in ("mxfp8", "nvfp4"):
        product = native.product("sm100", SIDES[left], SIDES[left])
        sides = [scaled(x, left) for x in tensors()]
        with FlopCounterMode(display=False) as counter:
            product(*sides)
        assert counter.get_flop_counts()["Global"][torch.ops.flux_ref.native_mm] == 2 * M * N * K
        arguments = (*product.side(*sides[0]), *product.side(*sides[1]), product.form.name)
        arguments += (list(product.recipe), product.tiled)
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
