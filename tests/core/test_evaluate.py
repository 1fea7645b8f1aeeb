"""The validation loss is the mean of eight per-timestep means over every sample, however it is computed."""

import math

import numpy as np
import pytest
import rank_runs
import torch
from lively_nets import lively_net, plain_net

from flux_ref import config, flow, ranks, report, rng, schedule, sharding, shards
from flux_ref.data import PADDING, ValSet, synthetic
from flux_ref.errors import Fault
from flux_ref.evaluate import summarise, validation_loss
from flux_ref.ranks import World
from flux_ref.step import validation_step
from flux_ref.step_runner import Validator

SIZES = (1, 3, pytest.param(4, marks=pytest.mark.slow))


@pytest.fixture
def alone() -> World:
    """A world of this process."""
    yield ranks.start(config.ParallelConfig())
    ranks.stop()


def sample_losses(cfg: config.Config, net, captions: np.ndarray | None = None) -> dict[int, list[float]]:
    """The loss of each sample by timestep, one sample at a time; captions: whose caption each sample gets."""
    stored = shards.ShardSet(cfg.data.val, shards.layout(cfg.model))
    stored.open()
    streams = {"latent_eps": rng.VAL_LATENT, "noise": rng.VAL_NOISE}
    losses = {k: [] for k in range(8)}
    for i in range(len(stored)):
        rows, text = stored.layout.rows(), stored.layout.rows()
        timestep = stored.read(i, rows).timestep
        stored.read(i if captions is None else int(captions[i]), text)
        sample = {
            name: shards.from_bf16_bits(bits) for name, bits in (rows | {n: text[n] for n in ("t5", "clip")}).items()
        }
        for name, stream in streams.items():
            sample[name] = rng.normals(0, stream, cfg.model.latent_shape, sample=i, epoch=rank_runs.VAL_SAMPLES)
        sample["t"] = np.float32(timestep / 8)
        with torch.no_grad():
            batch = {name: torch.as_tensor(value)[None] for name, value in sample.items()}
            losses[timestep].append(float(flow.losses(net, batch, torch.float32)))
    return losses


@pytest.fixture(scope="module")
def plain(shapes_dir) -> dict[int, list[float]]:
    cfg = rank_runs.clipped_config(shapes_dir)
    return sample_losses(cfg, plain_net(cfg))


def mean_of_means(losses: dict[int, list[float]]) -> float:
    return float(np.mean([np.mean(of_timestep) for of_timestep in losses.values()]))


@pytest.mark.parametrize("size", SIZES)
def test_loss_and_standard_errors_equal_the_plain_definition(measured, plain, size):
    """At any size of the batch; every rank finds the very same loss, so that all stop together."""
    counts = [len(of_timestep) for of_timestep in plain.values()]
    assert counts == [6, 6, 6, 6, 6, 5, 5, 5], "uneven, so that a mean over samples would show"
    errors = [np.std(of_timestep, ddof=1) / np.sqrt(len(of_timestep)) for of_timestep in plain.values()]
    for rows in (8, 5):
        found = measured[size]["validation"][f"batches of {rows}"]
        assert found["loss"] == pytest.approx(mean_of_means(plain), rel=1e-6)
        assert found["losses"] == pytest.approx([np.mean(of_timestep) for of_timestep in plain.values()], rel=2e-6)
        assert found["stderrs"] == pytest.approx(errors, rel=1e-4)
        assert found["stderr"] == pytest.approx(np.sqrt(np.sum(np.square(errors))) / 8, rel=1e-4)
        assert found["count"] == 45
        assert found["of all ranks"] == [found["loss"]] * size


@pytest.mark.parametrize("size", SIZES)
def test_changed_weights_give_a_loss_of_their_own(measured, size):
    found = measured[size]["validation"]
    assert found["changed"] == found["changed before use"]
    assert found["changed"]["loss"] != pytest.approx(found["batches of 8"]["loss"], rel=1e-3)


def lone_loss(alone: World, shapes_dir, samples: int, **values: object) -> float:
    cfg = rank_runs.clipped_config(shapes_dir, **values)
    val_set = ValSet(cfg, 0, 1, False)
    val_set.open()
    net = lively_net(cfg, alone)
    return validation_loss(Validator(net, cfg, alone), val_set, samples).loss


def test_fresh_noise_differs_between_evaluations_and_fixed_noise_does_not(alone, shapes_dir):
    losses = [lone_loss(alone, shapes_dir, samples, eval__noise="fresh") for samples in (36, 72, 36)]
    assert losses[0] == losses[2] != losses[1]
    assert len({lone_loss(alone, shapes_dir, samples, eval__noise="fixed") for samples in (36, 72)}) == 1


def test_rows_of_padding_add_nothing(alone, micro):
    net = lively_net(micro, alone)
    batch = synthetic(micro.model, 4)
    batch["timestep"][:] = torch.tensor([3, PADDING, PADDING, 5])
    sums, want = (torch.zeros(3, schedule.TIMESTEPS, dtype=torch.float64) for _ in range(2))
    validation_step(net, batch, sums, micro)
    validation_step(net, {name: tensor[[0, 3]] for name, tensor in batch.items()}, want, micro)
    sharding.reshard(net)
    assert sums[0].tolist() == [0, 0, 0, 1, 0, 1, 0, 0]
    torch.testing.assert_close(sums, want, rtol=1e-6, atol=0)


def test_a_single_sample_per_timestep_has_no_error_and_what_has_no_mean_is_a_fault():
    found = summarise([[1.0] * 8, [3.0] * 8, [9.0] * 8], 36)
    assert (found.loss, found.count) == (3.0, 8) and math.isnan(found.stderr) and all(map(math.isnan, found.stderrs))
    record = report.validation_record(found)
    assert record["stderr"] is None and record["stderr_per_timestep"] == [None] * 8, "JSON has no NaN"
    for sums, words in (
        ([[2.0] * 6 + [0.0, 2.0]] * 3, "no sample with timestep 6"),
        ([[2.0] * 8, [1.0] * 7 + [float("nan")], [1.0] * 8], "not finite after 36 training samples"),
        ([[2.0] * 8, [1.0] * 7 + [float("inf")], [1.0] * 8], "not finite after 36 training samples"),
    ):
        with pytest.raises(Fault, match=words):
            summarise(sums, 36)
