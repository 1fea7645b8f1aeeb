"""Every linear of FLUX.1 with its sizes; and of those that a policy decides, how it casts their sides.

A policy decides the linears of the blocks that see tokens: K inputs, N outputs, M tokens of a micro-batch. Each of the
three products of a linear is a sum over one dimension of its left and its right side:

    forward      input (M, K)             x weight (N, K)           over K
    grad_input   gradient (M, N)          x weight, turned (K, N)   over N
    grad_weight  gradient, turned (N, M)  x input, turned (K, M)    over M
"""

from dataclasses import dataclass
from typing import NamedTuple

from flux_ref.config import ModelConfig
from flux_ref.errors import Refusal
from flux_ref.precision.formats import E2M1, E2M3, E4M3, E5M2, Format, Scaling

PRODUCTS = ("forward", "grad_input", "grad_weight")
PLAIN = "bf16"  # the name of a side that is not cast
DELAYED = ["e4m3_delayed x e4m3", "e5m2_delayed x e4m3"]  # forward and grad_input of the preset fp8_delayed
LAST = 0.15  # share of the blocks that "last" means; at least one
PARTS = {"attn.qkv": "qkv", "attn.proj": "proj", "mlp.0": "mlp_in", "mlp.2": "mlp_out"}  # of a stream, as rules say
NAMES = {f"{stream}_{part}": f"{stream}.{name}" for stream in ("img", "txt") for part, name in PARTS.items()}
MULTIPLE = 16  # kernels of FP8 need sizes that this number divides
TOKENS = "train.micro_batch, train.global_batch or model.text_tokens"  # keys that set the tokens of a micro-batch


@dataclass(frozen=True)
class Side:
    """How one side of a product is cast. Its blocks lie along the dimension that is summed over."""

    name: str
    form: Format
    scaling: Scaling
    stochastic: bool = False
    hadamard: int = 0  # size of the transform; 0: none
    delayed: bool = False  # the scale comes from earlier steps in training (hooks.py)

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


class Linear(NamedTuple):
    """A linear of the net, or of one block.

    name: Black Forest Labs', in its block.
    tokens: of a sample that it sees; 0: it sees one vector.
    """

    name: str
    tokens: int
    inputs: int
    outputs: int


def linears(model: ModelConfig) -> dict[str, list[Linear]]:
    """The linears by part of the net, in the order of forward. Blocks of a kind are equal."""
    D = model.hidden
    M = model.mlp_ratio * D
    N = model.image_tokens
    T = model.text_tokens
    double = []
    for stream, tokens in (("img", N), ("txt", T)):
        double += [
            Linear(f"{stream}_mod.lin", 0, D, 6 * D),
            Linear(f"{stream}_attn.qkv", tokens, D, 3 * D),
            Linear(f"{stream}_attn.proj", tokens, D, D),
            Linear(f"{stream}_mlp.0", tokens, D, M),
            Linear(f"{stream}_mlp.2", tokens, M, D),
        ]
    return {
        "embedders": [
            Linear("img_in", N, model.packed_channels, D),
            Linear("txt_in", T, model.t5_dim, D),
            Linear("time_in.in_layer", 0, 256, D),
            Linear("time_in.out_layer", 0, D, D),
            Linear("vector_in.in_layer", 0, model.clip_dim, D),
            Linear("vector_in.out_layer", 0, D, D),
        ],
        "double_blocks": double,
        "single_blocks": [
            Linear("modulation.lin", 0, D, 3 * D),
            Linear("linear1", N + T, D, 3 * D + M),
            Linear("linear2", N + T, D + M, D),
        ],
        "final_layer": [
            Linear("adaLN_modulation.1", 0, D, 2 * D),
            Linear("linear", N, D, model.packed_channels),
        ],
    }


class Layer(NamedTuple):
    """A linear of a block."""

    name: str  # in rules
    inputs: int  # K
    outputs: int  # N
    tokens: int  # of a sample; M is this times the samples of a micro-batch
    is_last: bool

    def sizes(self, rows: int) -> dict[str, tuple[int, int, int]]:
        """Of each product: rows of its left and of its right side, and the size summed over.

        rows: samples of a micro-batch.
        """
        tokens = rows * self.tokens
        return {
            "forward": (tokens, self.outputs, self.inputs),
            "grad_input": (tokens, self.inputs, self.outputs),
            "grad_weight": (self.outputs, self.inputs, tokens),
        }


def layers(model: ModelConfig) -> dict[str, Layer]:
    """All layers, by Black Forest Labs' names of the modules."""
    counts = {"double": model.double_blocks, "single": model.single_blocks}
    blocks = [(kind, block) for kind, count in counts.items() for block in range(count)]
    first_last = len(blocks) - max(1, round(LAST * len(blocks)))
    known = linears(model)
    found = {}
    for place, (kind, block) in enumerate(blocks):
        for one in known[f"{kind}_blocks"]:
            if one.tokens:
                name = f"{kind}.{block}.{NAMES.get(one.name, one.name)}"
                layer = Layer(name, one.inputs, one.outputs, one.tokens, place >= first_last)
                found[f"{kind}_blocks.{block}.{one.name}"] = layer
    return found


def require_possible(layer: Layer, products: Products, rows: int) -> None:
    """rows: samples of a micro-batch, 0 if unknown. Raises: Refusal, naming the product, the side and the remedy."""
    for product, pair in products.items():
        for place, side in enumerate(pair):
            reason = _obstacle(layer, products, product, place, rows) if side else ""
            if side and reason:
                given = f"{layer.name} {product}: {format_pair(pair)}"
                raise Refusal(f"precision: {given}: {side.name} {reason}, or write another rule")


def _obstacle(layer: Layer, products: Products, product: str, place: int, rows: int) -> str:
    """Why a side cannot be, with the remedy; "" if it can. place: 0 on the left, 1 on the right."""
    side = products[product][place]
    other = products[product][1 - place]
    scaling = side.scaling
    tokens = rows * layer.tokens
    of_tokens = product == "grad_weight"
    is_weight = place == 1 and not of_tokens
    _, columns, summed = layer.sizes(rows)[product]
    if is_weight and scaling.rows and columns % scaling.rows:
        sizes = (layer.inputs, layer.outputs)
        return f"has {scaling.rows} rows, which do not divide a weight of {sizes}; set model.hidden"
    divisor = max(scaling.columns or MULTIPLE, side.hadamard)
    if summed % divisor:
        what = f"{summed} tokens of a micro-batch" if of_tokens else f"{summed} features"
        return f"cannot sum over {what}, which {divisor} does not divide; set {TOKENS if of_tokens else 'model.hidden'}"
    if side.delayed and tokens % MULTIPLE:
        return f"needs tokens of a micro-batch that {MULTIPLE} divides, not {tokens}; set {TOKENS}"
    if side.hadamard != (other.hadamard if other else 0):
        return "needs the same Hadamard transform on both sides; give both +h16, both +h32, or none"
    given = [format_pair(products[name]) for name in PRODUCTS[:2]]
    if side.delayed and (given != DELAYED or way(products) != "tensor"):  # grad_weight shares their sides, or is bf16
        return "needs a layer with the products of the preset fp8_delayed (grad_weight may be bf16); take e4m3 or e5m2"
    if scaling.rows > 1 and not is_weight:
        return "has 2-D blocks, which only a weight can have; take the 1-D side"
    return ""
