"""The tables: complete, equal to the committed page, and true of the code that runs."""

import re
from math import ceil, prod

import pytest
import torch
from tables import page as tables
from torch import nn

from flux_ref import config_file, optim, ranks, sharding
from flux_ref.model import parameter_table
from flux_ref.speed.linear import PolicyLinear


@pytest.fixture(scope="module")
def page():
    """The sections of the page, by their headings."""
    text = tables.page()
    assert text == tables.PAGE.read_text(), "run PYTHONPATH=. python tests/tables/page.py"
    return {heading: text.split(f"## {heading}\n")[1].split("\n## ")[0] for heading in tables.TABLES}


def rows(text, columns):
    """The rows of the tables with so many columns, without their headers."""
    table = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in table if len(row) == columns][2:]


def test_parameters_are_all_there(page):
    table = rows(page["Parameters"], 6)
    shapes = parameter_table(tables.BENCHMARK.model)
    assert sum(int(row[1]) for row in table) == len(shapes) == 776
    sizes = [int(row[1]) * prod(map(int, row[2].split(" x "))) for row in table]
    assert sum(sizes) == sum(map(prod, shapes.values())) == 11_891_178_560
    assert "776 tensors, 11,891,178,560 parameters" in page["Parameters"]
    for name, shape in shapes.items():
        (row,) = [row for row in table if re.fullmatch(re.escape(row[0].strip("`")).replace(r"\*", r"\d+"), name)]
        assert row[2] == " x ".join(map(str, shape))


def test_parameters_are_built_as_the_table_says(page, micro):
    """Init, dtype, decay, shard axis and FP8 of a real net."""
    rows_by_name = {row[0].strip("`"): row for row in rows(page["Parameters"], 6)}
    world = ranks.start(micro.parallel)
    try:
        wide = {"model__hidden": 32, "model__heads": 2, "model__rope_axes": (4, 6, 6)}
        cfg = config_file.replace(micro, precision__preset="fp8", parallel__dtype="bf16", **wide)
        net = sharding.build(cfg, world, seed=3)
        opt = optim.ShardedAdamW(net, cfg.optim, world)
        assert {group["weight_decay"] for group in opt.adamw.param_groups} == {tables.BENCHMARK.optim.weight_decay}
        converted = {id(module.weight) for module in net.modules() if isinstance(module, PolicyLinear)}
        for name, parameter in sharding.named_parameters(net).items():
            _, _, _, start, is_fp8, _ = rows_by_name[tables._fold(name)]
            values, kind = parameter.to_local().detach(), start.split()[0]
            assert (parameter.dtype, parameter.placements[-1].dim) == (torch.float32, 0), name
            assert (is_fp8 == "yes") == (id(parameter) in converted), name
            if kind in ("zeros", "ones"):
                assert (values == (kind == "ones")).all(), name
            else:  # a uniform distribution's deviation is its half-width over the root of 3
                want = 0.02 if kind == "normal" else values.abs().max().item() / 3**0.5
                assert 0 < values.std().item() == pytest.approx(want, rel=0.2), name
    finally:
        ranks.stop()


def test_widths_of_the_uniform_ones_are_xaviers(page):
    with torch.device("cpu"):
        for row in rows(page["Parameters"], 6):
            if row[3].startswith("uniform") and int(row[1]) == 1:
                weight = nn.init.xavier_uniform_(torch.empty(*map(int, row[2].split(" x "))))
                assert float(row[3].split()[1]) == pytest.approx(weight.abs().max().item(), rel=1e-3)


def test_operations_add_up(page):
    table = rows(page["Operations"], 5)
    total = sum(int(row[1]) * (float(row[3]) + float(row[4])) for row in table)
    assert total == pytest.approx(20_413.7, rel=1e-3)


def test_communication_is_the_formulas(page):
    """By hand, from the shapes alone."""
    shapes = parameter_table(tables.BENCHMARK.model)
    for size, mesh, padding, gather, kept, scatter, reduce in rows(page["Communication"], 7):
        r, n = map(int, mesh.split(" x "))
        assert r * n == int(size)
        padded = {name: n * ceil(shape[0] / n) * prod(shape[1:]) for name, shape in shapes.items()}
        W, E = sum(padded.values()), sum(size for name, size in padded.items() if "blocks." not in name)
        assert int(padding.replace(",", "")) == W - 11_891_178_560
        for figure, want in (
            (gather, 2 * (2 * W - E) * (n - 1) / n),
            (kept, 2 * W * (n - 1) / n),
            (scatter, 4 * W * (n - 1) / n),
            (reduce, 8 * W / n * (r - 1) / r),
        ):
            assert float(figure) == pytest.approx(want / 1e9, abs=0.006)


def test_log_keys_follow_the_ruleset(page):
    table = rows(page["Keys of the benchmark's log"], 7)
    keys = [row[0].strip("`") for row in table]
    landmarks = ["init_start", "submission_benchmark", "global_batch_size", "evaluation_frequency", "init_stop"]
    landmarks += ["run_start", "block_start", "block_stop", "eval_start", "eval_accuracy", "eval_stop", "run_stop"]
    assert [key for key in keys if key in landmarks] == landmarks
    only_later = {row[0].strip("`") for row in table if row[4:] == ["", "yes", "yes"]}
    assert "micro_batch_size" in only_later and "seed" not in only_later
    assert all(row[4:] in (["yes"] * 3, ["", "yes", "yes"]) for row in table)
