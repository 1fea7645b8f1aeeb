"""Products that torch has kernels for. No GPU has run them here. Sources: torch's ScaledBlas.cpp; cuBLAS' manual."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm
from torch.utils.flop_counter import register_flop_formula

from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.speed.casts import encode, scale_codes
from flux_ref.speed.layers import layers
from flux_ref.speed.number_formats import E2M1, E4M3, E4M3FNUZ, Format
from flux_ref.speed.policy import stages
from flux_ref.speed.sides import Side, way

# Shapes: M tokens, K inputs and N outputs; R rows and S columns of a side, which are summed over.
DTYPES = {E4M3.name: torch.float8_e4m3fn, E4M3FNUZ.name: torch.float8_e4m3fnuz, E2M1.name: torch.float4_e2m1fn_x2}
# Kinds of scales, each with the dtype that torch reads it as. Compilers see only the name of a recipe.
RECIPES = {
    "rows": {ScalingType.RowWise: torch.float32},
    "blocks": {ScalingType.BlockWise1x32: torch.float8_e8m0fnu},
    "two levels": {ScalingType.BlockWise1x16: torch.float8_e4m3fn, ScalingType.TensorWise: torch.float32},
}


class Product(NamedTuple):
    """A native product. multiples: what torch demands that M, N and K are divisible by."""

    form: Format  # of the codes
    recipe: str  # of RECIPES
    multiples: tuple[int, int, int] = (1, 16, 32)
    tiled: bool = False  # whether scales are `swizzled`

    def __call__(self, left: tuple[Tensor, Tensor, Tensor], right: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """What `casts.scaled` gives for (M, K) and (N, K) to bf16 (M, N). Raises: Refusal for other sizes."""
        self.require((len(left[0]), len(right[0]), left[0].shape[1]))
        return _device_mm(*self.side(*left), *self.side(*right), self.form.name, self.recipe, self.tiled)

    def require(self, sizes: tuple[int, int, int]) -> None:
        """sizes: M, N and K, or 0. Raises: Refusal if the kernel does not take them."""
        if any(size % multiple for size, multiple in zip(sizes, self.multiples)):
            text = f"the kernel of {self.form.name} takes M, N and K that {self.multiples} divide, not {sizes}"
            raise Refusal(f"precision.native=true: {text}; set precision.native=false")

    def side(self, values_RS: Tensor, scales: Tensor, whole: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Codes, uint8 (R, S), or (R, S / 2) if two share a byte; scales: fp32 (R, 1), or uint8 codes and fp32 ()."""
        if self.form == E4M3FNUZ:  # a code means half of what it means in E4M3
            values_RS = values_RS / 2
            scales = scales * 2
        codes = encode(self.form, values_RS).contiguous()
        if self.form == E2M1:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        if self.recipe == "rows":
            return codes, [scales]
        scales = scales.repeat_interleave(len(values_RS) // len(scales), 0)  # of 2-D blocks
        found = scale_codes(scales) if self.recipe == "blocks" else encode(E4M3, scales)
        found = swizzled(found) if self.tiled else found.flatten()
        return codes, [found] if self.recipe == "blocks" else [found, whole]


ROW = Product(E4M3, "rows", (1, 16, 16))
MX8 = Product(E4M3, "blocks", tiled=True)
MX4 = Product(E2M1, "blocks", tiled=True)
BLACKWELL = {"e4m3_row": ROW, "mxfp8": MX8, "mxfp4": MX4, "nvfp4": Product(E2M1, "two levels", tiled=True)}
UNTILED = (32, 32, 128)  # of K 128: so torch's older call demands
FOUND = {
    "sm90": {"e4m3_row": ROW},
    "sm100": BLACKWELL,
    "sm103": BLACKWELL,
    "gfx942": {"e4m3_row": Product(E4M3FNUZ, "rows", (1, 16, 16))},
    "gfx950": {
        "e4m3_row": ROW,
        "mxfp8": Product(E4M3, "blocks", UNTILED),
        "mxfp4": Product(E2M1, "blocks", UNTILED),
    },
}


def product(arch: str, left: Side | None, right: Side | None) -> Product | None:
    """torch's product of two sides on an architecture, as fp8_product.architecture names it; None: torch has none."""
    first, second = (side.name.split("+")[0].removesuffix("_2d") if side else "" for side in (left, right))
    return FOUND.get(arch, {}).get(first) if first == second else None


def require_native_sizes(cfg: Config, arch: str, rows: int) -> tuple[int, int]:
    """How many products of blocks torch's kernels take on an architecture, and how many are emulated, in all stages.

    rows: samples of a micro-batch. Raises: Refusal for sizes that a kernel does not take.
    """
    taken = 0
    emulated = 0
    for stage in stages(cfg):
        for layer in layers(cfg.model).values():
            products = stage.pairs[layer.name]
            if way(products) != "blocks":
                continue
            for name, sizes in layer.sizes(rows).items():
                found = product(arch, *products[name]) if cfg.precision.native else None
                if found:
                    found.require(sizes)
                    taken += 1
                elif any(products[name]):
                    emulated += 1
    return taken, emulated


def swizzled(codes_RS: Tensor) -> Tensor:
    """Codes of block scales, uint8 (R, S), in the order in which Blackwell reads them: flat.

    Zeros pad R and S to multiples of 128 and 4. A tile of 128 x 4 codes becomes 32 x 16 bytes: row r, column s goes to
    byte 16 (r % 32) + 4 (r // 32) + s. Tiles follow each other along S, then along R.
    """
    padded = pad(codes_RS, (0, -codes_RS.shape[1] % 4, 0, -codes_RS.shape[0] % 128))
    tiles = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))  # along R, r // 32, r % 32, along S, s
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def call(a: Tensor, a_s: list[Tensor], b: Tensor, b_s: list[Tensor], form: str, recipe: str, tiled: bool) -> Tensor:
    """scaled_mm of both sides, given as bytes. recipe: a name in RECIPES."""
    kinds = list(RECIPES[recipe])
    dtypes = RECIPES[recipe].values()
    of_blocks = SwizzleType.SWIZZLE_32_4_4 if tiled else SwizzleType.NO_SWIZZLE
    swizzles = [of_blocks, SwizzleType.NO_SWIZZLE][: len(kinds)]
    left = [scale.view(dtype) for scale, dtype in zip(a_s, dtypes)]
    right = [scale.view(dtype) for scale, dtype in zip(b_s, dtypes)]
    if recipe == "rows":
        right = [right[0].t()]
    a = a.view(DTYPES[form])
    b = b.view(DTYPES[form])
    return scaled_mm(a, b.t(), left, kinds, right, kinds, swizzles, swizzles, output_dtype=torch.bfloat16)


# Compilers see bytes only: Inductor knows no FP4, and torch 2.11's rules for fake tensors refuse right calls.
_device_mm = torch.library.custom_op("flux_ref::native_mm", call, mutates_args=())
_device_mm.register_fake(lambda a, a_s, b, *_: a.new_empty(len(a), len(b), dtype=torch.bfloat16))


@register_flop_formula(torch.ops.flux_ref.native_mm)
def _flop(a_shape, a_scales, b_shape, b_scales, form, *_, **__) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[0] * (1 + (form == E2M1.name))
