"""Rules and presets of precision: which product takes what."""

import re
from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from conftest import ROOT

from flux_ref import config_file, config_rules
from flux_ref.config import ModelConfig, flat
from flux_ref.errors import Refusal
from flux_ref.model import parameter_table
from flux_ref.speed import policy
from flux_ref.speed.layers import layers
from flux_ref.speed.number_formats import E2M1, E2M3, E4M3, Scaling
from flux_ref.speed.sides import format_pair, way

TINY = config_file.load(ROOT / "configs/tiny.toml")
SCHNELL, SMALL = ModelConfig(), TINY.model
LINEAR = re.compile(r"double_blocks\.\d+\.(img|txt)_(attn\.(qkv|proj)|mlp\.[02])|single_blocks\.\d+\.linear[12]")


def found_in(model: ModelConfig, *rules: str) -> dict:
    return policy.pairs([policy.parse(rule) for rule in rules], model)


def test_rules_name_the_linears_of_the_blocks_that_see_tokens():
    for model in (SCHNELL, SMALL):
        names = {name.removesuffix(".weight") for name in parameter_table(model) if name.endswith(".weight")}
        assert layers(model).keys() == {name for name in names if LINEAR.fullmatch(name)}
    assert len({layer.name for layer in layers(SCHNELL).values()}) == 228


def test_the_last_rule_that_matches_decides():
    """Against a loop over all rules from the end, for several orders of overlapping rules."""
    rules = ["* *: mxfp8 x mxfp8", "double.* grad_*: mxfp4 x mxfp4", "*.txt.* forward: bf16 x bf16"]
    rules += ["double.1.img.qkv grad_weight: e5m2 x e4m3", "last.* *: nvfp4 x nvfp4"]
    for shift in range(len(rules)):
        order = rules[shift:] + rules[:shift]
        for layer, products in found_in(SCHNELL, *order).items():
            is_last = layer.startswith("single.") and int(layer.split(".")[1]) >= 38 - round(0.15 * 57)
            for product, pair in products.items():
                want = "bf16 x bf16"
                for rule in order:
                    where, what, sides = rule.replace(":", "").split(" ", 2)
                    if fnmatchcase(layer, where) or (where == "last.*" and is_last):
                        want = sides if fnmatchcase(product, what) else want
                assert format_pair(pair) == want, (layer, product, order)


def test_presets_hold_what_their_sources_say():
    presets = {name: found_in(SCHNELL, *rules) for name, rules in policy.PRESETS.items()}
    counts = {
        name: sum(pair != (None, None) for products in layers.values() for pair in products.values())
        for name, layers in presets.items()
    }
    assert counts == {
        **{"bf16": 0, "fp8": 3 * 228, "fp8_delayed": 3 * 228, "mxfp8": 3 * 228, "mxfp4_backward": 2 * 228 + 76},
        **{"mxfp6_fp4": 3 * 228, "nvfp4": 3 * (228 - 2 * 9)},
    }
    left, right = presets["mxfp6_fp4"]["single.0.linear2"]["forward"]
    assert (left.form, left.scaling, left.hadamard, right.form) == (E2M3, Scaling("floor", 1, 32), 32, E2M1)
    assert not left.stochastic and presets["mxfp6_fp4"]["single.0.linear1"]["forward"][0].form is E2M1
    left, right = presets["nvfp4"]["double.0.txt.qkv"]["grad_weight"]
    assert left.stochastic and left.hadamard == right.hadamard == 16 and not right.stochastic
    assert presets["mxfp4_backward"]["single.3.linear1"]["forward"][0].form is E4M3
    assert presets["nvfp4"]["single.28.linear1"] != presets["nvfp4"]["single.29.linear1"]
    small = found_in(SMALL, *policy.PRESETS["nvfp4"])  # "last" is one block at least
    plain = {layer for layer, products in small.items() if products["forward"] == (None, None)}
    assert plain == {f"single.{SMALL.single_blocks - 1}.linear{i}" for i in (1, 2)}


def refused(**precision: object) -> str:
    """What refuses tiny in bf16 with these keys of precision; "" if nothing does."""
    keys = {f"precision__{key}": value for key, value in precision.items()}
    try:
        cfg = config_file.replace(TINY, parallel__dtype="bf16", **keys)
        config_rules.validate_world(cfg, 2)
    except Refusal as refusal:
        return str(refusal)
    return ""


def test_rules_that_mean_nothing_are_refused_with_the_rule_and_the_remedy():
    cases = {
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
    found = {rule: refused(rules=(rule,)) for rule in cases}
    assert [
        (rule, words)
        for rule, words in found.items()
        if cases[rule] not in words or f"precision.rules: {rule!r}" not in words
    ] == []


def test_what_sides_or_sizes_forbid_is_refused_with_the_product_and_the_remedy():
    cases = {
        "* forward: mxfp4_2d x mxfp4": "mxfp4_2d has 2-D blocks, which only a weight can have",
        "* grad_weight: nvfp4 x nvfp4_2d": "nvfp4_2d has 2-D blocks",
        "* forward: e4m3_delayed x e4m3": "e4m3_delayed needs a layer with the three products",
        "* grad_input: e5m2_delayed x mxfp8": "e5m2_delayed needs a layer",
        "* grad_weight: mxfp4+h16 x mxfp4": "mxfp4+h16 needs the same Hadamard transform on both sides; give both +h16",
        "* forward: bf16 x mxfp8+h32": "mxfp8+h32 needs the same Hadamard transform",
        "* grad_weight: mxfp8 x mxfp8": "txt.qkv grad_weight: mxfp8 x mxfp8: mxfp8 cannot sum over 300 tokens"
        " of a micro-batch, which 32 does not divide; set train.micro_batch, train.global_batch or model.text_tokens",
    }
    found = {rule: refused(rules=(rule,)) for rule in cases}
    assert [(rule, words) for rule, words in found.items() if cases[rule] not in words] == []
    assert refused(rules=("*.img.* *: mxfp8 x mxfp8",), preset="bf16") == ""
    half = ("* grad_input: e5m2 x e4m3", "* grad_weight: e5m2 x e4m3_delayed")  # the gradient alone is not delayed
    assert "e4m3_delayed needs a layer" in refused(preset="fp8_delayed", rules=half)
    plain = ("* grad_weight: bf16 x bf16",)
    assert "needs tokens of a micro-batch that 16 divides, not 300" in refused(preset="fp8_delayed", rules=plain)
    assert refused(preset="fp8", rules=plain) == ""
    for hidden, ratio, rule, words in (
        (
            80,
            4,
            "* forward: mxfp8 x bf16",
            "mxfp8 cannot sum over 80 features, which 32 does not divide; set model.hidden",
        ),
        (80, 3, "* forward: bf16 x mxfp4_2d", "mxfp4_2d has 32 rows, which do not divide a weight of (80, 240)"),
        (48, 2, "*.mlp_out forward: bf16 x mxfp4_2d", "mxfp4_2d has 32 rows, which do not divide a weight of (96, 48)"),
    ):
        with pytest.raises(Refusal) as found_out:
            found_in(replace(TINY.model, hidden=hidden, mlp_ratio=ratio), rule)
        assert words in str(found_out.value)


def test_presets_and_switches_that_cannot_be_are_refused():
    cases = [
        ({"preset": "fp9"}, "precision.preset names the preset 'fp9'; give one of bf16, fp8"),
        ({"switch": ((600, "fp9"),)}, "precision.switch names the preset 'fp9'"),
        (
            {"switch": ((0, "bf16"),)},
            "precision.switch: [0, 'bf16'] begins at step 0; give samples after step 0 and before 1000, the end by",
        ),
        (
            {"preset": "mxfp8", "switch": ((600, "fp8"), (540, "bf16"))},
            "begins at step 9; give samples after step 10 and",
        ),
        ({"preset": "mxfp8", "switch": ((-600, "bf16"),)}, "give samples after step 0 and before 1000"),
        ({"preset": "mxfp8", "switch": ((60_000, "bf16"),)}, "begins at step 1000; give samples after"),
        ({"switch": ((600,),)}, "is not a list of [integer, string]"),
        ({"rules": ("a", 3)}, "is not a list of strings"),
    ]
    found = [refused(**keys) for keys, _ in cases]
    assert [words for words, (_, want) in zip(found, cases) if want not in words] == []
    with pytest.raises(Refusal, match=r"precision\.preset=fp8 needs parallel\.dtype=bf16, not fp32"):
        config_file.replace(TINY, precision__preset="fp8")


def test_stages_begin_at_the_step_that_reaches_their_samples():
    values = {"precision__preset": "nvfp4", "precision__rules": ("*.txt.* *: bf16 x bf16",), "parallel__dtype": "bf16"}
    cfg = config_file.replace(TINY, **values, precision__switch=((601, "fp8_delayed"), (1200, "bf16")))
    assert config_file.from_flat("x", flat(cfg)).precision == cfg.precision == config_file.override(cfg, []).precision
    first, second, last = stages = policy.stages(cfg)
    assert [stage[:2] for stage in stages] == [
        (0, "nvfp4"),
        (11, "fp8_delayed"),
        (20, "bf16"),
    ]
    ways = {layer: way(products) for layer, products in first.pairs.items()}
    assert ways["double.0.txt.qkv"] == ways["single.1.linear1"] == "plain" and ways["single.0.linear1"] == "blocks"
    assert {way(products) for products in second.pairs.values()} == {"tensor"}
    assert not policy.is_low(last)
    assert policy.layers_with_delayed_scales(cfg) == set(second.pairs) and not policy.layers_gathered_in_fp8(cfg)
    assert (policy.narrowest(cfg), policy.narrowest(config_file.replace(TINY, parallel__dtype="bf16"))) == (
        "nvfp4",
        None,
    )
    eight = config_file.replace(TINY, precision__preset="fp8", parallel__dtype="bf16", train__micro_batch=4)
    assert policy.layers_gathered_in_fp8(eight) == {module: layer.name for module, layer in layers(TINY.model).items()}
    mixed = config_file.replace(eight, precision__rules=("*.qkv grad_weight: bf16 x bf16", "last.* *: bf16 x bf16"))
    assert len(policy.layers_gathered_in_fp8(mixed)) == 8 + 2 and policy.narrowest(mixed, "forward") == "fp8"


def test_the_table_counts_the_products_of_each_rule():
    cfg = config_file.replace(
        TINY,
        parallel__dtype="bf16",
        model__double_blocks=4,
        model__single_blocks=3,
        precision__preset="mxfp8",
        precision__rules=("double.[1-2].* forward: bf16 x bf16", "single.1.linear1 *: bf16 x bf16"),
    )
    (stage,) = policy.stages(cfg)
    assert [line.split(maxsplit=2) for line in policy.table(stage, cfg.model)] == [
        [str(3 * 4 * 8 + 3 * 3 * 2 - 16 - 3), "products:", "* *: mxfp8 x mxfp8"],
        ["16", "products:", "double.[1-2].* forward: bf16 x bf16"],
        ["3", "products:", "single.1.linear1 *: bf16 x bf16"],
    ]
    bare = config_file.replace(TINY, parallel__dtype="bf16", precision__rules=("last.* *: mxfp8 x mxfp8",))
    assert policy.table(policy.stages(bare)[0], bare.model)[0].endswith("products: * *: bf16 x bf16")
