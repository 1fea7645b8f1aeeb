"""However a run is split among ranks, regions and micro-batches, it is the same run."""

import math

import numpy as np
import pytest
import rank_runs
import torch
from conftest import micro_config, require_identical
from lively_nets import lively_net, plain_net
from rank_runs import STEPS

from flux_ref import flow, schedule
from flux_ref.dataloader import TrainSet
from flux_ref.model import parameter_table
from flux_ref.optim import ShardedAdamW
from flux_ref.trainer import NEVER, Health

HSDP = pytest.param(4, marks=pytest.mark.slow)  # 2 replicas x 2 shards
SIZES = (1, 3, HSDP)


def plain_training(cfg):
    """The same steps by an unsharded net with torch's own AdamW and clipping; the reference of this file."""
    net, optim = plain_net(cfg), cfg.optim
    betas = (optim.beta1, optim.beta2)
    adamw = torch.optim.AdamW(net.parameters(), betas=betas, eps=optim.eps, weight_decay=optim.weight_decay)
    train_set = TrainSet(cfg, 0, 1, False)
    train_set.open()
    feed = train_set.feed(0)
    losses, norms = [], []
    for step in range(STEPS):
        loss = flow.losses(net, next(feed).tensors, torch.float32).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), optim.clip_norm)))
        adamw.param_groups[0]["lr"] = schedule.lr(step, optim)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    feed.close()
    return {"losses": losses, "norms": norms, "whole": {name: p.detach() for name, p in net.named_parameters()}}


@pytest.fixture(scope="module")
def plain(shapes_dir):
    return plain_training(rank_runs.clipped_config(shapes_dir))


def require_same_run(found, want, relative=1e-5):
    np.testing.assert_allclose(found["losses"], want["losses"], rtol=relative)
    norms = np.array(found["norms"])
    assert (norms == norms[:, :1]).all(), "the ranks disagree about the norm"
    np.testing.assert_allclose(norms[:, 0], want["norms"], rtol=relative)


# Initial weights and their shards


@pytest.mark.parametrize("size", SIZES[1:])
def test_initial_weights_are_bit_identical_at_every_world_size_and_each_rank_keeps_its_chunk(measured, size):
    whole = measured[1]["initial"]["whole"]
    table = parameter_table(micro_config().model)
    assert {name: tuple(tensor.shape) for name, tensor in whole.items()} == table
    first, second = (whole[f"single_blocks.{block}.linear1.weight"] for block in (0, 1))
    assert first.std() > 0.1 and not torch.equal(first, second)
    found = measured[size]
    require_identical(found["initial"]["whole"], whole)
    shards = 2 if size == 4 else size
    if size == 4:
        assert found["dimensions"] == ("replicate", "shard") and found["mesh"] == [[0, 1], [2, 3]]
    for name, shape in table.items():
        chunks = [len(chunk) for chunk in torch.zeros(shape).chunk(shards)]
        want = (chunks + [0] * (shards - len(chunks))) * (size // shards)
        assert [rows[name] for rows in found["initial"]["rows"]] == want, name


# Training


@pytest.mark.parametrize("size", SIZES)
def test_training_equals_one_plain_process(measured, plain, size):
    """Also with gradient accumulation, in larger regions, and with weights that stay gathered."""
    assert min(plain["norms"]) < rank_runs.CLIP < max(plain["norms"]), "clipping is tested on both sides"
    for name in rank_runs.SPLITS if size == 3 else list(rank_runs.SPLITS)[:4]:
        found = measured[size][name]
        require_same_run(found, plain)
        assert found["names"] == list(found["whole"]) == list(plain["whole"])
        for key, tensor in plain["whole"].items():
            torch.testing.assert_close(found["whole"][key], tensor, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("size", SIZES[1:])
def test_kept_weights_are_gathered_once_a_step_and_change_no_bit(measured, size):
    """Whatever is freed is gathered for every forward and every backward."""
    cfg = micro_config()
    regions = cfg.model.double_blocks + cfg.model.single_blocks
    micros = rank_runs.MICRO_BATCHES[size]
    want = measured[size]["accumulated"]
    for name, kept in (("accumulated", 0), ("accumulated, kept gathered", regions), ("accumulated, some kept", 2)):
        found = measured[size][name]
        assert found["gathers"] == [1 + kept + 2 * micros * (regions - kept)] * rank_runs.STEPS, name
        assert found["losses"] == want["losses"] and found["norms"] == want["norms"], name
        require_identical(found["whole"], want["whole"])


def test_ranks_without_a_row_of_some_parameters_train_the_same(measured, shapes_dir):
    cfg = rank_runs.clipped_config(shapes_dir, **rank_runs.NARROW)
    assert cfg.model.head_dim == 4  # in chunks of 2, 2 and 0
    require_same_run(measured[3]["narrow"], plain_training(cfg))


def test_bf16_compute_trains_nearly_the_same(measured, plain):
    found = measured[3]["bf16"]
    require_same_run(found, plain, relative=0.02)
    assert found["losses"][-1] < 0.98 * found["losses"][0]
    assert not np.allclose(found["losses"], plain["losses"], rtol=1e-6), "computed in fp32"
    assert all(tensor.dtype == torch.float32 for tensor in found["whole"].values())


def test_a_warm_up_and_validations_in_between_leave_training_bit_identical(measured):
    found, want = measured[3]["disturbed"], measured[3]["base"]
    assert found["losses"] == want["losses"] and found["norms"] == want["norms"]
    require_identical(found["whole"], want["whole"])


def test_the_average_halves_what_older_weights_count(world):
    """Weights count half after each half-life. Those before the first step count what is left by all steps."""
    cfg = micro_config(optim__ema_half_life=24)
    net = lively_net(cfg, world)
    opt = ShardedAdamW(net, cfg, world)
    opt.lr.fill_(0.1)
    left = 2 ** (-cfg.train.global_batch / cfg.optim.ema_half_life)
    want = [shard.detach().double() for shard in opt.shards]
    for _ in range(5):
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        opt.step()
        want = [left * old + (1 - left) * shard.detach() for old, shard in zip(want, opt.shards)]
    for found, mean, shard in zip(opt.states()["ema"], want, opt.shards):
        torch.testing.assert_close(found.double(), mean, rtol=0, atol=1e-6)
        assert not torch.equal(found, shard)


# Health and faults


def test_health_remembers_the_first_step_that_was_not_finite():
    good, bad = torch.ones(()), torch.tensor(math.nan)
    health = Health(torch.device("cpu"))
    health.restart(10)
    for loss, norm in ((good, good), (good, bad), (bad, bad), (good, good)):
        health.update(loss, norm)
    assert (float(health.step), health.first_bad.tolist()) == (14, [12, 11])


def test_every_rank_reports_what_is_wrong_on_the_last_rank(measured):
    assert measured[3]["base"]["flags"] == [STEPS, NEVER, NEVER]
    found = measured[3]["reporting"]
    assert found["flags"] == [[2, 1], [2, 1], [1, 1]], "the bad batch spoils norm and weights of all ranks"
    line, *others = found["said"]
    assert "loss is not finite in step 2, first on rank 2;" in line
    assert others == [line] * 2
