"""The census against products worked out by numpy and torch's own FP8; blame against planted culprits."""

import dataclasses
import itertools
import json
import math
import re
import tomllib

import numpy as np
import pytest
import torch
from lively_nets import lively
from safetensors.torch import save_file

from flux_ref import config_file, data, flow
from flux_ref.model import parameter_table
from flux_ref.run import weight_files
from flux_ref.speed import casts, policy
from flux_ref.speed.layers import layers
from flux_ref.speed.number_formats import E5M2, Format, Scaling
from flux_ref.speed.sides import PRODUCTS
from tools.census import commands, products
from tools.weights import exports

SAMPLES = 32  # so that all numbers of tokens are divisible by blocks
MOST = 2 * math.log2(66) + 10  # evaluations for one culprit among 66 products
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@pytest.fixture(scope="module")
def cfg(micro):
    return config_file.replace(micro, model__hidden=32, model__heads=4)


@pytest.fixture(scope="module")
def checkpoint(cfg, tmp_path_factory):
    folder = tmp_path_factory.mktemp("census")
    save_file({name: lively(name, shape) for name, shape in parameter_table(cfg.model).items()}, folder / "w")
    exports.import_(weight_files.open_source(folder / "w", cfg.model), cfg, folder / "checkpoint")
    return folder / "checkpoint"


@pytest.fixture
def prepared(cfg, checkpoint):
    return products.prepared(weight_files.open_source(checkpoint, cfg.model), cfg, SAMPLES)


@pytest.fixture
def low(cfg):
    """A config with these rules and keys, and the sides of all products, which a test may change."""

    def of(*rules, **keys):
        own = config_file.replace(cfg, parallel__dtype="bf16", precision__rules=list(rules), **keys)
        return own, {layer: dict(products) for layer, products in policy.stages(own)[0].pairs.items()}

    return of


def test_the_sides_are_those_of_the_step(cfg, prepared):
    """Gradient of weight, from the sides, is what autograd left in the weight; the inputs and weights fit."""
    net, batch = prepared
    sides = products.sides(net, batch)
    assert products.gradients(net, batch)[0] == pytest.approx(flow.losses(net, batch, torch.bfloat16).mean().item())
    wrong = []
    for module, layer in layers(cfg.model).items():
        linear = net.get_submodule(module)
        (x, w), (g, turned_w), (turned_g, turned_x) = (sides[layer.name, product] for product in PRODUCTS)
        want = linear.weight.grad.float()
        error = (g.t().float() @ x.float() - want).norm() / want.norm()
        pairs = ((w, linear.weight), (turned_w, w.t()), (turned_x, x.t()), (turned_g, g.t()))
        if error >= 0.01 or not all(torch.equal(side, other) for side, other in pairs):
            wrong.append((layer, error))
    assert not wrong and len(sides) == 3 * len(layers(cfg.model)) == 66


def test_the_samples_are_those_that_the_run_trains_on_next(cfg, checkpoint):
    """Those of the run's own feed, in its order, with its draws."""
    source = weight_files.open_source(checkpoint, cfg.model)
    source = dataclasses.replace(source, info=source.info | {"samples": 36})
    own = data.TrainSet(cfg, 0, 1, False)
    own.open()
    feed = own.feed(36)
    rows = feed.take().tensors
    _, batch = products.prepared(source, cfg, cfg.train.global_batch)
    assert [name for name, tensor in batch.items() if not torch.equal(tensor, rows[name])] == []
    feed.close()


def as_mxfp4(x: np.ndarray) -> tuple[np.ndarray, float]:
    """Each 32 neighbours in e2m1 with a scale from the text of MX, and the share of values beyond its largest."""
    blocks = x.reshape(len(x), -1, 32)
    unit = 2.0 ** (np.floor(np.log2(np.abs(blocks).max(-1, keepdims=True))) - 2)
    steps = np.abs(blocks / unit)
    nearest = E2M1[np.abs(np.minimum(steps, 6)[..., None] - E2M1).argmin(-1)]
    return (np.sign(blocks) * nearest * unit).reshape(x.shape), (steps > 7).mean()


def as_e4m3(x: np.ndarray) -> tuple[np.ndarray, float]:
    scale = 448 / np.abs(x).max()
    return torch.from_numpy(x * scale).float().to(torch.float8_e4m3fn).double().numpy() / scale, 0.0


def test_numbers_are_those_of_a_direct_computation(low, prepared):
    """What is not cast stays as it is."""
    sides = products.sides(*prepared)
    _, found = low("double.* grad_input: mxfp4 x bf16", "single.* forward: e4m3 x e4m3")
    records = list(products.census(sides, found, 0, "x"))
    assert len(records) == 16 + 6
    wrong = []
    for record in records:
        left, right = (side.double().numpy() for side in sides[record["layer"], record["product"]])
        if record["product"] == "grad_input":
            (cast, over), other = as_mxfp4(left), right
            assert over > 1e-3
        else:
            (cast, over), (other, _) = as_e4m3(left), as_e4m3(right)
        want = left @ right.T
        expected = {
            "left_overflow": over,
            "right_overflow": 0,
            "left_zeros": ((cast == 0) & (left != 0)).mean(),
            "right_zeros": ((other == 0) & (right != 0)).mean(),
            "left_largest": np.abs(left).max(),
            "right_smallest": np.abs(right[right != 0]).min(),
            "error": np.linalg.norm(cast @ other.T - want) / np.linalg.norm(want),
        }
        if {key: record[key] for key in expected} != pytest.approx(expected, rel=0.01):
            wrong.append((record, expected))
    assert not wrong


def test_the_command_shows_what_fits_and_says_what_does_not(checkpoint, tmp_path, capsys):
    """16 samples of 9 and of 6 tokens make blocks of 16 for gradients of weights, and none of 32."""
    out = tmp_path / "census.json"
    assert commands.main([str(checkpoint), "--samples=16", f"--json={out}"]) == 0
    text = capsys.readouterr().out
    figures = json.loads(out.read_text())
    presets = ["fp8", "nvfp4"]  # blocks of 16
    assert sorted({record["preset"] for record in figures["products"]}) == presets
    assert sorted([*figures["misfits"], *presets]) == sorted(commands.ALL)
    for name, why in figures["misfits"].items():
        assert f"\n{name} does not fit: {why}" in text and "cannot sum over 144 tokens" in why
    worst = max(figures["products"], key=lambda record: record["error"])
    assert f"loses most: {worst['product']} of {worst['layer']} under {worst['preset']}, error" in text.splitlines()[-1]
    lines = text.splitlines()
    assert lines[0].endswith(", 16 samples") and lines[1].split()[:4] == ["layers", "product", *presets]
    assert f"{out} holds every product; {tmp_path}/census.svg shows the errors by block" in lines
    picture = (tmp_path / "census.svg").read_text()
    assert picture.count("<rect") == len(figures["products"])
    assert picture.count(">double.0.img.qkv forward: ") == 2


def test_a_line_is_the_worst_block_and_a_column_is_a_block():
    errors = {"double.0.img.qkv": 0.5, "double.1.img.qkv": 0.02, "single.0.linear1": 0.1, "single.1.linear1": math.inf}
    facts = {f"{place}_{fact}": 0.25 for place in ("left", "right") for fact in products.FACTS}
    names = {"preset": "fp8", "product": "forward"}
    records = [{"layer": layer, "error": error, **names, **facts} for layer, error in errors.items()]
    rows = commands.rows_of(records, 2)
    assert [line.split()[1:5] for line in commands.table(rows).splitlines()[1:]] == [
        ["double.img.qkv", "forward", "0", "0.5"],
        ["single.linear1", "forward", "1", "inf"],
    ]
    cells = re.findall(r'<rect x="(\d+)" y="(\d+)".* fill="(.+?)"><title>(\S+)', commands.picture(rows))
    columns, lines, colours, layers = zip(*cells)
    assert list(layers) == list(errors)
    assert [int(x) for x in columns] == [commands.LEFT + commands.CELL * block for block in range(4)]
    assert len(set(lines)) == 2 and len(set(colours)) == 4 and colours[3] == "red"


def test_what_cannot_be_is_refused_in_one_line(checkpoint, capsys):
    wrong = []
    for options, reason in (
        ("--preset=mxfp8 --samples=31", "grad_weight: mxfp8 x mxfp8: mxfp8 cannot sum over 186 tokens"),
        ("--samples=31", "cannot sum over 186 tokens"),
        ("--blame", "give --preset=NAME"),
        ("--blame --precision.switch=[[12,'fp8']]", "casts no product"),  # at step 0
        ("--preset=fp8 --bound=0.5", "is for --blame"),
        ("--preset=fp9", "'fp9'"),
        ("--data.train=nowhere", "nowhere"),
    ):
        code = commands.main([str(checkpoint), *options.split()])
        line = capsys.readouterr().err
        if code != 2 or reason not in line or line.count("\n") != 1:
            wrong.append((options, code, line))
    assert not wrong


def test_culprits_are_found_at_every_place_and_no_more_than_needed():
    """Of three culprits together, one suffices: without it the samples go well."""
    cases = [(count, {bad}, any) for count in (1, 2, 3, 7, 33, 684) for bad in range(count)]
    triples = [set(bad) for bad in itertools.combinations(range(9), 3)]
    cases += [(9, bad, needed) for bad in triples for needed in (any, all)]
    cases += [(684, set(), any), (5, {0, 1, 2, 3, 4}, any)]
    wrong = []
    for count, bad, needed in cases:
        calls = []

        def goes_wrong(active, bad=bad, needed=needed, calls=calls):
            calls.append(active)
            return needed(one in active for one in bad)

        found = set(products.culprits(range(count), goes_wrong))
        is_least = found == bad if needed is any else len(found) == 1 and found < bad
        if not is_least or len(calls) > len(bad) * (math.ceil(math.log2(count)) + 1) + 1:
            wrong.append((count, bad, needed, found, calls))
    assert not wrong


def test_blame_names_a_layer_whose_scale_is_broken(low, prepared, monkeypatch, capsys):
    """Scales of infinity for one side of 132: the loss or the gradient is not finite."""
    scaled = casts.scaled

    def broken(x, form, scaling, chance=None):
        values, scales, whole = scaled(x, form, scaling, chance)
        return values, scales * (math.inf if scaling.rule == "floor" else 1), whole

    monkeypatch.setattr(casts, "scaled", broken)
    own, found = low("* *: mxfp8 x mxfp8")
    pairs = found["double.1.txt.mlp_in"]
    left, right = pairs["grad_weight"]
    pairs["grad_weight"] = dataclasses.replace(left, scaling=Scaling("floor", 1, 32)), right
    records = list(products.census(products.sides(*prepared), found, 0, "planted"))
    assert [record["layer"] for record in records if record["error"] == math.inf] == ["double.1.txt.mlp_in"]
    (bad,), calls = products.blame(*prepared, own, found, records, 1e9)
    assert (bad["layer"], bad["product"]) == ("double.1.txt.mlp_in", "grad_weight")
    assert calls <= MOST
    assert re.search("66 products cast: .*gradient error nan, wrong", capsys.readouterr().err)


def test_the_rules_that_blame_prints_keep_the_products_in_bf16(cfg, checkpoint, monkeypatch, capsys):
    monkeypatch.setattr(products, "blame", lambda *args: (args[4][3:5], 7))
    argv = [str(checkpoint), f"--samples={SAMPLES}", "--blame", "--preset=mxfp8"]
    assert commands.main(argv) == 0
    head, _, toml = capsys.readouterr().out.partition("\n")
    assert head == "2 of 66 products return to bf16; evaluations: 7"
    rules = tomllib.loads(toml)["precision"]["rules"]
    own = config_file.replace(cfg, parallel__dtype="bf16", precision__preset="mxfp8", precision__rules=rules)
    kept = []
    for layer, pairs in policy.stages(own)[0].pairs.items():
        kept += [f"{layer} {product}" for product, pair in pairs.items() if pair == products.BF16]
    assert kept == [rule.partition(":")[0] for rule in rules] and len(rules) == 2


def test_blame_casts_parts_of_a_policy_and_delayed_sides(low, prepared):
    """Two of three products could be taken together in FP8, which a linear is only made for if it needs to.

    No history of scales is read: delayed sides take their own magnitude. Scales of 1 would let small gradients vanish.
    """
    rules = ("* forward: e4m3 x e4m3", "* grad_input: e5m2 x e4m3", "* grad_weight: mxfp8 x mxfp8")
    delayed = low(precision__preset="fp8_delayed", precision__dynamic_steps=0)
    for (own, found), parts, weight, bound in ((low(*rules), PRODUCTS[:2], 1.0, 0.5), (delayed, PRODUCTS, 1e-6, 0.2)):
        prepared[1]["weight"].fill_(weight)
        records = [{"layer": layer, "product": product, "error": 0.1} for layer in found for product in parts]
        assert products.blame(*prepared, own, found, records, bound) == ([], 1)


def test_blame_names_a_product_in_e5m2_that_needs_e4m3(low, prepared):
    """All products but one are in a fine format. The bound allows that one to be in e4m3, but not in e5m2."""
    own, found = low("* *: mxfp8 x mxfp8")
    one = found["single.1.linear2"]
    sides = products.sides(*prepared)
    e4m3 = one["forward"][0]
    e5m2, fine = (dataclasses.replace(e4m3, form=form) for form in (E5M2, Format("e5m10", 5, 10, 15, 65504.0)))
    for pairs in found.values():
        pairs |= dict.fromkeys(PRODUCTS, (fine, fine))
    for side, want in ((e4m3, []), (e5m2, [("single.1.linear2", "forward")])):
        one["forward"] = side, side
        records = list(products.census(sides, found, 0, "planted"))
        bad, calls = products.blame(*prepared, own, found, records, 0.016)
        assert [(record["layer"], record["product"]) for record in bad] == want
        assert calls <= MOST and len(records) == 66
