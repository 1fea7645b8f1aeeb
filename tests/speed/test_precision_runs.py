"""Runs under a policy: stochastic rounding on several ranks, and a switch to another preset."""

import pytest
from conftest import require_identical
from lively_nets import whole
from precision_ranks import FACTS, ROWS, fp8_config, lively_state, rounding, steps

from flux_ref import checkpoint, config, config_file, ranks
from flux_ref.formats import checkpoint_files
from flux_ref.run import resuming


@pytest.fixture
def world():
    yield ranks.start(config.ParallelConfig())
    ranks.stop()


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_runs_of_several_ranks_round_as_one_does_in_any_micro_batches(size, measured, world):
    """Two steps under mxfp6_fp4: the numbers of each sample and each weight are the same, and no two are."""
    alone, model = rounding(world, micro=6), fp8_config().model
    assert measured[size]["rounding"] == alone
    linears = 8 * model.double_blocks + 2 * model.single_blocks
    assert len(alone) == 2 * linears * (3 * ROWS + 1), "input, gradient in two products, and weight"
    assert len({crc for *_, crc in alone}) == len(alone)


def test_a_healing_run_that_stops_before_at_or_after_its_switch_goes_on_bit_for_bit(world, tmp_path):
    """NVFP4 for four steps, then bf16. The state that goes on has taken other steps before."""
    switch = {"precision__preset": "nvfp4", "precision__switch": ((4 * ROWS, "bf16"),)}
    cfg = fp8_config(run__dir=str(tmp_path), checkpoint__keep=3, **switch)
    state, losses, ways = lively_state(cfg, world), [], []
    for step in range(8):
        ways.append({linear.way for linear in state.precision.linears})
        losses += steps(state, cfg, world, count=1)
        if step + 1 in (2, 4, 6):
            saver = checkpoint.Saver(cfg, world, FACTS, lambda line: None)
            saver.save(state, {})
            saver.finish()
    assert ways == 4 * [{"blocks"}] + 4 * [{"plain"}] and state.precision.phases == (0, 4)
    assert [state.precision.stage(step).preset for step in (0, 3, 4, 9)] == ["nvfp4", "nvfp4", "bf16", "bf16"]
    for path, step in zip(checkpoint_files.list_checkpoints(tmp_path), (2, 4, 6), strict=True):
        other = lively_state(cfg, world)
        steps(other, cfg, world, count=8 - step)
        resuming.load_progress(resuming.load_weights(path, other, FACTS), other)
        assert steps(other, cfg, world, count=8 - step) == losses[step:], step
        require_identical(whole(other.net), whole(state.net))
    switch = ((4 * ROWS, "bf16"), (9 * ROWS, "fp8_delayed"))
    early = fp8_config(precision__dynamic_steps=16, precision__switch=switch, train__max_samples=50 * ROWS)
    assert lively_state(early, world).precision.phases == (0, 4, 9, 25), "no phase lies beyond its stage"
    never = config_file.replace(cfg, precision__switch=())
    assert steps(lively_state(never, world), never, world, count=8)[5:] != losses[5:]
