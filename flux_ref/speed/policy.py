"""Which number format each matrix product of the blocks takes: rules, presets, and a table of both.

A linear has three products. Each is a sum over one dimension of its left and its right side:

    forward      input (M, K)             x weight (N, K)           over K
    grad_input   gradient (M, N)          x weight, turned (K, N)   over N
    grad_weight  gradient, turned (N, M)  x input, turned (K, M)    over M

A rule is LAYER PRODUCT: LEFT x RIGHT, such as "double.*.img.qkv grad_weight: bf16 x bf16". LAYER and PRODUCT are
patterns as of file names. LAYER is KIND.BLOCK.NAME; `last.LAYER` means the layers of the last 15 % of all blocks. A
side is one of SIDES, perhaps with +sr (stochastic rounding), +h16 or +h32 (Hadamard transform along the sum). The last
rule that matches a product decides. A product that no rule matches stays in bf16.
A run may have several stages, each with a policy of its own (precision.switch).
"""

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import count
from typing import NamedTuple

from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Refusal
from flux_ref.schedule import steps_for
from flux_ref.speed.number_formats import E2M1, E2M3, E4M3, E5M2, Format, Scaling

PRODUCTS = ("forward", "grad_input", "grad_weight")
PLAIN = "bf16"  # the name of a side that is not cast
LAST = 0.15  # share of the blocks that "last" means; at least one
WIDTH = 28  # columns of a product in the table
LAYERS = {"double": 8, "single": 2}  # of a block
TOKENS = ("tokens of a micro-batch", "train.micro_batch, train.global_batch or model.text_tokens")
MULTIPLE = 16  # kernels of FP8 need sizes that this number divides
NARROW = ("nvfp4", "mxfp4", "mxfp6")  # formats as the benchmark's log names them, narrowest first; the others are fp8


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
SIDES = {
    "e4m3": Side("e4m3", E4M3, Scaling("linear")),
    "e5m2": Side("e5m2", E5M2, Scaling("linear")),
    "e4m3_delayed": Side("e4m3_delayed", E4M3, Scaling("linear"), delayed=True),
    "e5m2_delayed": Side("e5m2_delayed", E5M2, Scaling("linear"), delayed=True),
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
    "fp8_delayed": (
        "* forward: e4m3_delayed x e4m3",
        "* grad_input: e5m2_delayed x e4m3",
        "* grad_weight: e5m2_delayed x e4m3_delayed",
    ),
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

    def decides(self, layer: str, product: str, model: ModelConfig) -> bool:
        kind, block, *_ = layer.split(".")
        left = model.single_blocks - int(block) + (kind == "double") * model.double_blocks  # with this block
        is_last = left <= max(1, round(LAST * (model.double_blocks + model.single_blocks)))
        names = (layer, f"last.{layer}") if is_last else (layer,)
        return fnmatchcase(product, self.product) and any(fnmatchcase(name, self.layer) for name in names)


def parse(text: str, max_exponent: int = 44) -> Rule:
    """max_exponent: of the scales of e4m3 and e5m2. Raises: Refusal."""
    match = RULE.fullmatch(text.strip())
    if not match:
        raise Refusal(f"precision.rules: {text!r} is no rule; write LAYER PRODUCT: LEFT x RIGHT, as * *: e4m3 x e4m3")
    layer, product, left, right = match.groups()
    if not any(fnmatchcase(name, product) for name in PRODUCTS):
        raise Refusal(f"precision.rules: {text!r} names the product {product}; give {', '.join(PRODUCTS)} or a pattern")
    return Rule(text, layer, product, (_side(left, text, max_exponent), _side(right, text, max_exponent)))


def _side(name: str, text: str, max_exponent: int) -> Side | None:
    base, *options = name.split("+")
    if name == PLAIN:
        return None
    if base not in SIDES or len({*options} & {"sr", "h16", "h32"}) < len(options) or {"h16", "h32"} <= {*options}:
        known = f"{PLAIN}, {', '.join(SIDES)}"
        raise Refusal(f"precision.rules: {text!r} names the side {name}; give one of {known}, with +sr, +h16 or +h32")
    size = next((int(option[1:]) for option in options if option != "sr"), 0)
    scaling = replace(SIDES[base].scaling, max_exponent=max_exponent)
    return replace(SIDES[base], name=name, scaling=scaling, stochastic="sr" in options, hadamard=size)


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


class Stage(NamedTuple):
    """What a run computes with from a step on."""

    first: int  # step, from 0
    preset: str
    pairs: dict[str, dict[str, Pair]]  # of each product, by the layer's name in rules


@cache
def stages(cfg: Config) -> tuple[Stage, ...]:
    """The stages of a run in their order. precision.rules belong to the first. Raises: Refusal."""
    own = cfg.precision
    last = steps_for(cfg.train.max_samples, cfg.train.global_batch)
    named = [(0, own.preset, own.rules), *((samples, preset, ()) for samples, preset in own.switch)]
    found = []
    for samples, preset, rules in named:
        key = "switch" if found else "preset"
        if preset not in PRESETS:
            raise Refusal(f"precision.{key} names the preset {preset!r}; give one of {', '.join(PRESETS)}")
        first = steps_for(samples, cfg.train.global_batch)
        if found and not found[-1].first < first < last:
            ends = f"give samples after step {found[-1].first} and before {last}, the end by train.max_samples"
            raise Refusal(f"precision.switch: [{samples}, {preset!r}] begins at step {first}; {ends}")
        every = [parse(rule, own.max_scale_exponent) for rule in (*PRESETS[preset], *rules)]
        found.append(Stage(first, preset, pairs(every, cfg.model)))
        _require_all_match(every[len(PRESETS[preset]) :], cfg.model)
        if is_low(found[-1]) and cfg.parallel.dtype != "bf16":
            given = f"precision.{key}={preset}" + " with precision.rules" * bool(rules)
            raise Refusal(f"{given} needs parallel.dtype=bf16, not {cfg.parallel.dtype}; set parallel.dtype=bf16")
    return tuple(found)


def pairs(rules: list[Rule], model: ModelConfig) -> dict[str, dict[str, Pair]]:
    """What each product of each layer takes, by the layer's name in rules and by product.

    Raises: Refusal for sides that a product cannot have, or that do not fit a layer's sizes.
    """
    found = {}
    for layer, sizes in zip(layers(model).values(), layer_sizes(model)):
        deciding = {p: [rule for rule in rules if rule.decides(layer, p, model)][-1:] for p in PRODUCTS}
        found[layer] = {product: one[0].pair if one else (None, None) for product, one in deciding.items()}
        _require_possible(layer, found[layer], sizes)
    return found


def way(products: dict[str, Pair]) -> str:
    """How a linear multiplies: "plain", "tensor" or "blocks" (linear.py).

    "tensor": input, weight and gradient are each cast once. So the two products of a tensor name the same side.
    """
    (x, w), (gradient, again) = products["forward"], products["grad_input"]
    if not any(side for pair in products.values() for side in pair):
        return "plain"
    is_whole = all(side and side.is_whole for side in (x, w, gradient))
    shares = w == again and products["grad_weight"] in ((gradient, x), (None, None))
    return "tensor" if is_whole and shares and x.form == w.form == E4M3 else "blocks"


def _require_possible(layer: str, products: dict[str, Pair], sizes: tuple[int, int, int]) -> None:
    """sizes: inputs K and outputs N of the layer, and tokens M of a micro-batch, 0 if unknown. Raises: Refusal."""
    (x, _), (gradient, _) = products["forward"], products["grad_input"]
    for (product, pair), summed in zip(products.items(), sizes):
        what, key = TOKENS if product == "grad_weight" else ("features", "model.hidden")
        for place, side in ((place, side) for place, side in enumerate(pair) if side):
            is_weight = place == 1 and product != "grad_weight"
            why = ""
            if side.scaling.rows > 1 and not is_weight:
                why = "has 2-D blocks, which only a weight can have; take the 1-D side"
            want = E4M3 if product == "forward" or place else E5M2
            both = way(products) == "tensor" and x.delayed == gradient.delayed
            if side.delayed and (is_weight or side.form != want or not both):
                why = "needs a layer with the three products of the preset fp8_delayed; take e4m3 or e5m2"
            if len({one.hadamard if one else 0 for one in pair}) > 1:
                why = "needs the same Hadamard transform on both sides; give both +h16, both +h32, or none"
            if side.delayed and sizes[2] % MULTIPLE:
                why = f"needs tokens of a micro-batch that {MULTIPLE} divides, not {sizes[2]}; set {TOKENS[1]}"
            if summed % (divisor := max(side.scaling.columns or MULTIPLE, side.hadamard)):
                why = f"cannot sum over {summed} {what}, which {divisor} does not divide; set {key}"
            if is_weight and side.scaling.rows and sizes[product == "forward"] % side.scaling.rows:
                why = f"has {side.scaling.rows} rows, which do not divide a weight of {sizes[:2]}; set {key}"
            if why:
                raise Refusal(
                    f"precision: {layer} {product}: {format_pair(pair)}: {side.name} {why}, or write another rule"
                )


def layer_sizes(model: ModelConfig, rows: int = 0) -> list[tuple[int, int, int]]:
    """K, N and M of each of the `layers`; rows: samples of a micro-batch."""
    h = model.hidden
    inner = model.mlp_ratio * model.hidden
    image = model.image_tokens
    text = model.text_tokens
    double = [(k, n, rows * m) for m in (image, text) for k, n in ((h, 3 * h), (h, h), (h, inner), (inner, h))]
    single = [(k, n, rows * (image + text)) for k, n in ((h, 3 * h + inner), (h + inner, h))]
    return model.double_blocks * double + model.single_blocks * single


def _require_all_match(rules: list[Rule], model: ModelConfig) -> None:
    """Raises: Refusal for a rule that matches no product."""
    names = layers(model).values()
    for rule in rules:
        if not any(rule.decides(layer, product, model) for layer in names for product in PRODUCTS):
            heads = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", layer) for layer in names)
            raise Refusal(f"precision.rules: {rule.text!r} matches no product of this model; it has {', '.join(heads)}")


def require_rows(cfg: Config, rows: int) -> None:
    """rows: samples of a micro-batch. A gradient of a weight is a sum over all their tokens. Raises: Refusal."""
    for stage in stages(cfg):
        for (layer, products), sizes in zip(stage.pairs.items(), layer_sizes(cfg.model, rows)):
            _require_possible(layer, products, sizes)


def is_low(stage: Stage) -> bool:
    """Whether any product is not in bf16."""
    return any(way(products) != "plain" for products in stage.pairs.values())


def layers_gathered_in_fp8(cfg: Config) -> dict[str, str]:
    """The `layers` whose weights are gathered as codes (fp8_gather.py): those with e4m3 weights in all stages."""
    names = layers(cfg.model).items() if cfg.precision.gather else ()
    return {name: layer for name, layer in names if all(way(one.pairs[layer]) == "tensor" for one in stages(cfg))}


def layers_with_delayed_scales(cfg: Config) -> set[str]:
    """The layers, by their names in rules, that take scales of earlier steps in any stage."""
    return {layer for stage in stages(cfg) for layer, found in stage.pairs.items() if is_delayed(found)}


def is_delayed(products: dict[str, Pair]) -> bool:
    return any(side and side.delayed for pair in products.values() for side in pair)


def narrowest(cfg: Config, *products: str) -> str | None:
    """The narrowest format of any side, as the benchmark's log names it; None if all are in bf16.

    products: which of PRODUCTS to look at; all if none is given.
    """
    found = [pairs for stage in stages(cfg) for pairs in stage.pairs.values()]
    names = {side.name for pairs in found for product in products or PRODUCTS for side in pairs[product] if side}
    narrow = (known for known in NARROW if any(name.startswith(known) for name in names))
    return next(narrow, "fp8") if names else None


def describe(cfg: Config) -> list[str]:
    """What a run computes with, in words: one line, and more lines for a policy."""
    found = stages(cfg)
    plain = cfg.parallel.dtype
    own = cfg.precision
    if not any(map(is_low, found)):
        return [f"{plain} in training and validation"]
    words = own.preset + " and precision.rules" * bool(own.rules) + "".join(f", then {one}" for _, one in own.switch)
    lines = [f"{words}; validation {'as in training, with dynamic scales' if own.eval else plain}"]
    for stage in found:
        head = f"from {stage.first * cfg.train.global_batch:,} samples on: {stage.preset}"
        lines += [f"  {head}", *(f"    {line}" for line in table(stage.pairs))]
    if layers_with_delayed_scales(cfg):
        lines.append(f"  delayed scales: {own.algorithm} of {own.history}, the first {own.dynamic_steps} steps dynamic")
    return lines


def table(found: dict[str, dict[str, Pair]]) -> list[str]:
    """What `pairs` gives as text: a line for each set of layers whose three products are cast alike."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for layer, products in found.items():
        alike.setdefault(tuple(format_pair(products[product]) for product in PRODUCTS), []).append(layer)
    lines = ["linears  " + "".join(f"{product:<{WIDTH}}" for product in PRODUCTS) + "layers"]
    for sides, members in alike.items():
        lines.append(f"{len(members):>7}  " + "".join(f"{side:<{WIDTH}}" for side in sides) + _where(members))
    return lines


def _where(members: list[str]) -> str:
    """Layers in words, by the numbers of their blocks: double 0 to 18 (img.qkv, img.proj); single 0 to 37, with all."""
    names: dict[tuple[str, int], list[str]] = {}
    for kind, block, name in (layer.split(".", 2) for layer in members):
        names.setdefault((kind, int(block)), []).append(name)
    words = []
    for (kind, first), one in names.items():
        if (kind, first - 1) in names and names[kind, first - 1] == one:
            continue
        last = next(block for block in count(first) if names.get((kind, block + 1)) != one)
        some = f" ({', '.join(one)})" if len(one) < LAYERS[kind] else ""
        words.append(f"{kind} {first}" + f" to {last}" * (last > first) + some)
    return "; ".join(words)


def format_pair(pair: Pair) -> str:
    """A pair as rules write it."""
    return " x ".join(side.name if side else PLAIN for side in pair)
