"""Regions: recomputing, prefetching and compiling change no number; what cannot be is refused."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import micro_config

from bench.fake_ranks import fake_world
from flux_ref import schedule, sharding, trainer
from flux_ref.dataloader import synthetic
from flux_ref.model import SingleStreamBlock
from flux_ref.trainer import Health, TrainState, train_step, validation_step


def deep(**values):
    return micro_config(model__double_blocks=4, model__single_blocks=6, **values)


def steps(world, cfg):
    """The losses of three training steps and the sums of a validation step, on synthetic data."""
    state = TrainState(sharding.build(cfg, world, seed=3), cfg, world)
    batch = synthetic(cfg.model, cfg.train.global_batch)
    state.opt.lr.fill_(1e-2)
    health = Health(world.device)
    sums = torch.zeros(2, schedule.TIMESTEPS, dtype=torch.float64)
    losses = [float(train_step(state.net, state.opt, batch, health, cfg)[0]) for _ in range(3)]
    validation_step(state.net, batch, sums, cfg)
    assert losses[0] != losses[-1]
    return losses, sums.tolist()


def test_recomputing_and_keeping_change_no_bit_and_recomputing_calls_every_block_once_more(world, monkeypatch):
    calls = []
    forward = SingleStreamBlock.forward
    monkeypatch.setattr(SingleStreamBlock, "forward", lambda *args: calls.append(0) or forward(*args))
    levers = {"compute__activation_checkpointing": ("block",), "parallel__kept_regions": (1, -1)}
    same = {"parallel__region_blocks": 2, "model__single_blocks": 3}
    want = steps(world, micro_config(**same))
    for key, value in ((key, value) for key, values in levers.items() for value in values):
        calls.clear()
        found = steps(world, micro_config(**same, **{key: value}))
        passes = (
            7 if key == "compute__activation_checkpointing" else 4
        )  # of three training steps and one validation step
        assert found == want and len(calls) == 3 * passes, (key, value)


class Noted:
    """A collective of FSDP2 that is only written down."""

    def __init__(self, log, what):
        self.log, self.what = log, what

    def allocate(self, size, *, dtype, device):
        return torch.zeros(*size, dtype=dtype, device=device)

    def __call__(self, *args, **options):
        self.log.append(self.what)


def collectives(kept):
    """What a rank of four asks of FSDP2 in a step: to gather or to reduce, in this order."""
    cfg = deep(parallel__kept_regions=kept)
    log = []
    with fake_world(4) as four:
        state = TrainState(sharding.build(cfg, four, seed=None), cfg, four)
        for unit in (*state.net.double_blocks, *state.net.single_blocks):
            unit.set_custom_all_gather(Noted(log, "gather"))
            unit.set_custom_reduce_scatter(Noted(log, "reduce"))
        train_step(state.net, state.opt, synthetic(cfg.model, cfg.train.global_batch // 4), Health(four.device), cfg)
    return log


def test_replicas_reduce_once_a_step_with_the_last_micro_batch(world, monkeypatch):
    cfg = micro_config(train__micro_batch=4)
    state = TrainState(sharding.build(cfg, world, seed=3), cfg, world)
    asked = []
    monkeypatch.setattr(type(state.net), "set_requires_all_reduce", lambda net, is_asked: asked.append(is_asked))
    train_step(state.net, state.opt, synthetic(cfg.model, cfg.train.global_batch), Health(world.device), cfg)
    assert asked == [False, False, True]


def test_levers_reach_fsdp():
    """Ten regions are gathered in forward; the first reduction waits for the gathers of backward before it."""
    logs = [collectives(kept) for kept in (0, 4, -1)]
    assert [log.index("reduce") - 10 for log in logs] == [2, 0, 0]
    assert [len(log) for log in logs] == [30, 26, 20]


@pytest.mark.parametrize(
    "values",
    [
        {"compute__activation_memory_budget": 0.5},
        {"parallel__region_blocks": 2},
        {"compute__activation_memory_budget": 0.0},
    ],
)
@pytest.mark.nightly
def test_compiled_equals_eager_with_four_graphs(world, values):
    """One graph each for double and single regions, with and without gradients. Depth adds none."""
    want, want_sums = steps(world, deep(parallel__region_blocks=values.get("parallel__region_blocks", 1)))
    torch._dynamo.utils.counters.clear()
    losses, sums = steps(world, deep(**values, compute__compile=True))
    assert losses == pytest.approx(want, rel=1e-5)
    torch.testing.assert_close(torch.tensor(sums), torch.tensor(want_sums), rtol=1e-5, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_a_new_shape_after_the_warm_up_is_an_error_and_pictures_are_drawn_all_the_same(world):
    losses = []
    for compiled in (False, True):
        cfg = micro_config(compute__compile=compiled)
        state = TrainState(sharding.build(cfg, world, seed=3), cfg, world)
        runner = trainer.Trainer(state, cfg, world)
        runner.warm_up()
        runner.train()
        losses.append(runner.health.loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    sums = torch.zeros_like(runner.sums)
    runner.validate()
    with torch.compiler.set_stance("force_eager"):  # as the artist does
        validation_step(state.net, synthetic(cfg.model, 3), sums, cfg)
    with pytest.raises(RuntimeError, match="recompile"):
        validation_step(state.net, synthetic(cfg.model, 5), sums, cfg)


def test_settings_of_the_compiler_hold_in_every_thread(world):
    """torch 2.12 and later keep what is assigned in one thread only. Autograd's threads of devices are others, too."""

    def settings():
        return torch._dynamo.config.recompile_limit, torch._functorch.config.activation_memory_budget

    compiled = torch.compile(torch.sin, fullgraph=True, dynamic=False, backend="eager")
    sharding.compile_all(
        [], micro_config(compute__compile=True, compute__activation_memory_budget=0.5), world.device, {}
    )
    with ThreadPoolExecutor(1) as elsewhere:
        assert elsewhere.submit(settings).result() == settings() == (sharding.RECOMPILE_LIMIT, 0.5)
        shapes = [torch.ones(size) for size in range(2, 14)]
        assert all(map(torch.equal, elsewhere.map(compiled, shapes), map(torch.sin, shapes)))
