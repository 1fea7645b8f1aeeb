"""On an accelerator: the CPU's losses, a training step without a host sync, and resuming bit for bit."""

from itertools import product

import fp8_net
import pytest
import torch
from conftest import MICRO
from fp8_net import Net

from flux_ref import checkpoint, config_file, ranks
from flux_ref.checkpoint import Saver
from flux_ref.data import allocate, synthetic
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files
from flux_ref.run import resuming
from flux_ref.speed import fp8_product
from flux_ref.speed.precision import Precision
from flux_ref.step import Health, State, train_step

pytestmark = pytest.mark.gpu


@pytest.fixture
def arch(device) -> str:
    """The name of a device's kind that computes in FP8."""
    name = fp8_product.architecture(device)
    try:
        fp8_product.arithmetic(name)
    except Refusal as error:
        pytest.skip(str(error))
    return name


def losses_of(cfg, steps, sync_debug=False):
    """Training losses on synthetic data on this machine's device."""
    world = ranks.start(cfg.parallel)
    try:
        state = State.build(cfg, world, seed=3)
        batch = allocate(cfg.model, cfg.train.global_batch, world.device)
        for name, tensor in synthetic(cfg.model, cfg.train.global_batch).items():
            batch[name].copy_(tensor)
        state.opt.lr.fill_(1e-2)
        health, losses = Health(world.device), []
        losses.append(train_step(state, batch, health, cfg)[0])  # lazy set-up may wait for the device
        if sync_debug:
            torch.cuda.set_sync_debug_mode("error")
        losses += [train_step(state, batch, health, cfg)[0] for _ in range(steps - 1)]
        torch.cuda.set_sync_debug_mode("default")
        return [float(loss) for loss in losses]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        ranks.stop()


def test_losses_equal_the_cpus(monkeypatch):
    cfg = config_file.load(MICRO)
    on_device = losses_of(cfg, 4)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    on_cpu = losses_of(cfg, 4)
    assert on_device == pytest.approx(on_cpu, rel=1e-3)


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_training_step_never_waits_for_the_device(micro_batch):
    """No .item(), no implicit sync."""
    cfg = config_file.replace(config_file.load(MICRO), parallel__dtype="bf16", train__micro_batch=micro_batch)
    losses = losses_of(cfg, 5, sync_debug=True)
    assert losses[-1] < losses[0]


def test_a_device_takes_the_layouts_that_its_fp8_arithmetic_names(device, arch):
    """Datacenter Blackwell and AMD: right sides row by row; AMD also a gradient in e5m2 by a weight in e4m3."""
    arith = fp8_product.arithmetic(arch)
    one = torch.ones((), device=device)
    wrong = []
    for left in (arith.forward, arith.gradient):
        a = torch.randn(64, 96, device=device).to(left)
        b = torch.randn(96, 32, device=device).to(arith.forward)
        lefts, rights = [a], [b.t().contiguous().t()]
        if not arith.row_times_column:
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
        net, leaf = Net(arch, "fp8_delayed", device), x.clone().requires_grad_()
        Precision(net, fp8_net.config("fp8_delayed", dynamic_steps=0), device)
        out = (torch.compile(net, fullgraph=True) if compiles else net)(leaf)
        out.backward(torch.ones_like(out).index_fill(1, torch.tensor([7], device=device), float("nan")))
        found.append([out.detach(), *(linear.of_input.amax for linear in (net.one, net.split, net.join))])
        largest = torch._foreach_norm(
            [net.join.of_grad.amax, net.one.of_grad.amax, net.one.of_input.amax], float("inf")
        )
        assert [bool(norm.isfinite()) for norm in largest] == [False, False, True]
    for eager, compiled in zip(*found):
        torch.testing.assert_close(compiled, eager, rtol=0.05, atol=0.05)


def test_a_saved_state_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """The save overlaps with the steps that come after it, which must not show in it."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    cfg = config_file.replace(config_file.load(MICRO), run__dir=str(tmp_path), parallel__dtype="bf16")
    world = ranks.start(cfg.parallel)
    try:
        batch = allocate(cfg.model, cfg.train.global_batch, world.device)
        for name, tensor in synthetic(cfg.model, cfg.train.global_batch).items():
            batch[name].copy_(tensor)

        def state_with(seed: int) -> State:
            return State.build(cfg, world, seed)

        def train(state: State, steps: int) -> dict[str, torch.Tensor]:
            state.opt.lr.fill_(1e-2)
            for _ in range(steps):
                train_step(state, batch, Health(world.device), cfg)
                state.advance(cfg.train.global_batch)
            return {key: rows.local.clone() for key, rows in checkpoint.rows_of(state).items()}

        first = state_with(seed=3)
        train(first, 2)
        saver = Saver(cfg, world, {}, print)
        saver.save(first, {})
        want = train(first, 3)
        saver.finish()
        second = state_with(seed=4)
        saved = resuming.load_weights(checkpoint_files.list_checkpoints(tmp_path)[-1], second, {})
        resuming.load_progress(saved, second)
        found = train(second, 3)
    finally:
        torch.use_deterministic_algorithms(False)
        ranks.stop()
    assert second.step == 5
    assert [key for key in want if not torch.equal(found[key], want[key])] == []
