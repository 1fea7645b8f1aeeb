"""Which number format each matrix product of the blocks takes: presets, rules and the stages of a run.

A rule is LAYER PRODUCT: LEFT x RIGHT, such as "double_blocks.*.img_attn.qkv grad_weight: bf16 x bf16". LAYER and
PRODUCT are patterns as of file names. LAYER is the name of a module of model.py; `last.LAYER` means the layers of the
last 15 % of all blocks. A side is one of SIDES. The last rule that matches a product decides. A product that no rule
matches stays in bf16.
A run may have several stages, each with a policy of its own (precision.switch).

A layer is a linear of the blocks that sees tokens: K inputs, N outputs, M tokens of a micro-batch. Each of its three
products is a sum over one dimension of its left and its right side:

    forward      input (M, K)             x weight (N, K)           over K
    grad_input   gradient (M, N)          x weight, turned (K, N)   over N
    grad_weight  gradient, turned (N, M)  x input, turned (K, M)    over M
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import NamedTuple

from flux_ref.cli import Refusal
from flux_ref.config import Config, ModelConfig
from flux_ref.precision.formats import BASES, PLAIN, PRODUCTS, SIDES, Pair, Products, is_delayed, matmul_path, pair_text
from flux_ref.schedule import steps_for

PRESETS = {
    "bf16": (),
    "fp8": ("* forward: e4m3 x e4m3", "* grad_*: e5m2 x e4m3"),
    "fp8_delayed": (
        "* forward: e4m3_delayed x e4m3",
        "* grad_input: e5m2_delayed x e4m3",
        "* grad_weight: e5m2_delayed x e4m3_delayed",
    ),
    "mxfp8": ("* *: mxfp8 x mxfp8",),  # NVIDIA's submissions
    "under80": (  # OmniFlow, github.com/zirui/OmniFlow, examples/mlperf/flux1/README.md
        "single_blocks.* forward: mxfp8 x mxfp8",
        "* grad_input: mxfp4 x mxfp4_2d",
        "* grad_weight: mxfp4+h16 x mxfp4+h16",
    ),
    "mxfp6_fp4": (  # AMD's recipe for v6.1
        "* forward: mxfp6+h32 x mxfp4+h32",
        "single_blocks.*.linear1 forward: mxfp4+h32 x mxfp4+h32",
        "* grad_*: mxfp4+h32+sr x mxfp4+h32+sr",
    ),
    "nvfp4": (  # arXiv 2509.25149
        "* forward: nvfp4 x nvfp4_2d",
        "* grad_input: nvfp4+sr x nvfp4_2d",
        "* grad_weight: nvfp4+h16+sr x nvfp4+h16",
        "last.* *: bf16 x bf16",
    ),
}
NARROW = ("nvfp4", "mxfp4", "mxfp6")  # formats below FP8, narrowest first; sides are named after them
LAST = 0.15  # share of the blocks that "last" means; at least one
DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "fp32"}  # in the log
MULTIPLE = 16  # kernels of FP8 need sizes that this number divides
TOKENS = "train.micro_batch, train.global_batch or model.text_tokens"  # keys that set the tokens of a micro-batch


class Layer(NamedTuple):
    """A linear of the blocks: K inputs, N outputs. tokens: of a sample."""

    tokens: int
    inputs: int
    outputs: int

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
    """The linears that a policy decides, by the names of their modules, in the order of forward."""
    D = model.hidden
    M = model.mlp_ratio * D
    found = {}
    for i in range(model.double_blocks):
        for stream, tokens in (("img", model.image_tokens), ("txt", model.text_tokens)):
            name = f"double_blocks.{i}.{stream}"
            found[f"{name}_attn.qkv"] = Layer(tokens, D, 3 * D)
            found[f"{name}_attn.proj"] = Layer(tokens, D, D)
            found[f"{name}_mlp.0"] = Layer(tokens, D, M)
            found[f"{name}_mlp.2"] = Layer(tokens, M, D)
    tokens = model.image_tokens + model.text_tokens
    for i in range(model.single_blocks):
        found[f"single_blocks.{i}.linear1"] = Layer(tokens, D, 3 * D + M)
        found[f"single_blocks.{i}.linear2"] = Layer(tokens, D + M, D)
    return found


def parse(text: str) -> tuple[str, Pair]:
    """(pattern of a layer and a product, sides) of a rule. Raises: Refusal."""
    head, _, sides = text.partition(": ")
    left, _, right = sides.partition(" x ")
    for name in (left, right):
        if name not in SIDES:
            known = ", ".join(side.name for side in BASES)
            raise Refusal(
                f"precision.rules: {text!r} names the side {name!r}; write LAYER PRODUCT: LEFT x RIGHT, as * *: e4m3 x"
                f" e4m3; a side is {PLAIN} or one of {known}, then perhaps +h16 or +h32, then perhaps +sr"
            )
    return head, (SIDES[left], SIDES[right])


class Stage(NamedTuple):
    """What a run computes with from a step on."""

    first: int  # step, from 0
    preset: str
    pairs: dict[str, Products]  # by the layer's name


@cache
def stages(cfg: Config) -> tuple[Stage, ...]:
    """The stages of a run in their order. precision.rules belong to the first. Raises: Refusal."""
    own = cfg.precision
    batch = cfg.train.global_batch
    end = steps_for(cfg.train.max_samples, batch)
    if cfg.compute.dtype != "bf16" and not own.is_plain:
        raise Refusal(f"precision needs compute.dtype=bf16, not {cfg.compute.dtype}; set compute.dtype=bf16")
    found: list[Stage] = []
    for samples, preset in ((0, own.preset), *own.switch):
        first = steps_for(samples, batch)
        if preset not in PRESETS:
            raise Refusal(f"precision names the preset {preset!r}; give one of {', '.join(PRESETS)}")
        if found and not found[-1].first < first < end:
            rule = f"give samples after step {found[-1].first} and before {end}, the end by train.max_samples"
            raise Refusal(f"precision.switch: {preset!r} begins at step {first}; {rule}")
        rules = () if found else own.rules
        found.append(Stage(first, preset, decided((*PRESETS[preset], *rules), cfg.model)))
    return tuple(found)


def decided(rules: Sequence[str], model: ModelConfig) -> dict[str, Products]:
    """What each product takes, by the layer's name. Raises: Refusal for a rule that matches no product."""
    known = layers(model)
    blocks = list(dict.fromkeys(".".join(name.split(".")[:2]) + "." for name in known))
    last = tuple(blocks[-max(1, round(LAST * len(blocks))) :])
    called = {name: name for name in known}  # layers by what rules call them
    called |= {f"last.{name}": name for name in known if name.startswith(last)}
    pairs: dict[str, Products] = {name: dict.fromkeys(PRODUCTS, (None, None)) for name in known}
    for text in rules:
        head, pair = parse(text)
        is_idle = True
        for alias, name in called.items():
            for product in PRODUCTS:
                if fnmatchcase(f"{alias} {product}", head):
                    pairs[name][product] = pair
                    is_idle = False
        if is_idle:
            example = f"{next(iter(known))} {PRODUCTS[0]}"
            raise Refusal(f"precision.rules: {text!r} matches no product of this model; one is {example}")
    return pairs


def require_rows(cfg: Config, rows: int) -> None:
    """rows: samples of a micro-batch. A gradient of a weight is a sum over all their tokens.

    Raises: Refusal for a side that a product cannot have, or that does not fit a layer's sizes.
    """
    for stage in stages(cfg):
        for name, layer in layers(cfg.model).items():
            _require_possible(name, layer, stage.pairs[name], rows)


def _require_possible(name: str, layer: Layer, products: Products, rows: int) -> None:
    """Raises: Refusal, naming the product, the side and the remedy."""
    delayed = [parse(rule)[1] for rule in PRESETS["fp8_delayed"]]
    for product, pair in products.items():
        *heights, summed = layer.sizes(rows)[product]
        what, key = ("tokens of a micro-batch", TOKENS) if product == "grad_weight" else ("features", "model.hidden")
        transforms = {side.hadamard if side else 0 for side in pair}
        for side, height in zip(pair, heights):
            if not side:
                continue
            divisor = max(side.scaling.columns or MULTIPLE, side.hadamard)
            block = side.scaling.rows or 1
            reason = ""
            if summed % divisor:
                reason = f"cannot sum over {summed} {what}, which {divisor} does not divide; set {key}"
            elif height % block:
                reason = f"has blocks of {block} rows, which do not divide {height} rows; take the 1-D side"
            elif len(transforms) > 1:
                reason = "needs the same Hadamard transform on both sides; give both +h16, both +h32, or none"
            elif side.delayed and [*products.values()] != delayed:
                reason = "needs a layer with the products of the preset fp8_delayed; take e4m3 or e5m2"
            if reason:
                given = f"{name} {product}: {pair_text(pair)}"
                raise Refusal(f"precision: {given}: {side.name} {reason}, or write another rule")


def layers_gathered_in_fp8(cfg: Config) -> list[str]:
    """The layers whose weights are gathered as codes (linear.py): those with e4m3 weights in all stages.

    Validation in bf16 needs bf16 weights.
    """
    if not (cfg.precision.gather and cfg.precision.eval):
        return []
    found = stages(cfg)
    return [name for name in found[0].pairs if all(matmul_path(stage.pairs[name]) == "tensor" for stage in found)]


def layers_with_delayed_scales(cfg: Config) -> list[str]:
    """The layers, in the order of the model, that have delayed sides in any stage."""
    found = stages(cfg)
    return [name for name in found[0].pairs if any(is_delayed(stage.pairs[name]) for stage in found)]


def narrowest_format(cfg: Config, *wanted: str) -> str:
    """The narrowest format of any side, as the benchmark's log names it; compute.dtype if none is cast.

    wanted: which of PRODUCTS to look at; all if none is given.
    """
    every = [products[one] for stage in stages(cfg) for products in stage.pairs.values() for one in wanted or PRODUCTS]
    text = " ".join(side.name for pair in set(every) for side in pair if side)
    return next((form for form in NARROW if form in text), "fp8" if text else DTYPE_NAMES[cfg.compute.dtype])
