"""Runs under a policy: stochastic rounding on several ranks, and switches to other presets."""

from pathlib import Path

import pytest
from conftest import require_identical
from lively_nets import whole
from precision_ranks import ROWS, fp8_config, lively_state, rounding, saved_after_two, saved_now, steps
from torch import Tensor

from flux_ref import checkpoint, config_file
from flux_ref.checkpoint import load
from flux_ref.config import Config
from flux_ref.ranks import World
from flux_ref.step_runner import State


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_runs_of_several_ranks_round_as_one_does_in_any_micro_batches(size, measured, world):
    """Two steps under mxfp6_fp4: the numbers of each sample and each weight are the same, and no two are."""
    alone = rounding(world, micro=6)
    model = fp8_config().model
    assert measured[size]["rounding"] == alone
    linears = 8 * model.double_blocks + 2 * model.single_blocks
    assert len(alone) == 2 * linears * (3 * ROWS + 1), "input, gradient in two products, and weight"
    assert len({crc for *_, crc in alone}) == len(alone)


def everything(state: State) -> dict[str, Tensor]:
    """Weights, history, and the moments of a parameter."""
    return whole(state.net) | {"history": state.arithmetic.history, "moment": state.opt.moments()["exp_avg"][0]}


def test_a_run_that_stops_before_at_or_after_its_switches_goes_on_bit_for_bit(world, tmp_path):
    """NVFP4 for four steps, delayed FP8 for two, then bf16. The state that goes on has taken other steps before."""
    switch = ((4 * ROWS, "fp8_delayed"), (6 * ROWS, "bf16"))
    own = {"precision__preset": "nvfp4", "precision__switch": switch, "precision__dynamic_steps": 1}
    cfg = fp8_config(run__dir=str(tmp_path), checkpoint__keep=3, train__max_samples=9 * ROWS, **own)
    state = lively_state(cfg, world)
    precision = state.arithmetic
    assert precision.phases == (0, 4, 5, 6), "no phase lies beyond its stage"
    assert [precision.stage(step).preset for step in (0, 3, 4, 9)] == ["nvfp4", "nvfp4", "fp8_delayed", "bf16"]
    losses = []
    ways = []
    for step in range(1, 9):
        ways.append({(linear.way, bool(linear.of_input.scales)) for linear in precision.linears})
        losses += steps(state, cfg, world, count=1)
        if step in (2, 4, 5):
            saved_now(state, cfg, world)
    plain = ("plain", False)  # the last block under NVFP4, and all blocks at the end
    assert ways == [{("blocks", False), plain}] * 4 + [{("tensor", False)}, {("tensor", True)}] + [{plain}] * 2
    for path, step in zip(checkpoint.list_checkpoints(tmp_path), (2, 4, 5), strict=True):
        other = lively_state(cfg, world)
        steps(other, cfg, world, count=8 - step)
        load(path, other)
        assert steps(other, cfg, world, count=8 - step) == losses[step:], step
        require_identical(everything(other), everything(state))
    never = config_file.replace(cfg, precision__switch=())
    assert steps(lively_state(never, world), never, world, count=8)[5:] != losses[5:]


def gone_on(world: World, run: str, cfg: Config) -> tuple[list[float], dict[str, Tensor]]:
    """What a state that has taken other steps computes from the checkpoint of a run on."""
    state = lively_state(cfg, world)
    steps(state, cfg, world, count=2)
    (path,) = checkpoint.list_checkpoints(Path(run))
    load(path, state)
    return steps(state, cfg, world, count=5), everything(state)


@pytest.mark.parametrize(("before", "after"), [("fp8", "fp8_delayed"), ("fp8_delayed", "nvfp4")])
def test_a_run_that_gets_or_loses_a_later_switch_is_the_run_that_always_was_so(world, tmp_path, before, after):
    """Saved after two steps, switched after four; delayed scales begin two steps later. Seven steps in all."""
    own = {"precision__preset": before, "precision__dynamic_steps": 2, "precision__history": 9}
    never = fp8_config(**own, train__max_samples=9 * ROWS, run__dir=str(tmp_path / "never"))
    always = config_file.replace(never, run__dir=str(tmp_path / "always"), precision__switch=((4 * ROWS, after),))
    results = {}
    for cfg in (never, always):
        state = saved_after_two(cfg, world)
        results[cfg] = steps(state, cfg, world, count=5), everything(state)
    assert results[never][0][2:] != results[always][0][2:]
    for mine, other in ((always, never), (never, always)):
        losses, left = gone_on(world, other.run.dir, mine)
        assert losses == results[mine][0]
        require_identical(left, results[mine][1])
