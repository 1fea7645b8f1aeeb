"""Which number format each matrix product of the blocks takes: rules, presets, and a table of both.

A linear has three products. Each is a sum over one dimension of its left and its right side:

    forward      input (M, K)             x weight (N, K)           over K
    grad_input   gradient (M, N)          x weight, turned (K, N)   over N
    grad_weight  gradient, turned (N, M)  x input, turned (K, M)    over M

A rule is LAYER PRODUCT: LEFT x RIGHT, such as "double.*.img.qkv grad_weight: bf16 x bf16". LAYER and PRODUCT are
patterns as of file names. LAYER is KIND.BLOCK.NAME; `last.LAYER` means the layers of the last 15 % of all blocks. A
side is one of SIDES, perhaps with +sr (stochastic rounding), +h16 or +h32 (Hadamard transform along the sum). The last
rule that matches a product decides. A product that no rule matches stays in bf16.
"""

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import count

from flux_ref.config import ModelConfig
from flux_ref.errors import Refusal
from flux_ref.speed.number_formats import E2M1, E2M3, E4M3, E5M2, Format, Scaling

PRODUCTS = ("forward", "grad_input", "grad_weight")
PLAIN = "bf16"  # the name of a side that is not cast
LAST = 0.15  # share of the blocks that "last" means; at least one
WIDTH = 28  # columns of a product in the table


@dataclass(frozen=True)
class Side:
    """How one side of a product is cast. Its blocks lie along the dimension that is summed over."""

    name: str
    form: Format
    scaling: Scaling
    stochastic: bool = False
    hadamard: int = 0  # size of the transform; 0: none


Pair = tuple[Side | None, Side | None]  # left and right; None: bf16
SIDES = {
    "e4m3": Side("e4m3", E4M3, Scaling("linear")),
    "e5m2": Side("e5m2", E5M2, Scaling("linear")),
    "e4m3_row": Side("e4m3_row", E4M3, Scaling("linear", rows=1)),
    "mxfp8": Side("mxfp8", E4M3, Scaling("rceil", 1, 32)),
    "mxfp6": Side("mxfp6", E2M3, Scaling("floor", 1, 32)),
    "mxfp4": Side("mxfp4", E2M1, Scaling("floor", 1, 32)),
    "mxfp4_2d": Side("mxfp4_2d", E2M1, Scaling("floor", 32, 32)),
    "nvfp4": Side("nvfp4", E2M1, Scaling("two-level", 1, 16)),
    "nvfp4_2d": Side("nvfp4_2d", E2M1, Scaling("two-level", 16, 16)),
}
PRESETS = {
    "bf16": (),
    "fp8": ("* forward: e4m3 x e4m3", "* grad_*: e5m2 x e4m3"),
    "mxfp8": ("* *: mxfp8 x mxfp8",),  # NVIDIA's submissions
    "mxfp4_backward": (  # OmniFlow, pareto_a
        "single.* forward: mxfp8 x mxfp8",
        "* grad_input: mxfp4 x mxfp4_2d",
        "* grad_weight: mxfp4+h16 x mxfp4+h16",
    ),
    "mxfp6_fp4": (  # AMD's recipe for v6.1
        "* forward: mxfp6+h32 x mxfp4+h32",
        "single.*.linear1 forward: mxfp4+h32 x mxfp4+h32",
        "* grad_*: mxfp4+h32+sr x mxfp4+h32+sr",
    ),
    "nvfp4": (  # arXiv 2509.25149
        "* forward: nvfp4 x nvfp4_2d",
        "* grad_input: nvfp4+sr x nvfp4_2d",
        "* grad_weight: nvfp4+h16+sr x nvfp4+h16",
        "last.* *: bf16 x bf16",
    ),
}
RULE = re.compile(r"(\S+) +(\S+): *(\S+) +x +(\S+)")


@dataclass(frozen=True)
class Rule:
    """A parsed rule. text: as it was given."""

    text: str
    layer: str
    product: str
    pair: Pair

    def decides(self, layer: str, product: str, is_last: bool) -> bool:
        names = (layer, f"last.{layer}") if is_last else (layer,)
        return fnmatchcase(product, self.product) and any(fnmatchcase(name, self.layer) for name in names)


def parse(text: str) -> Rule:
    """Raises: Refusal."""
    match = RULE.fullmatch(text.strip())
    if not match:
        raise Refusal(f"precision.rules: {text!r} is no rule; write LAYER PRODUCT: LEFT x RIGHT, as * *: e4m3 x e4m3")
    layer, product, left, right = match.groups()
    if not any(fnmatchcase(name, product) for name in PRODUCTS):
        raise Refusal(f"precision.rules: {text!r} names the product {product}; give {', '.join(PRODUCTS)} or a pattern")
    return Rule(text, layer, product, (_side(left, text), _side(right, text)))


def _side(name: str, text: str) -> Side | None:
    base, *options = name.split("+")
    if name == PLAIN:
        return None
    if base not in SIDES or not set(options) <= {"sr", "h16", "h32"} or {"h16", "h32"} <= set(options):
        known = f"{PLAIN}, {', '.join(SIDES)}"
        raise Refusal(f"precision.rules: {text!r} names the side {name}; give one of {known}, with +sr, +h16 or +h32")
    size = next((int(option[1:]) for option in options if option != "sr"), 0)
    return replace(SIDES[base], name=name, stochastic="sr" in options, hadamard=size)


def layers(model: ModelConfig) -> dict[str, str]:
    """The layers whose products a policy decides: their names in rules, by Black Forest Labs' names of the modules."""
    parts = {"attn.qkv": "qkv", "attn.proj": "proj", "mlp.0": "mlp_in", "mlp.2": "mlp_out"}
    names = {}
    for block in range(model.double_blocks):
        for stream in ("img", "txt"):
            for module, part in parts.items():
                names[f"double_blocks.{block}.{stream}_{module}"] = f"double.{block}.{stream}.{part}"
    for block in range(model.single_blocks):
        names |= {f"single_blocks.{block}.{part}": f"single.{block}.{part}" for part in ("linear1", "linear2")}
    return names


def pairs(rules: list[Rule], model: ModelConfig) -> dict[str, dict[str, Pair]]:
    """What each product of each layer takes, by the layer's name in rules and by product.

    Raises: Refusal for a rule that matches no product of the model, or a side that does not fit a layer's sizes.
    """
    blocks, found, idle = model.double_blocks + model.single_blocks, {}, set(rules)
    for layer in layers(model).values():
        kind, block, *_ = layer.split(".")
        place = int(block) + (kind == "single") * model.double_blocks
        is_last = place >= blocks - max(1, round(LAST * blocks))
        found[layer] = dict.fromkeys(PRODUCTS, (None, None))
        for rule in rules:
            for product in PRODUCTS:
                if rule.decides(layer, product, is_last):
                    found[layer][product] = rule.pair
                    idle.discard(rule)
    if unused := [rule.text for rule in rules if rule in idle]:
        heads = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in found)
        raise Refusal(f"precision.rules: {unused[0]!r} matches no product of this model; it has {', '.join(heads)}")
    return found


def table(found: dict[str, dict[str, Pair]]) -> list[str]:
    """What `pairs` gives as text: a line for each set of layers whose three products are cast alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for layer, products in found.items():
        alike.setdefault(tuple(said(products[product]) for product in PRODUCTS), []).append(layer)
    lines = ["linears  " + "".join(f"{product:<{WIDTH}}" for product in PRODUCTS) + "layers"]
    for sides, members in alike.items():
        lines.append(f"{len(members):>7}  " + "".join(f"{side:<{WIDTH}}" for side in sides) + _where(members))
    return lines


def _where(members: list[str]) -> str:
    """Layers in words, by the numbers of their blocks: double 0 to 18 (img.qkv, img.proj); single 0 to 37 (linear1)."""
    names: dict[tuple[str, int], list[str]] = {}
    for kind, block, name in (layer.split(".", 2) for layer in members):
        names.setdefault((kind, int(block)), []).append(name)
    words = []
    for (kind, first), one in names.items():
        if (kind, first - 1) in names and names[kind, first - 1] == one:
            continue
        last = next(block for block in count(first) if names.get((kind, block + 1)) != one)
        words.append(f"{kind} {first}" + f" to {last}" * (last > first) + f" ({', '.join(one)})")
    return "; ".join(words)


def said(pair: Pair) -> str:
    """A pair as rules write it."""
    return " x ".join(side.name if side else PLAIN for side in pair)
