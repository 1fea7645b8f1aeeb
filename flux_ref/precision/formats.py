"""Number formats of low precision, the rules by which blocks of values are scaled, and how a side of a product is cast.

casts.py rounds and scales tensors.
Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0; OCP Microscaling Formats (MX) 1.0, called MX below; NVFP4:
arXiv 2509.25149, appendix C; E4M3 and E5M2 also arXiv 2209.05433.
"""

import re
from dataclasses import dataclass, replace

PRODUCTS = ("forward", "grad_input", "grad_weight")  # of a linear, see policy.py
PLAIN = "bf16"  # the name of a side that is not cast


@dataclass(frozen=True)
class Format:
    """A floating-point format. Its lowest exponent field holds zero and the subnormal values."""

    mantissa: int  # bits
    least: int  # log2 of the smallest normal value
    top: int  # floor(log2 largest)
    largest: float


E4M3 = Format(3, -6, 8, 448.0)
E5M2 = Format(2, -14, 15, 57344.0)
E2M3 = Format(3, 0, 2, 7.5)
E2M1 = Format(1, 0, 2, 6.0)


@dataclass(frozen=True)
class Scaling:
    """How a tensor is scaled.

    rows, columns: of a block whose values share a scale; 0 for all of the tensor.
    rule: of the scale. floor, rceil: a power of two, kept as E8M0, by the block's largest magnitude m and the format's
    largest value L. floor (MX 6.3): 2**(floor(log2 m) - floor(log2 L)). rceil (cuBLAS, 1-D block scaling): the least
    power of two that is at least m / L.
    linear: a cast multiplies by L / m in fp32, at most 2**44, and the scale is the inverse.
    two-level (NVFP4): an E4M3 for each block times one fp32 for the tensor.
    """

    rule: str
    rows: int = 0
    columns: int = 0


@dataclass(frozen=True)
class Side:
    """How one side of a product is cast. Its blocks lie along the dimension that is summed over."""

    name: str
    form: Format
    scaling: Scaling
    stochastic: bool = False
    hadamard: int = 0  # size of the transform; 0: none
    delayed: bool = False  # the scale comes from earlier steps in training (recipe.py)


# Input, weight and gradient are each cast once, with one scale: the two products of a tensor name the same side.
WHOLE = re.compile(r"(e4m3\w*) x e4m3, (e4m3\w*|e5m2\w*) x e4m3, (\2 x \1|bf16 x bf16)")  # the three products
Pair = tuple[Side | None, Side | None]  # left and right; None: bf16
Products = dict[str, Pair]  # of a linear, by product
BASES = (
    Side("e4m3", E4M3, Scaling("linear")),
    Side("e5m2", E5M2, Scaling("linear")),
    Side("e4m3_delayed", E4M3, Scaling("linear"), delayed=True),
    Side("e5m2_delayed", E5M2, Scaling("linear"), delayed=True),
    Side("mxfp8", E4M3, Scaling("rceil", 1, 32)),
    Side("mxfp6", E2M3, Scaling("floor", 1, 32)),
    Side("mxfp4", E2M1, Scaling("floor", 1, 32)),
    Side("mxfp4_2d", E2M1, Scaling("floor", 32, 32)),
    Side("nvfp4", E2M1, Scaling("two-level", 1, 16)),
    Side("nvfp4_2d", E2M1, Scaling("two-level", 16, 16)),
)
# By the names in rules. +h16, +h32: Hadamard transform along the sum; +sr: stochastic rounding.
SIDES: dict[str, Side | None] = {PLAIN: None}
for base in BASES:
    for transform, size in (("", 0), ("+h16", 16), ("+h32", 32)):
        for rounding in ("", "+sr"):
            name = base.name + transform + rounding
            SIDES[name] = replace(base, name=name, hadamard=size, stochastic=bool(rounding))


def pair_text(pair: Pair) -> str:
    """A pair as rules write it."""
    return " x ".join(side.name if side else PLAIN for side in pair)


def matmul_path(products: Products) -> str:
    """How a linear multiplies: "plain", "tensor" or "blocks" (linear.py)."""
    if not any(map(any, products.values())):
        return "plain"
    return "tensor" if WHOLE.fullmatch(", ".join(map(pair_text, products.values()))) else "blocks"


def is_delayed(products: Products) -> bool:
    """Whether any side takes scales of earlier steps."""
    return any(side and side.delayed for pair in products.values() for side in pair)
