"""Rules and presets of precision: which product takes what."""

from collections import Counter
from fnmatch import fnmatchcase

import pytest
from conftest import ROOT, refusal

from flux_ref import config_file
from flux_ref.config import ModelConfig
from flux_ref.model import parameter_table
from flux_ref.precision import policy
from flux_ref.precision.formats import PRODUCTS, matmul_path, pair_text

TINY = config_file.replace(
    config_file.load(ROOT / "configs/tiny.toml"),
    model__single_blocks=2,
    compute__dtype="bf16",
    train__global_batch=60,
    train__max_samples=60_000,
)
SCHNELL = ModelConfig()


def tiny(**values):
    """configs/tiny.toml in bf16 with these values of precision or of other keys."""
    return config_file.replace(TINY, **{key if "__" in key else f"precision__{key}": v for key, v in values.items()})


@pytest.mark.parametrize("model", [SCHNELL, TINY.model])
def test_rules_name_the_linears_of_the_blocks_that_see_tokens(model):
    """All linears of the blocks but modulation, with the sizes of their weights."""
    table = {name.removesuffix(".weight"): shape for name, shape in parameter_table(model).items()}
    want = {
        name: shape
        for name, shape in table.items()
        if "_blocks." in name and len(shape) == 2 and "mod" not in name and not name.endswith(".bias")
    }
    assert {name: (layer.outputs, layer.inputs) for name, layer in policy.layers(model).items()} == want


MX4 = {"grad_input: mxfp4 x mxfp4_2d": 228, "grad_weight: mxfp4+h16 x mxfp4+h16": 228}
PUBLISHED = {  # how many linears take which sides, by the sources of docs/precision.md
    "bf16": {f"{product}: bf16 x bf16": 228 for product in PRODUCTS},
    "fp8": {"forward: e4m3 x e4m3": 228, "grad_input: e5m2 x e4m3": 228, "grad_weight: e5m2 x e4m3": 228},
    "fp8_delayed": {
        "forward: e4m3_delayed x e4m3": 228,
        "grad_input: e5m2_delayed x e4m3": 228,
        "grad_weight: e5m2_delayed x e4m3_delayed": 228,
    },
    "mxfp8": {f"{product}: mxfp8 x mxfp8": 228 for product in PRODUCTS},
    "under80": {"forward: bf16 x bf16": 152, "forward: mxfp8 x mxfp8": 76} | MX4,
    "mxfp6_fp4": {"forward: mxfp6+h32 x mxfp4+h32": 190, "forward: mxfp4+h32 x mxfp4+h32": 38}
    | {f"{product}: mxfp4+h32+sr x mxfp4+h32+sr": 228 for product in PRODUCTS[1:]},
    "nvfp4": {f"{product}: bf16 x bf16": 18 for product in PRODUCTS}
    | {"forward: nvfp4 x nvfp4_2d": 210, "grad_input: nvfp4+sr x nvfp4_2d": 210}
    | {"grad_weight: nvfp4+h16+sr x nvfp4+h16": 210},
}
BF16 = {
    "under80": "double_blocks.*",
    "nvfp4": "single_blocks.*",
}


def test_presets_have_the_published_sides_and_numbers_of_linears():
    for preset, want in PUBLISHED.items():
        pairs = policy.decided(policy.PRESETS[preset], SCHNELL)
        items = (item for products in pairs.values() for item in products.items())
        assert Counter(f"{product}: {pair_text(pair)}" for product, pair in items) == want, preset
        plain = [name for name, products in pairs.items() if products["forward"] == (None, None)]
        assert all(fnmatchcase(name, BF16.get(preset, "*")) for name in plain), preset
    assert PUBLISHED.keys() == policy.PRESETS.keys()
    small = policy.decided(policy.PRESETS["nvfp4"], TINY.model)  # "last" is one block at least
    plain = {layer for layer, products in small.items() if matmul_path(products) == "plain"}
    assert plain == {f"single_blocks.{TINY.model.single_blocks - 1}.linear{i}" for i in (1, 2)}
    left, right = small["double_blocks.0.txt_attn.qkv"]["grad_weight"]
    assert left.stochastic and left.hadamard == right.hadamard == 16 and not right.stochastic


REFUSED = {  # rules alone
    "all in fp8": "names the side ''; write LAYER PRODUCT: LEFT x RIGHT",
    "* backward: e4m3 x e4m3": "matches no product of this model; one is double_blocks.0.img_attn.qkv forward",
    "double_blocks.7.* *: e4m3 x e4m3": "matches no product",
    "* *: e4m4 x e4m3": "names the side 'e4m4'; write LAYER PRODUCT: LEFT x RIGHT, as * *: e4m3 x e4m3",
    "* *: e4m3 x bf16+sr": "names the side 'bf16+sr'",
    "* *: e4m3 x e4m3+h8": "names the side 'e4m3+h8'",
    "* grad_input: mxfp4_2d x bf16": "mxfp4_2d has blocks of 32 rows, which do not divide 300 rows; take the 1-D side",
    "* forward: e4m3_delayed x e4m3": "e4m3_delayed needs a layer with the products of the preset",
    "* grad_input: e5m2_delayed x mxfp8": "e5m2_delayed needs a layer",
    "* grad_weight: mxfp4+h16 x mxfp4": "mxfp4+h16 needs the same Hadamard transform on both sides; give both +h16",
    "* forward: bf16 x mxfp8+h32": "mxfp8+h32 needs the same Hadamard transform",
    "* grad_weight: mxfp8 x mxfp8": "txt_attn.qkv grad_weight: mxfp8 x mxfp8: mxfp8 cannot sum over 300 tokens"
    " of a micro-batch, which 32 does not divide; set train.micro_batch, train.global_batch or model.text_tokens",
}
PLAIN = ("* grad_weight: bf16 x bf16",)
HIDDEN = {"model__hidden": 80, "model__rope_axes": (8, 16, 16), "model__heads": 2}


def test_what_cannot_be_is_refused_with_the_rule_or_the_product_and_the_remedy():
    cases = [({"rules": (rule,)}, words) for rule, words in REFUSED.items()]
    cases += [
        ({"preset": "fp8_delayed", "rules": ("* grad_weight: e5m2 x e4m3",)}, "e4m3_delayed needs a layer"),
        ({"preset": "fp8_delayed", "rules": PLAIN}, "e4m3_delayed needs a layer"),
        ({"preset": "fp9"}, "precision names the preset 'fp9'; give one of bf16, fp8"),
        ({"preset": "fp8", "compute__dtype": "fp32"}, "precision needs compute.dtype=bf16, not fp32"),
        ({"switch": ((0, "bf16"),)}, "'bf16' begins at step 0; give samples after step 0 and before 1000, the en"),
        ({"switch": ((600, "fp8"), (540, "bf16"))}, "begins at step 9; give samples after step 10 and"),
        ({"switch": ((60_000, "bf16"),)}, "begins at step 1000; give samples after"),
        ({"rules": ("* forward: mxfp8 x bf16",)} | HIDDEN, "sum over 80 features, which 32 does not divide; set model"),
        ({"rules": ("* forward: bf16 x nvfp4+h32",)} | HIDDEN, "sum over 80 features, which 32 does not divide"),
    ]

    def ready(values):
        policy.require_rows(tiny(**values), 30)

    found = [(refusal(ready, values), want) for values, want in cases]
    assert [(said, want) for said, want in found if want not in said] == []
    for values in ({"rules": ("*.img_* *: mxfp8 x mxfp8",)}, {"preset": "fp8", "rules": PLAIN}):
        ready(values)


def test_stages_begin_at_the_step_that_reaches_their_samples():
    cfg = tiny(preset="nvfp4", rules=("*.txt_* *: bf16 x bf16",), switch=((601, "fp8_delayed"), (1200, "bf16")))
    first, second, last = stages = policy.stages(cfg)
    assert [stage[:2] for stage in stages] == [(0, "nvfp4"), (11, "fp8_delayed"), (20, "bf16")]
    ways = {layer: matmul_path(products) for layer, products in first.pairs.items()}
    assert ways["double_blocks.0.txt_attn.qkv"] == ways["single_blocks.1.linear1"] == "plain"
    assert ways["single_blocks.0.linear1"] == "blocks"
    assert [{*map(matmul_path, stage.pairs.values())} for stage in (second, last)] == [{"tensor"}, {"plain"}]
    assert policy.layers_with_delayed_scales(cfg) == list(second.pairs) and not policy.layers_gathered_in_fp8(cfg)
    assert (policy.narrowest_format(cfg), policy.narrowest_format(TINY)) == ("nvfp4", "bfloat16")
    mixed = tiny(preset="fp8", rules=("*.qkv grad_weight: bf16 x bf16", "last.* *: bf16 x bf16"))
    gathered = policy.layers_gathered_in_fp8(mixed)
    assert len(gathered) == 8 + 2 and "double_blocks.0.img_attn.qkv" in gathered
    assert policy.narrowest_format(mixed, "forward") == "fp8"
    for cfg in (tiny(preset="fp8", gather=False), tiny(preset="fp8", eval=False)):
        assert policy.layers_gathered_in_fp8(cfg) == [], "bf16 validation needs bf16 weights"
