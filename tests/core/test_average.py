"""The average of the weights is their weighted mean, however a run is split and resumed, and costs what it says."""

from collections import Counter
from math import prod

import average_ranks
import checkpoint_ranks
import pytest
import rank_runs
import torch
from conftest import MICRO
from torch.utils._python_dispatch import TorchDispatchMode

from flux_ref import config, config_file, optim, ranks, sharding
from flux_ref.model import parameter_table
from flux_ref.ranks import World
from flux_ref.step import State

SEVERAL = [pytest.param(size, marks=pytest.mark.slow) if size in (2, 4) else size for size in (2, 3, 4)]  # 4: HSDP
TOLERANCE = 1e-6  # of weights up to 1


@pytest.fixture
def world() -> World:
    yield ranks.start(config.ParallelConfig())
    ranks.stop()


@pytest.mark.parametrize("size", [1, *SEVERAL])
def test_ranks_find_the_weighted_mean_also_from_what_others_have_saved(measured, size):
    found = measured[size]["average"]
    assert found.keys() == {size, *(fewer for fewer in rank_runs.SIZES if fewer < size)}
    assert {first: error for first, error in found.items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize("size", [1, *SEVERAL])
def test_one_process_goes_on_from_it_and_files_of_weights_are_made_of_it(measured, world, size):
    measured[size]
    path = average_ranks.saved(measured.data.parent, size)
    cfg = checkpoint_ranks.narrow_config(path.parents[1])
    assert average_ranks.errors_of_file(path, cfg, average_ranks.SAVED) <= TOLERANCE
    assert average_ranks.resumed(cfg, world, path) <= TOLERANCE


def test_the_share_of_samples_is_closed_form_and_keeps_its_digits():
    wrong = []
    for half_life in (1, 7, 600, 10**7, 2**63 - 1):
        for samples in (1, 12, 512, 10**6):
            share = optim.share_of_newest(samples, half_life)
            x = samples / half_life
            want = 1 - 0.5**x if x > 1e-3 else x * 0.6931471805599453 * (1 - 0.34657359 * x)  # the series of 2 ** -x
            if share != pytest.approx(want, rel=1e-6):
                wrong.append((samples, half_life, share, want))
            twice = optim.share_of_newest(2 * samples, half_life)
            if 1 - (1 - share) ** 2 != pytest.approx(twice, rel=1e-6, abs=1e-15):
                wrong.append((samples, half_life, "two steps are not one of twice the batch"))
    assert wrong == []


class Counted(TorchDispatchMode):
    """Counts the operations that torch carries out."""

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[str(function)] += 1
        return function(*args, **(kwargs or {}))


def test_an_average_costs_4_bytes_and_an_operation_per_parameter_and_nothing_if_it_is_off(world):
    found = {}
    for half_life in (0, 600):
        cfg = config_file.replace(config_file.load(MICRO), optim__ema=half_life)
        state = State.of(sharding.build(cfg, world, seed=0), cfg, world)
        for _ in range(2):  # the first allocates
            for parameter in state.net.parameters():
                parameter.grad = torch.ones_like(parameter)
            with Counted() as counted:
                state.opt.step()
        held = sum(tensor.nbytes for tensors in state.opt.moments().values() for tensor in tensors)
        found[half_life] = counted.count, held
    table = parameter_table(config_file.load(MICRO).model)
    (plain, held), (with_average, more) = found.values()
    assert with_average - plain == {"aten.lerp_.Tensor": len(table), "aten.rsub.Scalar": 1, "aten.mul.Tensor": 1}
    assert plain - with_average == {}
    parameters = sum(map(prod, table.values()))
    assert (held, more) == (8 * parameters, 12 * parameters)
