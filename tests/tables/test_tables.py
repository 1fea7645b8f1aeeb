"""The tables: complete, equal to the committed page, and true of the code that runs."""

from math import prod

import pytest
import torch
from tables import page as tables

from flux_ref import config_file, optim, ranks, sharding
from flux_ref.arithmetic import arithmetic_of
from flux_ref.model import parameter_table
from flux_ref.precision.linear import PolicyLinear


@pytest.fixture(scope="module")
def parameters():
    """The rows of the table of parameters, as the committed page has them."""
    text = tables.page()
    assert text == tables.PAGE.read_text(), "run PYTHONPATH=. python tests/tables/page.py"
    section = text.split("## Parameters\n")[1].split("\n## ")[0]
    table = [line.strip("|").split(" | ") for line in section.splitlines() if line[:1] == "|"]
    return [[cell.strip() for cell in row] for row in table[2:]]


def test_parameters_are_all_there(parameters):
    shapes = parameter_table(tables.BENCHMARK.model)
    sizes = [int(row[1]) * prod(map(int, row[2].split(" x "))) for row in parameters]
    assert sum(sizes) == sum(map(prod, shapes.values())) == 11_891_178_560
    assert sum(int(row[1]) for row in parameters) == len(shapes) == 776
    names = {row[0].strip("`"): row[2] for row in parameters}
    assert {tables._fold(name): " x ".join(map(str, shape)) for name, shape in shapes.items()} == names


def test_parameters_are_built_as_the_table_says(parameters, micro):
    """Init, dtype, decay, shard axis and FP8 of a real net."""
    rows_by_name = {row[0].strip("`"): row for row in parameters}
    world = ranks.start(micro.parallel)
    try:
        wide = {"model__hidden": 32, "model__heads": 2, "model__rope_axes": (4, 6, 6)}
        cfg = config_file.replace(micro, precision__preset="fp8", parallel__dtype="bf16", **wide)
        net = sharding.build(cfg, world, 3, arithmetic_of(cfg))
        opt = optim.ShardedAdamW(net, cfg, world)
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
