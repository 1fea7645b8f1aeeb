"""Compiled regions: the same numbers as eager, and one graph per kind of block and mode at any depth."""

import pytest
import torch
from conftest import MICRO

from flux_ref import config_file, ranks, schedule, sharding
from flux_ref.data import synthetic
from flux_ref.speed import regions
from flux_ref.step import Health, State, train_step, validation_step, warm_up

pytestmark = pytest.mark.slow


def run(**overrides):
    """Losses of two training steps and the sums of a validation step, on synthetic data."""
    cfg = config_file.replace(config_file.load(MICRO), model__double_blocks=4, model__single_blocks=6, **overrides)
    world = ranks.start(cfg.parallel)
    try:
        net = sharding.build(cfg, world, seed=3)
        state = State.of(net, cfg, world)
        state.opt.lr.fill_(1e-2)
        batch = synthetic(cfg.model, cfg.train.global_batch)
        health = Health(world.device)
        losses = [float(train_step(state, batch, health, cfg)[0]) for _ in range(3)]
        sums = torch.zeros(3, schedule.TIMESTEPS, dtype=torch.float64)
        validation_step(net, batch, sums, cfg)
        return losses, sums
    finally:
        ranks.stop()


@pytest.mark.parametrize("region_blocks", [1, 2])
def test_compiled_equals_eager_with_four_graphs(region_blocks):
    eager_losses, eager_sums = run(parallel__region_blocks=region_blocks)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses, sums = run(parallel__region_blocks=region_blocks, parallel__compile=True)
    assert losses == pytest.approx(eager_losses, rel=1e-5)
    assert losses[0] != losses[-1]
    torch.testing.assert_close(sums, eager_sums, rtol=1e-5, atol=0)
    # Double and single regions, with and without gradients; depth adds none.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    assert not torch._dynamo.utils.counters["graph_break"]


def test_a_new_shape_after_the_warm_up_is_an_error_and_pictures_are_drawn_all_the_same():
    cfg = config_file.replace(config_file.load(MICRO), parallel__compile=True)
    world = ranks.start(cfg.parallel)
    try:
        net = sharding.build(cfg, world, seed=3)
        state = State.of(net, cfg, world)
        batch, val_batch = (synthetic(cfg.model, rows) for rows in (12, 8))
        warm_up(state, batch, val_batch, cfg)
        train_step(state, batch, Health(world.device), cfg)
        sums = torch.zeros(3, schedule.TIMESTEPS, dtype=torch.float64)
        validation_step(net, val_batch, sums, cfg)
        with regions.uncompiled(cfg.parallel):
            validation_step(net, synthetic(cfg.model, 3), sums, cfg)
        with pytest.raises(RuntimeError, match="recompile"):
            validation_step(net, synthetic(cfg.model, 5), sums, cfg)
    finally:
        torch.compiler.set_stance("default")
        ranks.stop()


@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_a_smaller_activation_budget_changes_no_number(budget):
    eager, _ = run()
    torch._dynamo.reset()
    losses, _ = run(parallel__compile=True, parallel__activation_budget=budget)
    assert losses == pytest.approx(eager, rel=1e-5)
