"""Which number format each matrix product of the blocks takes: presets, rules and the stages of a run.

A rule is LAYER PRODUCT: LEFT x RIGHT, such as "double.*.img.qkv grad_weight: bf16 x bf16". LAYER and PRODUCT are
patterns as of file names. LAYER is KIND.BLOCK.NAME; `last.LAYER` means the layers of the last 15 % of all blocks. A
side is one of SIDES, perhaps with +sr (stochastic rounding), +h16 or +h32 (Hadamard transform along the sum). The last
rule that matches a product decides. A product that no rule matches stays in bf16.
A run may have several stages, each with a policy of its own (precision.switch).
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import NamedTuple

from flux_ref.config import Config, ModelConfig
from flux_ref.errors import Refusal
from flux_ref.precision.layers import (
    PLAIN,
    PRODUCTS,
    SIDES,
    Layer,
    Pair,
    Products,
    Side,
    format_pair,
    is_delayed,
    layers,
    require_possible,
    way,
)
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
RULE = re.compile(r"(\S+) +(\S+): *(\S+) +x +(\S+)")
OPTIONS = {"sr": ("stochastic", True), "h16": ("hadamard", 16), "h32": ("hadamard", 32)}  # of a side: what they set
# What the benchmark's log calls sides whose names hold a word, narrowest first.
LOGGED = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp6": "mxfp6", "mxfp8": "fp8", "e4m3": "fp8", "e5m2": "fp8"}


@dataclass(frozen=True)
class Rule:
    """A parsed rule. text: as it was given. layer, product: patterns."""

    text: str
    layer: str
    product: str
    pair: Pair

    def matches(self, layer: Layer, product: str) -> bool:
        names = [layer.name, f"last.{layer.name}"] if layer.is_last else [layer.name]
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
    if name == PLAIN:
        return None
    base, *options = name.split("+")
    values = dict(OPTIONS[option] for option in options if option in OPTIONS)
    if base not in SIDES or len(values) < len(options):
        known = f"{PLAIN}, {', '.join(SIDES)}"
        raise Refusal(f"precision.rules: {text!r} names the side {name}; give one of {known}, with +sr, +h16 or +h32")
    return replace(SIDES[base], name=name, **values)


DEFAULT = parse("* *: bf16 x bf16")


class Stage(NamedTuple):
    """What a run computes with from a step on."""

    first: int  # step, from 0
    preset: str
    rules: list[Rule]
    pairs: dict[str, Products]  # by the layer's name in rules


@cache
def stages(cfg: Config) -> tuple[Stage, ...]:
    """The stages of a run in their order. precision.rules belong to the first. Raises: Refusal."""
    end = steps_for(cfg.train.max_samples, cfg.train.global_batch)
    found = [_stage(cfg, "preset", 0, cfg.precision.preset, cfg.precision.rules)]
    for samples, preset in cfg.precision.switch:
        first = steps_for(samples, cfg.train.global_batch)
        before = found[-1].first
        if not before < first < end:
            rule = f"give samples after step {before} and before {end}, the end by train.max_samples"
            raise Refusal(f"precision.switch: [{samples}, {preset!r}] begins at step {first}; {rule}")
        found.append(_stage(cfg, "switch", first, preset, ()))
    return tuple(found)


def _stage(cfg: Config, key: str, first: int, preset: str, rules: tuple[str, ...]) -> Stage:
    """key: of precision that names the preset. Raises: Refusal."""
    if preset not in PRESETS:
        raise Refusal(f"precision.{key} names the preset {preset!r}; give one of {', '.join(PRESETS)}")
    own = [parse(rule) for rule in rules]
    every = [parse(rule) for rule in PRESETS[preset]] + own
    stage = Stage(first, preset, every, pairs(every, cfg.model))
    _require_all_match(own, cfg.model)
    dtype = cfg.parallel.dtype
    if is_low(stage) and dtype != "bf16":
        given = f"{preset} with precision.rules" if rules else preset
        raise Refusal(f"precision.{key}={given} needs parallel.dtype=bf16, not {dtype}; set parallel.dtype=bf16")
    return stage


def pairs(rules: list[Rule], model: ModelConfig) -> dict[str, Products]:
    """What each product of each layer takes, by the layer's name in rules and by product.

    Raises: Refusal for sides that a product cannot have, or that do not fit a layer's sizes.
    """
    found = {}
    for layer in layers(model).values():
        found[layer.name] = {product: _deciding(rules, layer, product).pair for product in PRODUCTS}
        require_possible(layer, found[layer.name], rows=0)
    return found


def _deciding(rules: list[Rule], layer: Layer, product: str) -> Rule:
    return [rule for rule in (DEFAULT, *rules) if rule.matches(layer, product)][-1]


def _require_all_match(rules: list[Rule], model: ModelConfig) -> None:
    """Raises: Refusal for a rule that matches no product."""
    known = layers(model).values()
    for rule in rules:
        if not any(rule.matches(layer, product) for layer in known for product in PRODUCTS):
            heads = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", layer.name) for layer in known)
            raise Refusal(f"precision.rules: {rule.text!r} matches no product of this model; it has {', '.join(heads)}")


def require_rows(cfg: Config, rows: int) -> None:
    """rows: samples of a micro-batch. A gradient of a weight is a sum over all their tokens. Raises: Refusal."""
    for stage in stages(cfg):
        for layer in layers(cfg.model).values():
            require_possible(layer, stage.pairs[layer.name], rows)


def is_low(stage: Stage) -> bool:
    """Whether any product is not in bf16."""
    return any(way(products) != "plain" for products in stage.pairs.values())


def layers_gathered_in_fp8(cfg: Config) -> dict[str, str]:
    """The layers whose weights are gathered as codes (gather.py): those with e4m3 weights in all stages.

    Their names in rules, by Black Forest Labs' names of the modules.
    """
    if not cfg.precision.gather:
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
    pairs_of_stages = [found for stage in stages(cfg) for found in stage.pairs.values()]
    text = " ".join(format_pair(found[product]) for found in pairs_of_stages for product in products or PRODUCTS)
    return next((name for word, name in LOGGED.items() if word in text), None)


def describe(cfg: Config) -> list[str]:
    """What a run computes with, in words: one line, and more lines for a policy."""
    own = cfg.precision
    found = stages(cfg)
    if not any(is_low(stage) for stage in found):
        return [f"{cfg.parallel.dtype} in training and validation"]
    words = own.preset
    if own.rules:
        words += " and precision.rules"
    for _, preset in own.switch:
        words += f", then {preset}"
    validation = "as in training, with dynamic scales" if own.eval else cfg.parallel.dtype
    lines = [f"{words}; validation {validation}"]
    for stage in found:
        lines.append(f"  from {stage.first * cfg.train.global_batch:,} samples on: {stage.preset}")
        lines += [f"    {line}" for line in table(stage, cfg.model)]
    if layers_with_delayed_scales(cfg):
        lines.append(f"  delayed scales: largest of {own.history}, the first {own.dynamic_steps} steps dynamic")
    return lines


def table(stage: Stage, model: ModelConfig) -> list[str]:
    """The rules of a stage, each with the number of products that it decides."""
    counts = Counter()
    for layer in layers(model).values():
        counts.update(_deciding(stage.rules, layer, product).text for product in PRODUCTS)
    return [f"{count:>4} products: {text}" for text, count in counts.items()]
