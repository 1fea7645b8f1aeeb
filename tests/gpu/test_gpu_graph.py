"""Captured steps on a device that captures: bit for bit the eager ones, without growth, and with a clean end."""

import re
import time

import pytest
import torch
from conftest import micro_config, micro_run, script
from graph_ranks import STEPS, history, require_same_history

from flux_ref import config_file, graphs, sharding
from flux_ref.cli import Fault
from flux_ref.graphs import CapturedTrainer
from flux_ref.trainer import TrainState

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("deterministic")]
ON = {"compute__cuda_graphs": "on", "compute__dtype": "bf16"}
COMPILED = {"parallel__region_blocks": 2, "compute__compile": True}
EXIT_S = 20.0  # a process group that waits for a graph never ends
CAPTURED_TRAIN = "tests/helpers/captured_train.py"


def make(world, **values):
    """The steps of a fresh net after a warm-up."""
    cfg = micro_config(**ON, **values)
    steps = CapturedTrainer(TrainState(sharding.build(cfg, world, seed=3), cfg, world), cfg, world)
    steps.warm_up()
    return steps


def both(world, data, **values):
    """The history by graphs, and the eager one."""
    cfg = micro_config(data, **(ON | values))
    return history(cfg, world), history(config_file.replace(cfg, compute__cuda_graphs="off"), world)


@pytest.mark.parametrize(
    "values",
    [{}, {"train__micro_batch": 4}, {"train__micro_batch": 4, "parallel__kept_regions": -1}, COMPILED],
    ids=["plain", "accumulated", "kept gathered", "compiled"],
)
def test_replays_are_bit_identical_to_eager_steps_and_evaluations(shapes_dir, world, values):
    found, want = both(world, shapes_dir, **values)
    require_same_history(found, want)
    assert found["flags"][0] == STEPS and found["validations"][-1] == found["afterwards"]
    assert len({tuple(losses) for losses in found["validations"]}) == len(found["validations"]), "stale weights"
    assert found["results"][0] != found["results"][-1]


@pytest.mark.parametrize("values", [{}, COMPILED | {"parallel__kept_regions": -1}], ids=["plain", "kept, compiled"])
def test_pictures_between_replays_change_nothing(shapes_dir, world, values):
    """They are those of eager steps."""
    drawing = {"pictures__count": 4, "pictures__steps": 3, "pictures__every_samples": 1}
    found, want = both(world, shapes_dir, **values, **drawing)
    require_same_history(found, want)
    assert len(set(found["pictures"])) == 4 * 4
    without = history(micro_config(shapes_dir, **ON, **values), world)
    assert all(found[key] == without[key] for key in ("results", "validations", "afterwards"))


def test_kernels_without_a_deterministic_mode_are_captured_too(shapes_dir, world):
    """cuDNN's attention, which real runs have on Hopper, takes heads of this size."""
    torch.use_deterministic_algorithms(False)
    sizes = {"model__hidden": 192, "model__heads": 3, "model__rope_axes": (16, 24, 24)}
    dtype = "bf16" if torch.accelerator.is_available() else "fp32"  # in bf16 a CPU may be slow
    found, want = both(world, shapes_dir, **sizes, compute__dtype=dtype)
    assert found["captured"] and found["flags"] == want["flags"]
    for key in ("results", "validations"):
        assert torch.allclose(torch.tensor(found[key]), torch.tensor(want[key]), rtol=2e-2), key


def test_replays_never_wait_for_the_device_and_use_no_more_memory_which_comes_back(world):
    steps = make(world, train__micro_batch=4)
    torch.accelerator.empty_cache()
    reserved = torch.accelerator.memory_reserved()
    steps.capture()

    def replay(times):
        for _ in range(times):
            steps.state.opt.lr.fill_(1e-3)
            steps.train()
            steps.validate()

    replay(2)
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()
    assert reserved < before[1]
    torch.cuda.set_sync_debug_mode("error")
    try:
        replay(10)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.accelerator.synchronize()
    assert (torch.accelerator.memory_allocated(), torch.accelerator.memory_reserved()) == before
    assert steps.health.first_bad.tolist() == [-1, -1]
    steps.close()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved() < before[1]


def test_a_capture_may_end_while_a_stream_waits_without_work(device):
    """So end FSDP2's gathering streams after a validation."""
    one = torch.ones(4, device=device)
    recorder = graphs.Recorder(device)
    side = torch.cuda.Stream()

    def work():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            one.add_(1)
        torch.cuda.current_stream().wait_stream(side)
        one.mul_(2)
        side.wait_stream(torch.cuda.current_stream())

    recorder.capture(work).replay()
    torch.accelerator.synchronize()
    assert one.tolist() == [4.0] * 4


@pytest.mark.parametrize("replicate", [1, 2])
def test_replays_are_bit_identical_to_eager_steps_on_several_devices(shapes_dir, tmp_path, replicate):
    """With two replicas a graph holds several communicators: of all ranks, for the norm, and of the mesh."""
    if torch.accelerator.device_count() < 2:
        pytest.skip("one device")
    ranks = min(4, torch.accelerator.device_count() // 2 * 2)
    split = f"--parallel.replicate={replicate}"
    process = script("tests/helpers/graph_ranks.py", shapes_dir, tmp_path, split, ranks=ranks, timeout=300)
    assert process.returncode == 0, process.stderr[-4000:]
    for rank in range(ranks):
        found = torch.load(tmp_path / f"rank_{rank}.pt")
        require_same_history(found["captured"], found["eager"])


def test_a_run_ends_soon_after_its_last_line_and_after_an_error_amid_training(train_py, shapes_dir, tmp_path):
    argv = micro_run(shapes_dir, tmp_path / "run", "--compute.cuda_graphs=on")
    process = script(CAPTURED_TRAIN, *argv, ranks=0, timeout=120, BREAKS_AT="3")
    left = time.time()
    assert process.returncode == 3 and "an error amid training" in process.stderr
    assert left - float(re.search(r"broken at ([\d.]+)", process.stdout).group(1)) < EXIT_S
    program = "train.py" if torch.accelerator.is_available() else CAPTURED_TRAIN
    process = script(program, *argv, ranks=1, timeout=300)
    assert process.returncode == 0, process.stderr[-4000:]
    assert "  steps   captured" in process.stdout
    assert time.time() - (tmp_path / "run" / "outcome.json").stat().st_mtime < EXIT_S


def test_the_capture_of_a_step_that_waits_for_the_device_is_a_fault_and_the_device_stays_of_use(world):
    """The last test of this file: after a failed capture torch 2.11 returns no memory to the device."""
    steps = make(world)
    with pytest.raises(Fault, match=r"a step cannot be captured: .*; set compute\.cuda_graphs=off"):
        steps._captured(lambda: (steps.train(), float(steps.health.loss)))
    assert float(torch.ones(4, device=world.device).sum()) == 4 and not steps.graphs
