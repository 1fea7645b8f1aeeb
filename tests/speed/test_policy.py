"""Rules and presets of precision: which product takes what."""

from dataclasses import replace
from fnmatch import fnmatchcase

import pytest
from conftest import MICRO

from flux_ref import config_file
from flux_ref.config import FP8_LINEAR, ModelConfig
from flux_ref.errors import Refusal
from flux_ref.model import parameter_table
from flux_ref.speed import policy
from flux_ref.speed.number_formats import E2M1, E2M3, E4M3, Scaling

SCHNELL, SMALL = ModelConfig(), config_file.load(MICRO).model


def found(model: ModelConfig, *rules: str) -> dict:
    return policy.pairs([policy.parse(rule) for rule in rules], model)


def test_rules_name_the_linears_of_the_blocks_that_see_tokens():
    for model in (SCHNELL, SMALL):
        names = {name.removesuffix(".weight") for name in parameter_table(model) if name.endswith(".weight")}
        assert policy.layers(model).keys() == {name for name in names if FP8_LINEAR.fullmatch(name)}
    assert len(set(policy.layers(SCHNELL).values())) == 228


def test_the_last_rule_that_matches_decides():
    """Against a loop over all rules from the end, for several orders of overlapping rules."""
    rules = ["* *: mxfp8 x mxfp8", "double.* grad_*: mxfp4 x mxfp4", "*.txt.* forward: bf16 x bf16"]
    rules += ["double.1.img.qkv grad_weight: e5m2 x e4m3", "last.* *: nvfp4 x nvfp4"]
    for shift in range(len(rules)):
        order = rules[shift:] + rules[:shift]
        for layer, products in found(SCHNELL, *order).items():
            is_last = layer.startswith("single.") and int(layer.split(".")[1]) >= 38 - round(0.15 * 57)
            for product, pair in products.items():
                want = "bf16 x bf16"
                for rule in order:
                    where, what, sides = rule.replace(":", "").split(" ", 2)
                    if fnmatchcase(layer, where) or (where == "last.*" and is_last):
                        want = sides if fnmatchcase(product, what) else want
                assert policy.said(pair) == want, (layer, product, order)


def test_presets_hold_what_their_sources_say():
    presets = {name: found(SCHNELL, *rules) for name, rules in policy.PRESETS.items()}
    counts = {
        name: sum(pair != (None, None) for products in layers.values() for pair in products.values())
        for name, layers in presets.items()
    }
    assert counts == {
        **{"bf16": 0, "fp8": 3 * 228, "mxfp8": 3 * 228, "mxfp4_backward": 2 * 228 + 76},
        **{"mxfp6_fp4": 3 * 228, "nvfp4": 3 * (228 - 2 * 9)},
    }
    left, right = presets["mxfp6_fp4"]["single.0.linear2"]["forward"]
    assert (left.form, left.scaling, left.hadamard, right.form) == (E2M3, Scaling("floor", 1, 32), 32, E2M1)
    assert not left.stochastic and presets["mxfp6_fp4"]["single.0.linear1"]["forward"][0].form is E2M1
    left, right = presets["nvfp4"]["double.0.txt.qkv"]["grad_weight"]
    assert left.stochastic and left.hadamard == right.hadamard == 16 and not right.stochastic
    assert presets["mxfp4_backward"]["single.3.linear1"]["forward"][0].form is E4M3
    assert presets["nvfp4"]["single.28.linear1"] != presets["nvfp4"]["single.29.linear1"]
    small = found(SMALL, *policy.PRESETS["nvfp4"])  # "last" is one block at least
    plain = {layer for layer, products in small.items() if products["forward"] == (None, None)}
    assert plain == {f"single.{SMALL.single_blocks - 1}.linear{i}" for i in (1, 2)}


def test_rules_that_mean_nothing_are_refused_with_the_rule_and_the_remedy():
    cases = {
        "all in fp8": "is no rule; write LAYER PRODUCT: LEFT x RIGHT",
        "* *: e4m3": "is no rule",
        "* backward: e4m3 x e4m3": "names the product backward; give forward, grad_input, grad_weight",
        "* *: e4m4 x e4m3": "names the side e4m4; give one of bf16, e4m3",
        "* *: e4m3 x bf16+sr": "names the side bf16+sr",
        "* *: e4m3 x e4m3+h8": "names the side e4m3+h8",
        "* *: mxfp4+h16+h32 x mxfp4": "names the side mxfp4+h16+h32",
        "single.*.qkv *: e4m3 x e4m3": "matches no product of this model; it has double.*.img.qkv",
        "double.7.* *: e4m3 x e4m3": "matches no product",
    }
    for rule, words in cases.items():
        with pytest.raises(Refusal, match=r"precision\.rules") as refused:
            found(SMALL, rule)
        assert words in str(refused.value) and repr(rule) in str(refused.value)


def test_the_table_counts_every_linear_once_and_names_ranges_of_blocks():
    rules = ("* *: mxfp8 x mxfp8", "double.[1-2].* forward: bf16 x bf16", "single.1.linear1 *: bf16 x bf16")
    model = replace(SMALL, double_blocks=4, single_blocks=3)
    head, *lines = policy.table(found(model, *rules))
    assert head.split() == ["linears", *policy.PRODUCTS, "layers"]
    assert sum(int(line.split()[0]) for line in lines) == 8 * 4 + 2 * 3
    every = "img.qkv, img.proj, img.mlp_in, img.mlp_out, txt.qkv, txt.proj, txt.mlp_in, txt.mlp_out"
    both = "linear1, linear2"
    assert [line.split("  ")[-1].strip() for line in lines] == [
        f"double 0 ({every}); double 3 ({every}); single 0 ({both}); single 1 (linear2); single 2 ({both})",
        f"double 1 to 2 ({every})",
        "single 1 (linear1)",
    ]
