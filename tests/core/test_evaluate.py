"""The validation loss is the mean of eight per-timestep means over every sample, however it is computed."""

import numpy as np
import pytest
import rank_runs
import torch
from lively_nets import lively_net, plain_net
from shard_damage import every_sample

from flux_ref import dataset, flow, rng, schedule
from flux_ref.cli import Fault
from flux_ref.dataloader import ValSet
from flux_ref.evaluate import validation_loss
from flux_ref.trainer import Validator

SIZES = (1, 3, pytest.param(4, marks=pytest.mark.slow))


@pytest.fixture(scope="module")
def plain(shapes_dir):
    """The losses of the samples of each timestep, one sample at a time."""
    cfg = rank_runs.clipped_config(shapes_dir)
    net = plain_net(cfg)
    losses = [[] for _ in range(schedule.TIMESTEPS)]
    for i, (meta, rows) in enumerate(every_sample(cfg.data.val, dataset.sample_layout(cfg.model))):
        sample = {name: dataset.from_bf16_bits(bits) for name, bits in rows.items()} | {
            "t": np.float32(meta.timestep / 8)
        }
        for name, stream in (("latent_eps", rng.VAL_LATENT), ("noise", rng.VAL_NOISE)):
            sample[name] = rng.normals(0, stream, cfg.model.latent_shape, sample=i, epoch=rank_runs.VAL_SAMPLES)
        batch = {name: torch.as_tensor(value)[None] for name, value in sample.items()}
        with torch.no_grad():
            losses[meta.timestep].append(float(flow.losses(net, batch, torch.float32)))
    return losses


@pytest.mark.parametrize("size", SIZES)
def test_the_loss_equals_the_plain_definition(measured, plain, size):
    """At any size of the batch; every rank finds the very same loss, so that all stop together."""
    assert [len(losses) for losses in plain] == [6, 6, 6, 6, 6, 5, 5, 5], "a mean over samples would show"
    means = [np.mean(losses) for losses in plain]
    for found in measured[size]["validation"].values():
        assert found["val_loss"] == pytest.approx(np.mean(means), rel=1e-6)
        assert found["val_loss_per_timestep"] == pytest.approx(means, rel=2e-6)
        assert found["count"] == 45 and found["of all ranks"] == [found["val_loss"]] * size


def test_fresh_noise_differs_between_evaluations_fixed_noise_does_not_and_no_mean_is_a_fault(world, shapes_dir):
    losses = {}
    for noise in ("fresh", "fixed"):
        cfg = rank_runs.clipped_config(shapes_dir, eval__noise=noise)
        val_set = ValSet(cfg, 0, 1, False)
        val_set.open()
        steps = Validator(lively_net(cfg, world), cfg, world)
        losses[noise] = [validation_loss(steps, val_set, samples).val_loss for samples in (36, 72, 36)]
    assert losses["fresh"][0] == losses["fresh"][2] != losses["fresh"][1]
    assert len(set(losses["fixed"])) == 1
    with pytest.raises(Fault, match="not finite after 36 training samples"):
        validation_loss(steps, val_set, 36, lambda place: steps.sums.fill_(float("nan")))
