"""On an accelerator: the same losses as on the CPU, and a training step without a host sync."""

import pytest
import torch
from conftest import MICRO

from flux_ref import config, parallel
from flux_ref.data import allocate, synthetic
from flux_ref.optim import ShardedAdamW
from flux_ref.step import Health, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator"),
]


def losses_of(cfg, steps, sync_debug=False):
    """Training losses on synthetic data on this machine's device."""
    world = parallel.start(cfg.parallel)
    try:
        net = parallel.build(cfg, world, seed=3)
        opt = ShardedAdamW(net, cfg.optim, world)
        batch = allocate(cfg.model, cfg.train.global_batch, world.device)
        for name, tensor in synthetic(cfg.model, cfg.train.global_batch).items():
            batch[name].copy_(tensor)
        opt.lr.fill_(1e-2)
        health, losses = Health(world.device), []
        losses.append(train_step(net, opt, batch, health, cfg)[0])  # lazy set-up may wait for the device
        if sync_debug:
            torch.cuda.set_sync_debug_mode("error")
        losses += [train_step(net, opt, batch, health, cfg)[0] for _ in range(steps - 1)]
        torch.cuda.set_sync_debug_mode("default")
        return [float(loss) for loss in losses]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        parallel.stop()


def test_losses_equal_the_cpus(monkeypatch):
    cfg = config.load(MICRO)
    on_device = losses_of(cfg, 4)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    on_cpu = losses_of(cfg, 4)
    assert on_device == pytest.approx(on_cpu, rel=1e-3)


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_training_step_never_waits_for_the_device(micro_batch):
    """No .item(), no implicit sync."""
    cfg = config.replace(config.load(MICRO), parallel__dtype="bf16", train__micro_batch=micro_batch)
    losses = losses_of(cfg, 5, sync_debug=True)
    assert losses[-1] < losses[0]
