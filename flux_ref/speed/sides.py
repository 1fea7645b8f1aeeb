"""Sides of matrix products: how each is cast, and how a linear multiplies with the sides of its three products.

Each product is a sum over one dimension of its left and its right side:

    forward      input (M, K)             x weight (N, K)           over K
    grad_input   gradient (M, N)          x weight, turned (K, N)   over N
    grad_weight  gradient, turned (N, M)  x input, turned (K, M)    over M
"""

from dataclasses import dataclass

from flux_ref.speed.number_formats import E2M1, E2M3, E4M3, E5M2, Format, Scaling

PRODUCTS = ("forward", "grad_input", "grad_weight")
PLAIN = "bf16"  # the name of a side that is not cast


@dataclass(frozen=True)
class Side:
    """How one side of a product is cast. Its blocks lie along the dimension that is summed over."""

    name: str
    form: Format
    scaling: Scaling
    stochastic: bool = False
    hadamard: int = 0  # size of the transform; 0: none
    delayed: bool = False  # the scale comes from earlier steps in training (precision.py)

    @property
    def is_whole(self) -> bool:
        """Whether a product of FP8 matrix units can take the side: one scale, rounded to nearest."""
        return not (self.scaling.rows or self.scaling.columns or self.stochastic or self.hadamard)


Pair = tuple[Side | None, Side | None]  # left and right; None: bf16
Products = dict[str, Pair]  # of a linear, by product
SIDES = {
    side.name: side
    for side in (
        Side("e4m3", E4M3, Scaling("linear")),
        Side("e5m2", E5M2, Scaling("linear")),
        Side("e4m3_delayed", E4M3, Scaling("linear"), delayed=True),
        Side("e5m2_delayed", E5M2, Scaling("linear"), delayed=True),
        Side("e4m3_row", E4M3, Scaling("linear", rows=1)),
        Side("mxfp8", E4M3, Scaling("rceil", 1, 32)),
        Side("mxfp6", E2M3, Scaling("floor", 1, 32)),
        Side("mxfp4", E2M1, Scaling("floor", 1, 32)),
        Side("mxfp4_2d", E2M1, Scaling("floor", 32, 32)),
        Side("nvfp4", E2M1, Scaling("two-level", 1, 16)),
        Side("nvfp4_2d", E2M1, Scaling("two-level", 16, 16)),
    )
}


def format_pair(pair: Pair) -> str:
    """A pair as rules write it."""
    return " x ".join(side.name if side else PLAIN for side in pair)


def way(products: Products) -> str:
    """How a linear multiplies: "plain", "tensor" or "blocks" (linear.py).

    "tensor": input, weight and gradient are each cast once. So the two products of a tensor name the same side.
    """
    x, w = products["forward"]
    gradient, again = products["grad_input"]
    if not any(side for pair in products.values() for side in pair):
        return "plain"
    is_whole = all(side and side.is_whole for side in (x, w, gradient))
    shares = w == again and products["grad_weight"] in ((gradient, x), (None, None))
    return "tensor" if is_whole and shares and x.form == w.form == E4M3 else "blocks"


def is_delayed(products: Products) -> bool:
    """Whether any side takes scales of earlier steps."""
    return any(side and side.delayed for pair in products.values() for side in pair)
