"""Runs under a policy: stochastic rounding on several ranks, and switches to other presets."""

from pathlib import Path

import pytest
from conftest import require_identical
from lively_nets import whole
from precision_ranks import BLOCKS, ROWS, fp8_config, lively_state, rounding, saved_now, steps

from flux_ref import checkpoint, config_file
from flux_ref.checkpoint import load


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_runs_of_several_ranks_round_as_one_does_in_any_micro_batches(size, measured, world):
    """Two steps under mxfp6_fp4: the numbers of each sample and each weight are the same, and no two are."""
    alone = rounding(world, micro=6)
    model = fp8_config(**BLOCKS).model
    assert measured[size]["rounding"] == alone
    linears = 8 * model.double_blocks + 2 * model.single_blocks
    assert len(alone) == 2 * linears * (3 * ROWS + 1), "input, gradient in two products, and weight"
    assert len({crc for *_, crc in alone}) == len(alone)


def everything(state):
    """Weights, history, and the moments of a parameter."""
    return whole(state.net) | {"history": state.recipe.history, "moment": state.opt.states()["exp_avg"][0]}


@pytest.mark.parametrize("preset", ["fp8", pytest.param("nvfp4", marks=pytest.mark.slow)])
def test_a_run_that_stops_before_at_or_after_its_switches_goes_on_bit_for_bit(world, tmp_path, preset):
    """Also from the checkpoint of a run that did not know of them. The state that goes on has taken other steps."""
    switch = ((4 * ROWS, "fp8_delayed"), (6 * ROWS, "bf16"))
    own = {"precision__preset": preset, "precision__dynamic_steps": 1, "precision__history": 9}
    never = fp8_config(run__dir=str(tmp_path / "never"), train__max_samples=9 * ROWS, **own)
    cfg = config_file.replace(never, run__dir=str(tmp_path / "run"), precision__switch=switch)
    runs = {}
    for one, saves in ((never, [2]), (cfg, [2, 4, 5])):
        state = lively_state(one, world)
        losses = []
        for step in range(1, 9):
            losses += steps(state, one, world, count=1)
            if step in saves:
                saved_now(state, one, world)
        runs[one] = losses, everything(state)
    precision = state.recipe
    assert precision.phases == (0, 4, 5, 6), "no phase lies beyond its stage"
    assert [precision.modes[precision.phase(step)][0].preset for step in (0, 3, 4, 9)] == [
        preset,
        preset,
        "fp8_delayed",
        "bf16",
    ]
    assert runs[never][0][:4] == runs[cfg][0][:4] and runs[never][0][4:] != runs[cfg][0][4:]
    saved = {one: checkpoint.list_checkpoints(Path(one.run.dir)) for one in runs}
    for one, path in ((never, saved[cfg][0]), (cfg, saved[never][0]), *((cfg, path) for path in saved[cfg])):
        other = lively_state(one, world)
        steps(other, one, world, count=3)
        load(path, other)
        losses, left = runs[one]
        assert steps(other, one, world, count=8 - (begin := other.step)) == losses[begin:], path
        require_identical(everything(other), left)
