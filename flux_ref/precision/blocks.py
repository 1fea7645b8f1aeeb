"""A linear's three products from sides that a policy casts each by itself, on any device.

The codes and scales of a side are equal on all devices, bit for bit (formats.py). Where torch has a kernel for a pair
of sides, the kernel takes them (`KERNELS`). Elsewhere they are decoded to bf16, which holds them exactly, and sums are
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
from flux_ref.precision import casts
from flux_ref.precision.casts import Quantized
from flux_ref.precision.formats import PRODUCTS, Pair, Products, Side
from flux_ref.precision.fp8 import product_flop, product_like

# Shapes: M tokens of a micro-batch, K inputs and N outputs of a linear; R rows and S columns, which are summed over.
INPUT, WEIGHT, GRADIENT = range(3)  # what a side is a cast of
SIDES_OF = {  # a product's sides, and whether a side is turned first
    "forward": ((INPUT, False), (WEIGHT, False)),
    "grad_input": ((GRADIENT, False), (WEIGHT, True)),
    "grad_weight": ((GRADIENT, True), (INPUT, True)),
}

GRID = 2.0**-16  # of numbers for rounding; a word of 64 bits gives four
ROUNDS = 10
FACTORS = (0xD2E7470EE14C6C93 - 2**64, 0xCA5A826395121157 - 2**64)  # of Philox4x64, as int64 holds them
BUMPS = (0x9E3779B97F4A7C15 - 2**64, 0xBB67AE8584CAA73B - 2**64)
LOW = 0xFFFFFFFF


class RoundingKey(NamedTuple):
    """What the chances of a linear's stochastic rounding depend on: int64 scalars on the device.

    step: steps trained so far. sample: the first of this micro-batch, in the global batch. linear: its place in
    policy.layers. A seed that is no tensor would be part of compiled code.
    """

    seed: Tensor
    step: Tensor
    sample: Tensor
    linear: Tensor


class MatmulOptions(NamedTuple):
    """How a linear multiplies. draws: None rounds every side to nearest, as validation does."""

    pairs: Products
    arch: str  # of the device, for its kernels
    draws: RoundingKey | None
    rows: int  # tokens of a sample


class BlockMatmul(torch.autograd.Function):
    """x @ w.T + b. Each side of each product is cast by itself."""

    @staticmethod
    def forward(ctx, x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, how: MatmulOptions):
        ctx.save_for_backward(x_MK, weight_NK)
        ctx.how = how
        return _product(how, "forward", x_MK, weight_NK, bias_N)

    @staticmethod
    def backward(ctx, grad_MN: Tensor):
        x_MK, weight_NK = ctx.saved_tensors
        grad_x_MK = _product(ctx.how, "grad_input", grad_MN, weight_NK)
        grad_w_NK = _product(ctx.how, "grad_weight", grad_MN, x_MK)
        return grad_x_MK, grad_w_NK, grad_MN.sum(0) if ctx.needs_input_grad[2] else None, None


def _product(how: MatmulOptions, product: str, left: Tensor, right: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product of two tensors, each turned first where SIDES_OF says so, and a bias; bf16."""
    one, other = how.pairs[product]
    x_RS, x_chance = _given(how, product, 0, left)
    y_CS, y_chance = _given(how, product, 1, right)
    name = kernel(how.arch, (one, other), (len(x_RS), len(y_CS), x_RS.shape[1]))
    if one and other and name:
        out = native(name, quantize(one, x_RS, x_chance), quantize(other, y_CS, y_chance))
        return out if bias is None else out + bias
    x, x_scale = fake_quantize(one, x_RS, x_chance)
    y, y_scale = fake_quantize(other, y_CS, y_chance)
    # A CPU without bf16 matrix units multiplies bf16 many times slower than fp32, which holds the same values.
    if x_scale is y_scale is None and x.device.type != "cpu":
        return F.linear(x, y, bias)  # sums in fp32
    out = x.float() @ y.float().t()
    for scale in (x_scale, y_scale):
        out = out if scale is None else out * scale
    return (out if bias is None else out + bias.float()).bfloat16()


def _given(how: MatmulOptions, product: str, place: int, tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    """A tensor, perhaps turned, and its chances, by the places of its elements in the whole batch on all ranks.

    place: 0 on the left, 1 on the right.
    """
    side = how.pairs[product][place]
    kind, is_turned = SIDES_OF[product][place]
    chance = None
    if side and side.stochastic and how.draws:
        seed, step, sample, linear = how.draws
        number = 9 * linear + 3 * PRODUCTS.index(product) + kind
        rows = 0 if kind == WEIGHT else how.rows  # of the tensor for each sample
        first = sample * (rows * tensor.shape[1])
        chance = chances(torch.stack((seed, step, number, first)), tensor)
        chance = chance.t().contiguous() if is_turned else chance
    return tensor.t() if is_turned else tensor, chance


def quantize(side: Side, x_RS: Tensor, chance_RS: Tensor | None = None) -> Quantized:
    """(R, S) as a side: transformed, scaled and rounded."""
    x_RS = x_RS.contiguous().float()  # a CPU is slow on turned tensors
    if side.hadamard:
        x_RS = casts.hadamard(x_RS, side.hadamard)
    return casts.quantize(x_RS, side.form, side.scaling, chance_RS)


def fake_quantize(side: Side | None, x_RS: Tensor, chance_RS: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """A side as (values (R, S) in bf16; an fp32 scale () to multiply a product with, or None for 1).

    numerics: bf16 holds the values exactly. A value and its E8M0 or E4M3 scale have at most 6 significant bits. Below
    2**-126 bf16 may round them.
    """
    if side is None:
        return x_RS.bfloat16(), None
    values, scales, whole = quantize(side, x_RS, chance_RS)
    casts.blocks(values, side.scaling).mul_(scales[:, None, :, None])
    return values.bfloat16(), whole


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
    numbers = torch.stack(words, dim=1)[..., None] >> torch.arange(0, 64, 16, device=like.device) & 0xFFFF
    return (numbers.float() * GRID).flatten()[: like.numel()].view(like.shape)


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
    carry = low * f_low >> 32 & LOW
    carry = carry + high * f_low
    middle = carry & LOW
    middle = middle + low * f_high
    return high * f_high + (carry >> 32 & LOW) + (middle >> 32 & LOW), x * factor


# Kernels of torch. No GPU has run them here. Sources: torch's ScaledBlas.cpp; cuBLAS' manual. What torch 2.14 and later
# judge without a device, tests/precision/test_native.py asks of torch.

FP8 = torch.float8_e4m3fn
FP4 = torch.float4_e2m1fn_x2
E8M0 = torch.float8_e8m0fnu
BLOCKS = [ScalingType.BlockWise1x32]
TWO_LEVELS = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
TILES = SwizzleType.SWIZZLE_32_4_4  # see `swizzled`
FLAT = SwizzleType.NO_SWIZZLE


class Kernel(NamedTuple):
    """A product of torch. Both sides are of the same kind."""

    codes: torch.dtype
    scale: torch.dtype  # of blocks; that of a tensor is fp32
    swizzle: SwizzleType  # of the scales of blocks
    multiples: tuple[int, int, int]  # what M, N and K must be divisible by


KERNELS = {
    "blackwell mxfp8": Kernel(FP8, E8M0, TILES, (1, 16, 32)),
    "blackwell mxfp4": Kernel(FP4, E8M0, TILES, (1, 16, 32)),
    "blackwell nvfp4": Kernel(FP4, FP8, TILES, (1, 16, 32)),
    "mi350 mxfp8": Kernel(FP8, E8M0, FLAT, (32, 32, 128)),  # of K 128: so torch's older call demands
    "mi350 mxfp4": Kernel(FP4, E8M0, FLAT, (32, 32, 128)),
}
DEVICES = {"sm100": "blackwell", "sm103": "blackwell", "gfx950": "mi350"}  # by fp8.architecture


def kernel(arch: str, pair: Pair, sizes: tuple[int, int, int]) -> str:
    """The name in KERNELS of torch's product of two sides on an architecture; "": torch has none. sizes: M, N, K."""
    left, right = (side.name.split("+")[0].removesuffix("_2d") if side else "" for side in pair)
    name = f"{DEVICES.get(arch)} {left}"
    if left != right or name not in KERNELS:
        return ""
    fits = all(size % one == 0 for size, one in zip(sizes, KERNELS[name].multiples))
    return name if fits else ""


def native(name: str, left: Quantized, right: Quantized) -> Tensor:
    """(M, K) and (N, K) to bf16 (M, N) by a kernel."""
    a, a_scales = operand(KERNELS[name], *left)
    b, b_scales = operand(KERNELS[name], *right)
    return _native_mm(a, b.t(), a_scales, b_scales, name)


def operand(kernel: Kernel, values_RS: Tensor, scales: Tensor, whole: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """Codes, uint8 (R, S), or (R, S / 2) if two share a byte; scales: uint8 codes, and fp32 () of two levels."""
    if kernel.codes == FP4:
        codes = casts.fp4_codes(values_RS).contiguous()
        codes = codes[:, ::2] | codes[:, 1::2] << 4
    else:
        codes = values_RS.to(kernel.codes).view(torch.uint8).contiguous()
    scales = scales.repeat_interleave(len(values_RS) // len(scales), 0)  # of 2-D blocks
    if whole is None:
        found = casts.scale_codes(scales)
        return codes, [swizzled(found) if kernel.swizzle is TILES else found.flatten()]
    return codes, [swizzled(scales.to(FP8).view(torch.uint8)), whole]


def swizzled(codes_RS: Tensor) -> Tensor:
    """Codes of block scales, uint8 (R, S), in the order in which Blackwell reads them: flat.

    Zeros pad R and S to multiples of 128 and 4. A tile of 128 x 4 codes becomes 32 x 16 bytes: row r, column s goes to
    byte 16 (r % 32) + 4 (r // 32) + s. Tiles follow each other along S, then along R.
    """
    padded = pad(codes_RS, (0, -codes_RS.shape[1] % 4, 0, -codes_RS.shape[0] % 128))
    tiles = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))  # along R, r // 32, r % 32, along S, s
    return tiles.permute(0, 3, 2, 1, 4).flatten()


# Compilers see bytes only: Inductor knows no FP4, and torch 2.11's rules for fake tensors refuse right calls.
@torch.library.custom_op("flux_ref::native_mm", mutates_args=())
def _native_mm(a: Tensor, b: Tensor, a_scales: list[Tensor], b_scales: list[Tensor], name: str) -> Tensor:
    """torch's product of operands, the right one turned. name: of the kernel."""
    kernel = KERNELS[name]
    kinds = BLOCKS if kernel.scale is E8M0 else TWO_LEVELS
    swizzles = [kernel.swizzle, FLAT][: len(kinds)]
    left = [a_scales[0].view(kernel.scale), *a_scales[1:]]
    right = [b_scales[0].view(kernel.scale), *b_scales[1:]]
    a = a.view(kernel.codes)
    b = b.view(kernel.codes)
    return scaled_mm(a, b, left, kinds, right, kinds, swizzles, swizzles, output_dtype=torch.bfloat16)


_native_mm.register_fake(product_like)
# A product of FP4 counts half: two codes share a byte, and it takes half the time.
register_flop_formula(torch.ops.flux_ref.native_mm, get_raw=True)(product_flop)
