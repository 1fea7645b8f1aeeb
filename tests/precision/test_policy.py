"""Rules and presets of precision: which product takes what."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
import torch
from conftest import ROOT, refusal

from flux_ref import config_file
from flux_ref.arithmetic import arithmetic_of
from flux_ref.config import ModelConfig, flat
from flux_ref.model import parameter_table
from flux_ref.precision import policy
from flux_ref.precision.formats import E2M1, E2M3, Scaling
from flux_ref.precision.layers import format_pair, layers, way

TINY = config_file.replace(config_file.load(ROOT / "configs/tiny.toml"), parallel__dtype="bf16")
SCHNELL, SMALL = ModelConfig(), TINY.model


def found_in(model: ModelConfig, *rules: str) -> dict:
    return policy.pairs([policy.parse(rule) for rule in rules], model)


@pytest.mark.parametrize("model", [SCHNELL, SMALL])
def test_rules_name_the_linears_of_the_blocks_that_see_tokens(model):
    """All linears of the blocks but modulation, with the sizes of their weights."""
    table = {name.removesuffix(".weight"): shape for name, shape in parameter_table(model).items()}
    want = {
        name: shape
        for name, shape in table.items()
        if "_blocks." in name and len(shape) == 2 and "mod" not in name and not name.endswith(".bias")
    }
    assert {name: (layer.outputs, layer.inputs) for name, layer in layers(model).items()} == want
    assert len({layer.name for layer in layers(model).values()}) == len(want)


def test_the_last_rule_that_matches_decides():
    """Against a loop over all rules, for several orders of overlapping rules."""
    rules = [
        "* *: mxfp8 x mxfp8",
        "double.* grad_*: mxfp4 x mxfp4",
        "*.txt.* forward: bf16 x bf16",
        "double.1.img.qkv grad_weight: e5m2 x e4m3",
        "last.* *: nvfp4 x nvfp4",
    ]
    wrong = []
    for shift in range(len(rules)):
        order = rules[shift:] + rules[:shift]
        for layer, products in found_in(SCHNELL, *order).items():
            is_last = layer.startswith("single.") and int(layer.split(".")[1]) >= 38 - round(0.15 * 57)
            for product, pair in products.items():
                want = "bf16 x bf16"
                for rule in order:
                    where, what, sides = rule.replace(":", "").split(" ", 2)
                    if fnmatchcase(product, what) and (fnmatchcase(layer, where) or (where == "last.*" and is_last)):
                        want = sides
                wrong += [] if format_pair(pair) == want else [(layer, product, order)]
    assert not wrong


def test_presets_hold_what_their_sources_say():
    presets = {name: found_in(SCHNELL, *rules) for name, rules in policy.PRESETS.items()}
    counts = {
        name: sum(pair != (None, None) for products in layers.values() for pair in products.values())
        for name, layers in presets.items()
    }
    assert counts == {
        "bf16": 0,
        "fp8": 3 * 228,
        "fp8_delayed": 3 * 228,
        "mxfp8": 3 * 228,
        "under80": 2 * 228 + 76,
        "pareto_a": 2 * 228 + 152,
        "pareto_b": 2 * 228 + 38 + 171,
        "mxfp6_fp4": 3 * 228,
        "nvfp4": 3 * (228 - 2 * 9),
    }
    left, right = presets["mxfp6_fp4"]["single.0.linear2"]["forward"]
    assert (left.form, left.scaling, left.hadamard, right.form) == (E2M3, Scaling("floor", 1, 32), 32, E2M1)
    assert not left.stochastic and presets["mxfp6_fp4"]["single.0.linear1"]["forward"][0].form is E2M1
    left, right = presets["nvfp4"]["double.0.txt.qkv"]["grad_weight"]
    assert left.stochastic and left.hadamard == right.hadamard == 16 and not right.stochastic
    assert presets["nvfp4"]["single.28.linear1"] != presets["nvfp4"]["single.29.linear1"]
    small = found_in(SMALL, *policy.PRESETS["nvfp4"])  # "last" is one block at least
    plain = {layer for layer, products in small.items() if products["forward"] == (None, None)}
    assert plain == {f"single.{SMALL.single_blocks - 1}.linear{i}" for i in (1, 2)}


# OmniFlow's README of August 2026: by preset and format of the forward product, the number of linears, and which.
PUBLISHED = {
    ("under80", "bf16 x bf16"): (152, "double.*"),
    ("under80", "mxfp8 x mxfp8"): (76, "single.*"),
    ("pareto_a", "bf16 x bf16"): (76, "double.*.img.*"),
    ("pareto_a", "mxfp8 x mxfp8"): (152, "*"),
    ("pareto_b", "bf16 x bf16"): (19, "double.*.img.mlp_in"),
    ("pareto_b", "mxfp4 x mxfp4_2d"): (38, "single.*.linear2"),
    ("pareto_b", "mxfp8 x mxfp8"): (171, "*"),
}


def test_presets_of_omniflow_have_the_published_numbers_of_linears():
    wrong = []
    for (preset, sides), (count, where) in PUBLISHED.items():
        layers_found = found_in(SCHNELL, *policy.PRESETS[preset])
        named = [name for name, products in layers_found.items() if format_pair(products["forward"]) == sides]
        if len(named) != count or not all(fnmatchcase(name, where) for name in named):
            wrong.append((preset, sides, named))
        for product, want in (("grad_input", "mxfp4 x mxfp4_2d"), ("grad_weight", "mxfp4+h16 x mxfp4+h16")):
            backward = {format_pair(products[product]) for products in layers_found.values()}
            wrong += [] if backward == {want} else [(preset, product, backward)]
    assert not wrong


def ready(**values: object) -> None:
    """What a run of two ranks checks, for tiny in bf16 with these values of precision or of other keys."""
    keys = {key if "__" in key else f"precision__{key}": value for key, value in values.items()}
    arithmetic_of(config_file.replace(TINY, **keys)).require(30, torch.device("cpu"))


REFUSED = {  # rules that mean nothing
    "all in fp8": "is no rule; write LAYER PRODUCT: LEFT x RIGHT",
    "* *: e4m3": "is no rule",
    "* backward: e4m3 x e4m3": "names the product backward; give forward, grad_input, grad_weight",
    "* *: e4m4 x e4m3": "names the side e4m4; give one of bf16, e4m3",
    "* *: e4m3 x bf16+sr": "names the side bf16+sr",
    "* *: e4m3 x e4m3+h8": "names the side e4m3+h8",
    "* *: mxfp4+h16+h32 x mxfp4": "names the side mxfp4+h16+h32",
    "* *: mxfp4+sr+sr x mxfp4": "names the side mxfp4+sr+sr",
    "single.*.qkv *: e4m3 x e4m3": "matches no product of this model; it has double.*.img.qkv",
    "double.7.* *: e4m3 x e4m3": "matches no product",
    "last.double.* *: e4m3 x e4m3": "matches no product",
}
FORBIDDEN = {  # by sides or sizes
    "* forward: mxfp4_2d x mxfp4": "mxfp4_2d has 2-D blocks, which only a weight can have",
    "* grad_weight: nvfp4 x nvfp4_2d": "nvfp4_2d has 2-D blocks",
    "* forward: e4m3_delayed x e4m3": "e4m3_delayed needs a layer with the products of the preset",
    "* grad_input: e5m2_delayed x mxfp8": "e5m2_delayed needs a layer",
    "* grad_weight: mxfp4+h16 x mxfp4": "mxfp4+h16 needs the same Hadamard transform on both sides; give both +h16",
    "* forward: bf16 x mxfp8+h32": "mxfp8+h32 needs the same Hadamard transform",
    "* grad_weight: mxfp8 x mxfp8": "txt.qkv grad_weight: mxfp8 x mxfp8: mxfp8 cannot sum over 300 tokens"
    " of a micro-batch, which 32 does not divide; set train.micro_batch, train.global_batch or model.text_tokens",
}
HALF = ("* grad_input: e5m2 x e4m3", "* grad_weight: e5m2 x e4m3_delayed")  # the gradient alone is not delayed
PLAIN = ("* grad_weight: bf16 x bf16",)


def test_what_cannot_be_is_refused_with_the_rule_or_the_product_and_the_remedy():
    cases = [({"rules": (rule,)}, f"precision.rules: {rule!r} {words}") for rule, words in REFUSED.items()]
    cases += [({"rules": (rule,)}, words) for rule, words in FORBIDDEN.items()]
    cases += [
        ({"preset": "fp8_delayed", "rules": HALF}, "e4m3_delayed needs a layer"),
        ({"preset": "fp8_delayed", "rules": ("* grad_weight: e5m2 x e4m3",)}, "e4m3_delayed needs a layer"),
        (
            {"preset": "fp8_delayed", "rules": PLAIN},
            "e4m3_delayed needs tokens of a micro-batch that 16 divides, not 300",
        ),
        ({"preset": "fp9"}, "precision.preset names the preset 'fp9'; give one of bf16, fp8"),
        ({"preset": "fp8", "parallel__dtype": "fp32"}, "precision.preset=fp8 needs parallel.dtype=bf16, not fp32"),
        ({"switch": ((600, "fp9"),)}, "precision.switch names the preset 'fp9'"),
        ({"switch": ((0, "bf16"),)}, "[0, 'bf16'] begins at step 0; give samples after step 0 and before 1000, the en"),
        ({"switch": ((600, "fp8"), (540, "bf16"))}, "begins at step 9; give samples after step 10 and"),
        ({"switch": ((-600, "bf16"),)}, "give samples after step 0 and before 1000"),
        ({"switch": ((60_000, "bf16"),)}, "begins at step 1000; give samples after"),
        ({"switch": ((600,),)}, "is not a list of [integer, string]"),
        ({"rules": ("a", 3)}, "is not a list of strings"),
    ]
    found = [refusal(lambda keys=keys: ready(**keys)) for keys, _ in cases]
    assert [words for words, (_, want) in zip(found, cases) if want not in words] == []
    ready(rules=("*.img.* *: mxfp8 x mxfp8",))
    ready(preset="fp8", rules=PLAIN)


def test_sizes_of_a_weight_that_a_side_cannot_have_are_refused():
    for hidden, ratio, rule, words in (
        (80, 4, "* forward: mxfp8 x bf16", "sum over 80 features, which 32 does not divide; set model.hidden"),
        (80, 3, "* forward: bf16 x mxfp4_2d", "mxfp4_2d has 32 rows, which do not divide a weight of (80, 240)"),
        (48, 2, "*.mlp_out forward: bf16 x mxfp4_2d", "mxfp4_2d has 32 rows, which do not divide a weight of (96, 48)"),
    ):
        assert words in refusal(found_in, replace(SMALL, hidden=hidden, mlp_ratio=ratio), rule)


def test_stages_begin_at_the_step_that_reaches_their_samples():
    values = {"precision__preset": "nvfp4", "precision__rules": ("*.txt.* *: bf16 x bf16",)}
    cfg = config_file.replace(TINY, **values, precision__switch=((601, "fp8_delayed"), (1200, "bf16")))
    assert config_file.from_flat("x", flat(cfg)).precision == cfg.precision == config_file.override(cfg, []).precision
    first, second, last = stages = policy.stages(cfg)
    assert [stage[:2] for stage in stages] == [(0, "nvfp4"), (11, "fp8_delayed"), (20, "bf16")]
    ways = {layer: way(products) for layer, products in first.pairs.items()}
    assert ways["double.0.txt.qkv"] == ways["single.1.linear1"] == "plain" and ways["single.0.linear1"] == "blocks"
    assert {way(products) for products in second.pairs.values()} == {"tensor"}
    assert not policy.is_low(last)
    assert policy.layers_with_delayed_scales(cfg) == list(second.pairs) and not policy.layers_gathered_in_fp8(cfg)
    assert (policy.narrowest(cfg), policy.narrowest(TINY)) == ("nvfp4", None)
    eight = config_file.replace(TINY, precision__preset="fp8", train__micro_batch=4)
    assert policy.layers_gathered_in_fp8(eight) == {module: layer.name for module, layer in layers(TINY.model).items()}
    mixed = config_file.replace(eight, precision__rules=("*.qkv grad_weight: bf16 x bf16", "last.* *: bf16 x bf16"))
    assert len(policy.layers_gathered_in_fp8(mixed)) == 8 + 2 and policy.narrowest(mixed, "forward") == "fp8"


def test_the_table_counts_the_products_of_each_rule():
    rules = ("double.[1-2].* forward: bf16 x bf16", "single.1.linear1 *: bf16 x bf16")
    deep = config_file.replace(TINY, model__double_blocks=4, model__single_blocks=3)
    cfg = config_file.replace(deep, precision__preset="mxfp8", precision__rules=rules)
    (stage,) = policy.stages(cfg)
    assert [line.split(maxsplit=2) for line in policy.table(stage, cfg.model)] == [
        [str(3 * 4 * 8 + 3 * 3 * 2 - 16 - 3), "products:", "* *: mxfp8 x mxfp8"],
        ["16", "products:", rules[0]],
        ["3", "products:", rules[1]],
    ]
    bare = config_file.replace(TINY, precision__rules=("last.* *: mxfp8 x mxfp8",))
    assert policy.table(policy.stages(bare)[0], bare.model)[0].endswith("products: * *: bf16 x bf16")
