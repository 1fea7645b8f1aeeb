"""A linear's three products from sides that a policy casts each by itself, on any device.

The codes and scales of a side are equal on all devices, bit for bit (casts.py). Where torch has a kernel for a pair
of sides, the kernel takes them (`Kernel`). Elsewhere they are decoded to bf16, which holds them exactly, and sums are
fp32. Only the order of the sums depends on the device.

Numbers for stochastic rounding are drawn where the rounding happens, by the generator of every other draw (rng.py),
keyed by step, product and element. So an element gets the same number at any number of ranks, and a captured graph
holds no state of a generator.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad, scaled_mm
from torch.utils.flop_counter import register_flop_formula

from flux_ref import rng
from flux_ref.errors import Refusal
from flux_ref.precision import casts
from flux_ref.precision.formats import E2M1, E4M3, Format
from flux_ref.precision.layers import PRODUCTS, Products, Side

# Shapes: M tokens of a micro-batch, K inputs and N outputs of a linear; R rows and S columns, which are summed over.
INPUT, WEIGHT, GRADIENT = range(3)  # what a side is a cast of
TURNED = True
Scaled = tuple[Tensor, Tensor, Tensor]  # as casts.scaled returns it

GRID = 2.0**-16  # of numbers for rounding; a word of 64 bits gives four
ROUNDS = 10
FACTORS = (0xD2E7470EE14C6C93 - 2**64, 0xCA5A826395121157 - 2**64)  # of Philox4x64, as int64 holds them
BUMPS = (0x9E3779B97F4A7C15 - 2**64, 0xBB67AE8584CAA73B - 2**64)
LOW = 0xFFFFFFFF


class Draws(NamedTuple):
    """What the chances of a linear's stochastic rounding depend on: int64 scalars on the device.

    step: steps trained so far. sample: the first of this micro-batch, in the global batch. linear: its place in
    layers.layers. A seed that is no tensor would be part of compiled code.
    """

    seed: Tensor
    step: Tensor
    sample: Tensor
    linear: Tensor


class BlockMatmul(torch.autograd.Function):
    """x @ w.T + b. The sides of the three products are those of `pairs`, by product.

    arch: of the device, for its kernels. rows: tokens of a sample. draws: None rounds every side to nearest, as
    validation does.
    """

    @staticmethod
    def forward(ctx, x_MK, weight_NK, bias_N, pairs: Products, arch: str, draws: Draws | None, rows: int):
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.pairs = pairs
        ctx.arch = arch
        ctx.draws = draws
        ctx.rows = rows
        return _product(ctx, "forward", (x_MK, INPUT), (weight_NK, WEIGHT), bias_N)

    @staticmethod
    def backward(ctx, grad_MN: Tensor):
        x_MK, weight_NK = ctx.saved_tensors
        grad_x_MK = _product(ctx, "grad_input", (grad_MN, GRADIENT), (weight_NK, WEIGHT, TURNED))
        grad_w_NK = _product(ctx, "grad_weight", (grad_MN, GRADIENT, TURNED), (x_MK, INPUT, TURNED))
        return grad_x_MK, grad_w_NK, grad_MN.sum(0) if ctx.needs_input_grad[2] else None, *(None,) * 4


def _product(ctx, product: str, left: tuple, right: tuple, bias: Tensor | None = None) -> Tensor:
    """left @ right.T + bias in bf16. left, right: (tensor, what it is) of a side, with TURNED to turn it first."""
    pair = ctx.pairs[product]
    given = [_side(ctx, product, side, *tensor) for side, tensor in zip(pair, (left, right))]
    if found := kernel(ctx.arch, *pair):
        out = found(*given)
        return out if bias is None else out + bias
    (a, a_scale), (b, b_scale) = map(held, given, pair)
    # A CPU without bf16 matrix units multiplies bf16 many times slower than fp32, which holds the same values.
    if a_scale is None and b_scale is None and a.device.type != "cpu":
        return F.linear(a, b, bias)  # sums in fp32
    out = a.float() @ b.float().t()
    if a_scale is not None:
        out = out * a_scale
    if b_scale is not None:
        out = out * b_scale.t()
    return (out if bias is None else out + bias.float()).bfloat16()


def _side(ctx, product: str, side: Side | None, tensor: Tensor, kind: int, turned: bool = False) -> Scaled | Tensor:
    """Chances go to elements by their places in the whole batch, so that all ranks agree."""
    chance = None
    if side and side.stochastic and ctx.draws:
        seed, step, sample, linear = ctx.draws
        number = 9 * linear + 3 * PRODUCTS.index(product) + kind
        rows = 0 if kind == WEIGHT else ctx.rows  # of the tensor for each sample
        first = sample * (rows * tensor.shape[1])
        chance = chances(torch.stack((seed, step, number, first)), tensor)
    if turned:
        tensor = tensor.t()
        chance = None if chance is None else chance.t().contiguous()
    return scaled(tensor, side, chance) if side else tensor


def scaled(x_RS: Tensor, side: Side, chance_RS: Tensor | None = None) -> Scaled:
    """(R, S) as a side: transformed, scaled and rounded."""
    x_RS = x_RS.contiguous().float()  # a CPU is slow on turned tensors
    if side.hadamard:
        x_RS = casts.hadamard(x_RS, side.hadamard)
    return casts.scaled(x_RS, side.form, side.scaling, chance_RS)


def held(given: Scaled | Tensor, side: Side | None) -> tuple[Tensor, Tensor | None]:
    """(values (R, S) in bf16, which holds them exactly; an fp32 scale to multiply a product with, or None for 1).

    given: `scaled`, or the tensor itself for a side in bf16. The scale is one for all that is summed over.
    numerics: a value and its E8M0 or E4M3 scale have at most 6 significant bits. Below 2**-126 bf16 may round them.
    """
    if side is None:
        return given.bfloat16(), None
    values, scales, whole = given
    if not side.scaling.columns:
        return values.bfloat16(), scales
    casts.blocks(values, side.scaling).mul_(scales[:, None, :, None])
    return values.bfloat16(), whole if side.scaling.rule == "two-level" else None


@torch.library.custom_op("flux_ref::chances", mutates_args=())
def chances(place: Tensor, like: Tensor) -> Tensor:
    """Numbers in [0, 1) on a grid of 2**-16, fp32, of the shape of `like`. No host reads the place.

    place: (4,) int64 on the device: the run's seed; the step; a number of layer, product and side; the place of the
           first element among all of the product, over all ranks and micro-batches, which 16 divides.
    port: element e is 16 bits, from bit 16 * (e % 4) on, of word e // 4 of the stream ROUNDING of rng.py, with the
    counter's sample = number and its epoch = step.
    """
    seed, step, number, first = place.unbind()
    block = torch.arange(-(-like.numel() // 16), device=like.device) + first // 16 + 1
    words = philox([block, number, step, torch.zeros_like(seed)], [seed, torch.full_like(seed, rng.ROUNDING)])
    numbers = torch.stack(words, dim=1).flatten().view(torch.int16).int() & 0xFFFF
    return (numbers.float() * GRID)[: like.numel()].view(like.shape)


# Compilers see one operation: the rounds of every side of every linear would take them minutes.
chances.register_fake(lambda place, like: torch.empty(like.shape, dtype=torch.float32, device=like.device))


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """The four words of each block of Philox4x64-10 as int64. Products and sums of int64 wrap, as 64 bits should.

    counter: block, sample, epoch and 0. key: seed and stream. Three rounds give all words the shape of block.
    """
    for _ in range(ROUNDS):
        high0, low0 = _multiplied(counter[0], FACTORS[0])
        high1, low1 = _multiplied(counter[2], FACTORS[1])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [word + bump for word, bump in zip(key, BUMPS)]
    return counter


def _multiplied(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low 64 bits of a product of unsigned 64-bit numbers, from halves of 32 bits."""
    low = x & LOW
    high = x >> 32 & LOW
    f_low = factor & LOW
    f_high = factor >> 32 & LOW
    carry = high * f_low + (low * f_low >> 32 & LOW)
    middle = low * f_high + (carry & LOW)
    return high * f_high + (carry >> 32 & LOW) + (middle >> 32 & LOW), x * factor


# Kernels of torch. No GPU has run them here. Sources: torch's ScaledBlas.cpp; cuBLAS' manual.

DTYPES = {E4M3.name: torch.float8_e4m3fn, E2M1.name: torch.float4_e2m1fn_x2}
# Kinds of scales, each with the dtype that torch reads it as. Compilers see only the name of a recipe.
RECIPES = {
    "blocks": {ScalingType.BlockWise1x32: torch.float8_e8m0fnu},
    "two levels": {ScalingType.BlockWise1x16: torch.float8_e4m3fn, ScalingType.TensorWise: torch.float32},
}


class Kernel(NamedTuple):
    """A product of torch. multiples: what torch demands that M, N and K are divisible by."""

    form: Format  # of the codes
    recipe: str  # of RECIPES
    multiples: tuple[int, int, int]
    tiled: bool  # whether scales are `swizzled`

    def __call__(self, left: Scaled, right: Scaled) -> Tensor:
        """(M, K) and (N, K) to bf16 (M, N). Raises: Refusal for other sizes."""
        self.require((len(left[0]), len(right[0]), left[0].shape[1]))
        return _device_mm(*self.side(*left), *self.side(*right), self.form.name, self.recipe, self.tiled)

    def require(self, sizes: tuple[int, int, int]) -> None:
        """sizes: M, N and K, or 0. Raises: Refusal if the kernel does not take them."""
        if any(size % multiple for size, multiple in zip(sizes, self.multiples)):
            text = f"the kernel of {self.form.name} takes M, N and K that {self.multiples} divide, not {sizes}"
            raise Refusal(f"precision.native=true: {text}; set precision.native=false")

    def side(self, values_RS: Tensor, scales: Tensor, whole: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Codes, uint8 (R, S), or (R, S / 2) if two share a byte; scales: uint8 codes, and fp32 () of two levels."""
        codes = casts.encode(self.form, values_RS).contiguous()
        if self.form == E2M1:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        scales = scales.repeat_interleave(len(values_RS) // len(scales), 0)  # of 2-D blocks
        found = casts.scale_codes(scales) if self.recipe == "blocks" else casts.encode(E4M3, scales)
        found = swizzled(found) if self.tiled else found.flatten()
        return codes, [found] if self.recipe == "blocks" else [found, whole]


BLACKWELL = {
    "mxfp8": Kernel(E4M3, "blocks", (1, 16, 32), tiled=True),
    "mxfp4": Kernel(E2M1, "blocks", (1, 16, 32), tiled=True),
    "nvfp4": Kernel(E2M1, "two levels", (1, 16, 32), tiled=True),
}
MI350 = {  # of K 128: so torch's older call demands
    "mxfp8": Kernel(E4M3, "blocks", (32, 32, 128), tiled=False),
    "mxfp4": Kernel(E2M1, "blocks", (32, 32, 128), tiled=False),
}
KERNELS = {"sm100": BLACKWELL, "sm103": BLACKWELL, "gfx950": MI350}


def kernel(arch: str, left: Side | None, right: Side | None) -> Kernel | None:
    """torch's product of two sides on an architecture, as fp8.architecture names it; None: torch has none."""
    first, second = (side.name.split("+")[0].removesuffix("_2d") if side else "" for side in (left, right))
    return KERNELS.get(arch, {}).get(first) if first == second else None


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
    left, right = ([scale.view(dtype) for scale, dtype in zip(scales, dtypes)] for scales in (a_s, b_s))
    a = a.view(DTYPES[form])
    b = b.view(DTYPES[form])
    return scaled_mm(a, b.t(), left, kinds, right, kinds, swizzles, swizzles, output_dtype=torch.bfloat16)


# Compilers see bytes only: Inductor knows no FP4, and torch 2.11's rules for fake tensors refuse right calls.
_device_mm = torch.library.custom_op("flux_ref::native_mm", call, mutates_args=())
_device_mm.register_fake(lambda a, a_s, b, *_: a.new_empty(len(a), len(b), dtype=torch.bfloat16))


@register_flop_formula(torch.ops.flux_ref.native_mm)
def _flop(a_shape, a_scales, b_shape, b_scales, form, *_, **__) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[0] * (1 + (form == E2M1.name))
