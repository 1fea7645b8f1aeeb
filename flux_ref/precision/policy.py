"""Which number format each matrix product of the blocks takes: presets, rules and the stages of a run.

A rule is LAYER PRODUCT: LEFT x RIGHT, such as "double.*.img.qkv grad_weight: bf16 x bf16". LAYER and PRODUCT are
patterns as of file names. LAYER is KIND.BLOCK.NAME; `last.LAYER` means the layers of the last 15 % of all blocks. A
side is one of SIDES, perhaps with +sr (stochastic rounding), +h16 or +h32 (Hadamard transform along the sum). The last
rule that matches a product decides. A product that no rule matches stays in bf16.
A run may have several stages, each with a policy of its own (precision.switch).

A layer is a linear of the blocks that sees tokens: K inputs, N outputs, M tokens of a micro-batch. Each of its three
products is a sum over one dimension of its left and its right side:

    forward      input (M, K)             x weight (N, K)           over K
    grad_input   gradient (M, N)          x weight, turned (K, N)   over N
    grad_weight  gradient, turned (N, M)  x input, turned (K, M)    over M
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Refusal
from flux_ref.precision.formats import PLAIN, PRODUCTS, SIDES, Pair, Products, Side, format_pair, is_delayed, way
from flux_ref.schedule import steps_for

MXFP4_BACKWARD = ("* grad_input: mxfp4 x mxfp4_2d", "* grad_weight: mxfp4+h16 x mxfp4+h16")  # of all OmniFlow's recipes
PRESETS = {
    "bf16": (),
    "fp8": ("* forward: e4m3 x e4m3", "* grad_*: e5m2 x e4m3"),
    "fp8_delayed": (
        "* forward: e4m3_delayed x e4m3",
        "* grad_input: e5m2_delayed x e4m3",
        "* grad_weight: e5m2_delayed x e4m3_delayed",
    ),
    "mxfp8": ("* *: mxfp8 x mxfp8",),  # NVIDIA's submissions
    # OmniFlow, github.com/zirui/OmniFlow, examples/mlperf/flux1/README.md
    "under80": ("single.* forward: mxfp8 x mxfp8", *MXFP4_BACKWARD),
    "pareto_a": ("* forward: mxfp8 x mxfp8", "double.*.img.* forward: bf16 x bf16", *MXFP4_BACKWARD),
    "pareto_b": (
        "* forward: mxfp8 x mxfp8",
        "double.*.img.mlp_in forward: bf16 x bf16",
        "single.*.linear2 forward: mxfp4 x mxfp4_2d",
        *MXFP4_BACKWARD,
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
DELAYED = [rule.partition(": ")[2] for rule in PRESETS["fp8_delayed"]][:2]  # sides of forward and grad_input
RULE = re.compile(r"(\S+) +(\S+): *(\S+) +x +(\S+)")
OPTIONS: dict[str, dict[str, Any]] = {"sr": {"stochastic": True}, "h16": {"hadamard": 16}, "h32": {"hadamard": 32}}
# What the benchmark's log calls sides whose names hold a word, narrowest first.
LOGGED = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp6": "mxfp6", "mxfp8": "fp8", "e4m3": "fp8", "e5m2": "fp8"}
LAST = 0.15  # share of the blocks that "last" means; at least one
PARTS = {"attn.qkv": "qkv", "attn.proj": "proj", "mlp.0": "mlp_in", "mlp.2": "mlp_out"}  # of a stream, as rules say
NAMES = {f"{stream}_{part}": f"{stream}.{name}" for stream in ("img", "txt") for part, name in PARTS.items()}
MULTIPLE = 16  # kernels of FP8 need sizes that this number divides
TOKENS = "train.micro_batch, train.global_batch or model.text_tokens"  # keys that set the tokens of a micro-batch


class Linear(NamedTuple):
    """A linear of the net, or of one block: K inputs, N outputs.

    name: Black Forest Labs', in its block; of one of `layers`, the name in rules.
    tokens: of a sample that it sees; 0: it sees one vector.
    """

    name: str
    tokens: int
    inputs: int
    outputs: int
    is_last: bool = False  # in the last LAST of the blocks

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


def layers(model: ModelConfig) -> dict[str, Linear]:
    """The linears that a policy decides, under their names in rules, by Black Forest Labs' names of the modules."""
    blocks = [("double", i) for i in range(model.double_blocks)] + [("single", i) for i in range(model.single_blocks)]
    first_last = len(blocks) - max(1, round(LAST * len(blocks)))
    known = linears(model)
    found = {}
    for place, (kind, block) in enumerate(blocks):
        for one in known[f"{kind}_blocks"]:
            if one.tokens:
                name = f"{kind}.{block}.{NAMES.get(one.name, one.name)}"
                found[f"{kind}_blocks.{block}.{one.name}"] = one._replace(name=name, is_last=place >= first_last)
    return found


class Rule(NamedTuple):
    """A parsed rule. text: as it was given. layer, product: patterns."""

    text: str
    layer: str
    product: str
    pair: Pair

    def matches(self, layer: Linear, product: str) -> bool:
        names = [layer.name, f"last.{layer.name}"] if layer.is_last else [layer.name]
        return fnmatchcase(product, self.product) and any(fnmatchcase(name, self.layer) for name in names)


def parse(text: str) -> Rule:
    """Raises: Refusal."""
    match = RULE.fullmatch(text.strip())
    if not match:
        raise Refusal(f"precision.rules: {text!r} is no rule; write LAYER PRODUCT: LEFT x RIGHT, as * *: e4m3 x e4m3")
    layer, product, left, right = match.groups()
    return Rule(text, layer, product, (_side(left, text), _side(right, text)))


def _side(name: str, text: str) -> Side | None:
    if name == PLAIN:
        return None
    base, *options = name.split("+")
    if base not in SIDES or not OPTIONS.keys() >= set(options):
        known = f"{PLAIN}, {', '.join(SIDES)}"
        raise Refusal(f"precision.rules: {text!r} names the side {name}; give one of {known}, with +sr, +h16 or +h32")
    side = replace(SIDES[base], name=name)
    for option in options:
        side = replace(side, **OPTIONS[option])
    return side


DEFAULT = parse("* *: bf16 x bf16")


class Stage(NamedTuple):
    """What a run computes with from a step on."""

    first: int  # step, from 0
    preset: str
    pairs: dict[str, Products]  # by the layer's name in rules

    @property
    def is_low(self) -> bool:
        """Whether any product is not in bf16."""
        return any(way(products) != "plain" for products in self.pairs.values())

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        """How many layers take the same sides in a product: by product and sides, as rules write them."""
        every = [item for products in self.pairs.values() for item in products.items()]
        return Counter((product, format_pair(pair)) for product, pair in every)


@cache
def stages(cfg: Config) -> tuple[Stage, ...]:
    """The stages of a run in their order. precision.rules belong to the first. Raises: Refusal."""
    own = cfg.precision
    batch = cfg.train.global_batch
    end = steps_for(cfg.train.max_samples, batch)
    starts = [(steps_for(samples, batch), preset) for samples, preset in own.switch]
    found: list[Stage] = []
    for first, preset in ((0, own.preset), *starts):
        if preset not in PRESETS:
            raise Refusal(f"precision names the preset {preset!r}; give one of {', '.join(PRESETS)}")
        if found and not found[-1].first < first < end:
            rule = f"give samples after step {found[-1].first} and before {end}, the end by train.max_samples"
            raise Refusal(f"precision.switch: {preset!r} begins at step {first}; {rule}")
        found.append(Stage(first, preset, decided(PRESETS[preset], () if found else own.rules, cfg.model)))
        dtype = cfg.parallel.dtype
        if found[-1].is_low and dtype != "bf16":
            rule = f"needs parallel.dtype=bf16, not {dtype}; set parallel.dtype=bf16"
            raise Refusal(f"precision: {preset} with its rules {rule}")
    return tuple(found)


def decided(preset: Sequence[str], own: Sequence[str], model: ModelConfig) -> dict[str, Products]:
    """What each product of each layer takes, by the layer's name in rules.

    preset, own: rules. Own ones come last. Raises: Refusal for an own rule that matches no product, and for sides that
    a product cannot have, or that do not fit a layer's sizes.
    """
    rules = [DEFAULT, *map(parse, (*preset, *own))]
    pairs: dict[str, Products] = {}
    idle = set(own)
    for layer in layers(model).values():
        pairs[layer.name] = {}
        for product in PRODUCTS:
            matching = [rule for rule in rules if rule.matches(layer, product)]
            idle.difference_update(rule.text for rule in matching)
            pairs[layer.name][product] = matching[-1].pair
        _require_possible(layer, pairs[layer.name], rows=0)
    if idle:
        heads = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in pairs)
        known = f"it has {', '.join(heads)} with {', '.join(PRODUCTS)}"
        raise Refusal(f"precision.rules: {idle.pop()!r} matches no product of this model; {known}")
    return pairs


def require_rows(cfg: Config, rows: int) -> None:
    """rows: samples of a micro-batch. A gradient of a weight is a sum over all their tokens. Raises: Refusal."""
    for stage in stages(cfg):
        for layer in layers(cfg.model).values():
            _require_possible(layer, stage.pairs[layer.name], rows)


def _require_possible(layer: Linear, products: Products, rows: int) -> None:
    """rows: samples of a micro-batch, 0 if unknown. Raises: Refusal, naming the product, the side and the remedy."""
    for product, pair in products.items():
        for place, side in enumerate(pair):
            if side and (reason := _obstacle(layer, products, product, place, side, rows)):
                given = f"{layer.name} {product}: {format_pair(pair)}"
                raise Refusal(f"precision: {given}: {side.name} {reason}, or write another rule")


def _obstacle(layer: Linear, products: Products, product: str, place: int, side: Side, rows: int) -> str:
    """Why a side cannot be, with the remedy; "" if it can. place: 0 on the left, 1 on the right."""
    *heights, summed = layer.sizes(rows)[product]
    what, key = ("tokens of a micro-batch", TOKENS) if product == "grad_weight" else ("features", "model.hidden")
    divisor = max(side.scaling.columns or MULTIPLE, side.hadamard)
    tokens = rows * layer.tokens
    other = products[product][1 - place]
    # grad_weight shares the sides of the other products, or is in bf16.
    is_preset = [format_pair(products[name]) for name in PRODUCTS[:2]] == DELAYED and way(products) == "tensor"
    obstacles = (
        (summed % divisor, f"cannot sum over {summed} {what}, which {divisor} does not divide; set {key}"),
        (
            heights[place] % (side.scaling.rows or 1),
            f"has blocks of {side.scaling.rows} rows, which do not divide {heights[place]} rows; take the 1-D side",
        ),
        (
            side.delayed and tokens % MULTIPLE,
            f"needs tokens of a micro-batch that {MULTIPLE} divides, not {tokens}; set {TOKENS}",
        ),
        (
            side.hadamard != (other.hadamard if other else 0),
            "needs the same Hadamard transform on both sides; give both +h16, both +h32, or none",
        ),
        (
            side.delayed and not is_preset,
            "needs a layer with the products of the preset fp8_delayed (grad_weight may be bf16); take e4m3 or e5m2",
        ),
    )
    return next((text for is_there, text in obstacles if is_there), "")


def layers_gathered_in_fp8(cfg: Config) -> dict[str, str]:
    """The layers whose weights are gathered as codes (gather.py): those with e4m3 weights in all stages.

    Their names in rules, by Black Forest Labs' names of the modules. Validation in bf16 needs bf16 weights.
    """
    if not (cfg.precision.gather and cfg.precision.eval):
        return {}
    return {
        module: layer.name
        for module, layer in layers(cfg.model).items()
        if all(way(stage.pairs[layer.name]) == "tensor" for stage in stages(cfg))
    }


def layers_with_delayed_scales(cfg: Config) -> list[str]:
    """The layers, by their names in rules and in the order of the model, that have delayed sides in any stage."""
    found = stages(cfg)
    return [name for name in found[0].pairs if any(is_delayed(stage.pairs[name]) for stage in found)]


def narrowest(cfg: Config, *products: str) -> str | None:
    """The narrowest format of any side, as the benchmark's log names it; None if all are in bf16.

    products: which of PRODUCTS to look at; all if none is given.
    """
    counted = [item for stage in stages(cfg) for item in stage.counts]
    text = " ".join(sides for product, sides in counted if product in (products or PRODUCTS))
    return next((name for word, name in LOGGED.items() if word in text), None)
