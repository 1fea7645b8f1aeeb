"""Runs under a policy: stochastic rounding on several ranks, and switches to other presets."""

import pytest
from conftest import require_identical
from lively_nets import whole
from precision_ranks import FACTS, ROWS, fp8_config, lively_state, rounding, steps

from flux_ref import checkpoint, config_file
from flux_ref.formats import checkpoint_files
from flux_ref.run import resuming


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_runs_of_several_ranks_round_as_one_does_in_any_micro_batches(size, measured, world):
    """Two steps under mxfp6_fp4: the numbers of each sample and each weight are the same, and no two are."""
    alone = rounding(world, micro=6)
    model = fp8_config().model
    assert measured[size]["rounding"] == alone
    linears = 8 * model.double_blocks + 2 * model.single_blocks
    assert len(alone) == 2 * linears * (3 * ROWS + 1), "input, gradient in two products, and weight"
    assert len({crc for *_, crc in alone}) == len(alone)


def test_a_run_that_stops_before_at_or_after_its_switches_goes_on_bit_for_bit(world, tmp_path):
    """NVFP4 for four steps, delayed FP8 for two, then bf16. The state that goes on has taken other steps before."""
    switch = ((4 * ROWS, "fp8_delayed"), (6 * ROWS, "bf16"))
    own = {"precision__preset": "nvfp4", "precision__switch": switch, "precision__dynamic_steps": 1}
    cfg = fp8_config(run__dir=str(tmp_path), checkpoint__keep=3, train__max_samples=9 * ROWS, **own)
    state = lively_state(cfg, world)
    precision = state.precision
    assert precision.phases == (0, 4, 5, 6), "no phase lies beyond its stage"
    assert [precision.stage(step).preset for step in (0, 3, 4, 9)] == ["nvfp4", "nvfp4", "fp8_delayed", "bf16"]
    losses = []
    ways = []
    for step in range(1, 9):
        ways.append({(linear.way, linear.is_delayed) for linear in precision.linears})
        losses += steps(state, cfg, world, count=1)
        if step in (2, 4, 5):
            saver = checkpoint.Saver(cfg, world, FACTS, lambda line: None)
            saver.save(state, {})
            saver.finish()
    plain = ("plain", False)  # the last block under NVFP4, and all blocks at the end
    assert ways == [{("blocks", False), plain}] * 4 + [{("tensor", False)}, {("tensor", True)}] + [{plain}] * 2
    for path, step in zip(checkpoint_files.list_checkpoints(tmp_path), (2, 4, 5), strict=True):
        other = lively_state(cfg, world)
        steps(other, cfg, world, count=8 - step)
        resuming.load_progress(resuming.load_weights(path, other, cfg, FACTS), other)
        assert steps(other, cfg, world, count=8 - step) == losses[step:], step
        require_identical(
            whole(other.net) | {"history": other.precision.history}, whole(state.net) | {"history": precision.history}
        )
    never = config_file.replace(cfg, precision__switch=())
    assert steps(lively_state(never, world), never, world, count=8)[5:] != losses[5:]
