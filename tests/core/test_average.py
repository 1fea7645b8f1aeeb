"""The average of the weights is their weighted mean, however a run is split and resumed, and costs what it says."""

import math
from collections import Counter

import average_ranks
import pytest
import rank_runs
import torch
from conftest import MICRO
from torch.utils._python_dispatch import TorchDispatchMode

from flux_ref import config, config_file, ranks
from flux_ref.ranks import World
from flux_ref.step_runner import State

SIZES = [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]  # 4: HSDP
TOLERANCE = 1e-6  # of weights up to 1


@pytest.fixture
def world() -> World:
    yield ranks.start(config.ParallelConfig())
    ranks.stop()


@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_weighted_mean_at_any_number_of_ranks_also_of_a_run_that_others_began(measured, size):
    measured[size]
    folder = measured.data.parent / f"{size}_ranks"
    paths = sorted(folder.glob("average_*/checkpoints/*"))
    assert len(paths) == 2 + sum(fewer < size for fewer in rank_runs.SIZES)
    errors = {path: average_ranks.error(path) for path in paths}
    assert {path: error for path, error in errors.items() if not error <= TOLERANCE} == {}


def test_one_process_goes_on_from_what_three_ranks_have_begun(measured, world, tmp_path):
    measured[3]
    begun = measured.data.parent / "3_ranks" / "average_3" / "checkpoints" / "step_000000100"
    average_ranks.go_on(tmp_path, world, begun, average_ranks.END)
    assert average_ranks.error(tmp_path / "checkpoints" / "step_000000200") <= TOLERANCE


class Counted(TorchDispatchMode):
    """Counts the operations that torch carries out."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_a_step_has_one_operation_more_and_none_if_the_average_is_off(world):
    counts = []
    for half_life in (0, 10**15):
        cfg = config_file.replace(config_file.load(MICRO), optim__ema=half_life)
        state = State.build(cfg, world, seed=0)
        for parameter in state.net.parameters():
            parameter.grad = torch.ones_like(parameter)
        with Counted() as counted:
            state.opt.step()
        counts.append(counted.count)
    assert counts[1] - counts[0] == {"aten._foreach_lerp_.Scalar": 1} and not counts[0] - counts[1]
    assert state.opt.share == pytest.approx(math.log(2) * cfg.train.global_batch / half_life, rel=1e-12)
