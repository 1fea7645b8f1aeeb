"""On an accelerator: the CPU's losses, a training step without a host sync, and resuming bit for bit."""

from itertools import product

import pytest
import torch
from conftest import micro_config, require_identical
from fp8_net import Net
from graph_ranks import everything

from flux_ref import checkpoint, sharding
from flux_ref.checkpoint import Saver, load
from flux_ref.cli import Refusal
from flux_ref.dataloader import allocate, synthetic
from flux_ref.precision import fp8
from flux_ref.trainer import Health, TrainState, train_step

pytestmark = pytest.mark.gpu


@pytest.fixture
def arch(device):
    """The name of a device's kind that computes in FP8."""
    name = fp8.architecture(device)
    try:
        fp8.support(name)
    except Refusal as error:
        pytest.skip(str(error))
    return name


def batch_of(cfg, world):
    """Synthetic data on the device."""
    batch = allocate(cfg.model, cfg.train.global_batch, world.device)
    for name, tensor in synthetic(cfg.model, cfg.train.global_batch).items():
        batch[name].copy_(tensor)
    return batch


def losses_of(cfg, world, waits="default"):
    """Five training losses. waits: what becomes of a step that waits for the device, but for the first step."""
    state = TrainState(sharding.build(cfg, world, seed=3), cfg, world)
    batch = batch_of(cfg, world)
    health = Health(world.device)
    state.opt.lr.fill_(1e-2)
    losses = [train_step(state.net, state.opt, batch, health, cfg)[0]]  # lazy set-up may wait
    torch.cuda.set_sync_debug_mode(waits)
    try:
        losses += [train_step(state.net, state.opt, batch, health, cfg)[0] for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [float(loss) for loss in losses]


def test_losses_equal_the_cpus(on_both):
    on_device, on_cpu = on_both(lambda world: losses_of(micro_config(), world))
    assert on_device == pytest.approx(on_cpu, rel=1e-3)


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_training_step_never_waits_for_the_device(micro_batch, world):
    """No .item(), no implicit sync."""
    cfg = micro_config(compute__dtype="bf16", train__micro_batch=micro_batch)
    losses = losses_of(cfg, world, "error")
    assert losses[-1] < losses[0]


def test_a_device_takes_the_layouts_that_fp8_support_names(device, arch):
    """Datacenter Blackwell and AMD: right sides row by row; AMD also a gradient in e5m2 by a weight in e4m3."""
    support = fp8.support(arch)
    one = torch.ones((), device=device)
    wrong = []
    for left in (support.forward, support.gradient):
        a = torch.randn(64, 96, device=device).to(left)
        b = torch.randn(96, 32, device=device).to(support.forward)
        lefts, rights = [a], [b.t().contiguous().t()]
        if not support.row_times_column:
            lefts, rights = [*lefts, a.t().contiguous().t()], [*rights, b]
        for pair in product(lefts, rights):
            found = torch._scaled_mm(*pair, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
            if not torch.allclose(found.float(), a.float() @ b.float(), rtol=2e-2, atol=0.2):
                wrong.append((left, *(side.stride() for side in pair)))
    assert wrong == []


def test_compiled_fp8_linears_equal_eager_ones_on_a_device(device, arch):
    """In parts and whole. Delayed scales are 1, and a NaN of one column shows in the magnitudes."""
    found = []
    x = torch.randn(256, 64, device=device, dtype=torch.bfloat16)
    for compiles in (False, True):
        net = Net(arch, "fp8_delayed", device)
        out = (torch.compile(net, fullgraph=True) if compiles else net)(x.clone().requires_grad_())
        out.backward(torch.ones_like(out).index_fill(1, torch.tensor([7], device=device), float("nan")))
        found.append([out.detach(), *(linear.of_input.amax for linear in (net.one, net.split, net.join))])
        for amax, is_finite in ((net.join.of_grad.amax, 0), (net.one.of_grad.amax, 0), (net.one.of_input.amax, 1)):
            assert amax.norm(float("inf")).isfinite() == is_finite
    for eager, compiled in zip(*found):
        torch.testing.assert_close(compiled, eager, rtol=0.05, atol=0.05)


def test_a_saved_state_goes_on_bit_for_bit(world, deterministic, tmp_path):
    """The save overlaps with the steps that come after it, which must not show in it."""
    cfg = micro_config(run__dir=str(tmp_path), compute__dtype="bf16")
    batch = batch_of(cfg, world)

    def train(state, steps):
        state.opt.lr.fill_(1e-2)
        for _ in range(steps):
            train_step(state.net, state.opt, batch, Health(world.device), cfg)
            state.advance(cfg.train.global_batch)
        return everything(state)

    first, second = (TrainState(sharding.build(cfg, world, seed), cfg, world) for seed in (3, 4))
    train(first, 2)
    saver = Saver(cfg, world, first, {"train_samples": 0, "val_samples": 0}, print)
    saver.save(first)
    want = train(first, 3)
    saver.finish()
    load(checkpoint.list_checkpoints(tmp_path)[-1], second)
    found = train(second, 3)
    assert second.step == 5
    require_identical(found, want)
