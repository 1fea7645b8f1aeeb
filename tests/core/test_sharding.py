"""However a run is split among ranks, regions and micro-batches, it is the same run."""

import math

import numpy as np
import pytest
import rank_runs
import torch
from conftest import require_identical
from lively_nets import lively, plain_net
from rank_runs import STEPS

from flux_ref import config, flow, schedule
from flux_ref.data import TrainSet
from flux_ref.model import parameter_table
from flux_ref.step import NEVER, Health

HSDP = pytest.param(4, marks=pytest.mark.slow)  # 2 replicas x 2 shards
SIZES = (1, 3, HSDP)


def plain_training(cfg: config.Config) -> dict:
    """The same steps by an unsharded net with torch's own AdamW and clipping; the reference of this file."""
    net, optim = plain_net(cfg), cfg.optim
    adamw = plain_adamw(net.parameters(), optim)
    train_set = TrainSet(cfg, 0, 1, False)
    train_set.open()
    feed = train_set.feed(0)
    losses, norms = [], []
    for step in range(STEPS):
        loss = flow.losses(net, next(feed).tensors, torch.float32).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), optim.clip_norm)))
        adamw.param_groups[0]["lr"] = schedule.lr(step, optim.lr, optim.warmup_steps)
        adamw.step()
        adamw.zero_grad()
        losses.append(loss.item())
    feed.close()
    return {"losses": losses, "norms": norms, "whole": {name: p.detach() for name, p in net.named_parameters()}}


def plain_adamw(parameters, optim: config.OptimConfig) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters, optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps, weight_decay=optim.weight_decay
    )


@pytest.fixture(scope="module")
def plain(shapes_dir):
    return plain_training(rank_runs.micro_config(shapes_dir))


def require_same_run(found: dict, want: dict, relative: float = 1e-5):
    np.testing.assert_allclose(found["losses"], want["losses"], rtol=relative)
    norms = np.array(found["norms"])
    assert (norms == norms[:, :1]).all(), "the ranks disagree about the norm"
    np.testing.assert_allclose(norms[:, 0], want["norms"], rtol=relative)


def require_close(found: dict, want: dict):
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=5e-5, msg=lambda text, n=name: f"{n}: {text}")


# Initial weights and their shards


def test_initial_weights_are_bit_identical_at_every_world_size_and_each_rank_keeps_its_chunk(measured, micro):
    whole, rows = measured[1]["initial"]["whole"], measured[3]["initial"]["rows"]
    require_identical(measured[3]["initial"]["whole"], whole)
    assert {name: tuple(tensor.shape) for name, tensor in whole.items()} == parameter_table(micro.model)
    first, second = (whole[f"double_blocks.{block}.img_attn.qkv.weight"] for block in (0, 1))
    assert first.std() > 0.1 and not torch.equal(first, second)
    assert [of_rank["final_layer.linear.weight"] for of_rank in rows] == [22, 22, 20], "uneven"
    require_chunks(rows, micro)


def require_chunks(rows: list[dict[str, int]], micro: config.Config) -> None:
    """Each rank keeps its chunk of every tensor's rows."""
    for name, shape in parameter_table(micro.model).items():
        chunks = [len(chunk) for chunk in torch.zeros(shape).chunk(len(rows))]
        assert [of_rank[name] for of_rank in rows] == chunks + [0] * (len(rows) - len(chunks)), name


@pytest.mark.slow
def test_hsdp_shards_over_neighbouring_ranks_and_replicates_across(measured, micro):
    found = measured[4]
    assert found["dimensions"] == ("replicate", "shard")
    assert found["mesh"] == [[0, 1], [2, 3]]
    assert [rows["img_in.weight"] for rows in found["initial"]["rows"]] == [12, 12, 12, 12]
    require_chunks(found["flat initial"]["rows"], micro)
    for key in ("initial", "flat initial"):
        require_identical(found[key]["whole"], measured[1]["initial"]["whole"])


# Training


@pytest.mark.parametrize("size", SIZES)
def test_training_equals_one_plain_process(measured, plain, size):
    """Also with gradient accumulation, in larger regions, and with weights that stay gathered."""
    assert min(plain["norms"]) < rank_runs.CLIP < max(plain["norms"]), "clipping is tested on both sides"
    for name in rank_runs.SPLITS if size == 3 else ("base", "accumulated"):
        require_same_run(measured[size][name], plain)
        require_close(measured[size][name]["whole"], plain["whole"])
        assert measured[size][name]["names"] == list(plain["whole"])
    assert measured[size]["accumulated"]["error of average"] <= 1e-6
    assert measured[size]["base"]["storage shared"]


@pytest.mark.slow
def test_four_shards_without_replicas_train_the_same(measured, plain):
    require_same_run(measured[4]["flat"], plain)
    require_close(measured[4]["flat"]["whole"], plain["whole"])


@pytest.mark.parametrize("size", SIZES)
def test_levers_of_fsdp_change_no_bit(measured, size):
    for key in ("losses", "norms"):
        assert measured[size]["levers"][key] == measured[size]["base"][key]
    require_identical(measured[size]["levers"]["whole"], measured[size]["base"]["whole"])


def test_ranks_without_a_row_of_some_parameters_train_the_same(measured, shapes_dir):
    cfg = rank_runs.micro_config(shapes_dir, **rank_runs.NARROW)
    assert cfg.model.head_dim == 4  # in chunks of 2, 2 and 0
    require_same_run(measured[3]["narrow"], plain_training(cfg))


def test_bf16_compute_trains_nearly_the_same(measured, plain):
    found = measured[3]["bf16"]
    require_same_run(found, plain, relative=0.02)
    assert found["losses"][-1] < 0.9 * found["losses"][0]
    assert not np.allclose(found["losses"], plain["losses"], rtol=1e-6), "computed in fp32"
    assert all(tensor.dtype == torch.float32 for tensor in found["whole"].values())


def test_a_warm_up_and_validations_in_between_leave_training_bit_identical(measured, micro):
    """The warm-up leaves weights as they are, moments zero and the average at the weights."""
    found, want = measured[3]["disturbed"], measured[3]["base"]
    table = parameter_table(micro.model)
    require_identical(found["warm"], {name: lively(name, shape) for name, shape in table.items()})
    assert found["states"] == 4 * len(table)  # two moments, an average of the weights and a step count
    assert found["error of average"] <= 1e-6
    assert found["largest state"] == 0
    assert found["losses"] == want["losses"] and found["norms"] == want["norms"]
    require_identical(found["whole"], want["whole"])


# Optimizer


@pytest.mark.parametrize("size", SIZES)
def test_sharded_adamw_equals_torchs_adamw_with_clipping(measured, micro, shapes_dir, size):
    cfg = rank_runs.micro_config(shapes_dir)
    parameters = {name: lively(name, shape) for name, shape in parameter_table(micro.model).items()}
    adamw, norms = plain_adamw(parameters.values(), cfg.optim), []
    for scale in rank_runs.GRADIENT_SCALES:
        for name, parameter in parameters.items():
            parameter.grad = lively(f"gradient {scale} {name}", tuple(parameter.shape)) * scale
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), cfg.optim.clip_norm)))
        adamw.step()
    found = measured[size]["optimizer"]
    np.testing.assert_allclose(found["norms"], norms, rtol=1e-6)
    require_close(found["whole"], parameters)
    assert found["gradients left"] == 0
    assert math.isnan(found["norm with a NaN"]), "on every rank, also if one alone has it"


# Health and faults


def test_health_remembers_the_first_step_that_was_not_finite():
    good, bad = torch.ones(()), torch.tensor(math.nan)
    health = Health(torch.device("cpu"), step=10)
    for loss, norm in ((good, good), (good, bad), (bad, bad), (good, good)):
        health.update(loss, norm)
    assert (float(health.step), health.first_bad.tolist()) == (14, [12, 11])
    assert Health(torch.device("cpu")).first_bad.tolist() == [NEVER, NEVER]


def test_every_rank_reports_what_is_wrong_on_the_last_rank(measured):
    found = measured[3]["reporting"]
    assert [flags[0] for flags in found["flags"]] == [2, 2, 1], "the bad batch spoils the weights of all ranks"
    assert measured[3]["base"]["flags"] == [STEPS, NEVER, NEVER]
    for what, words in {
        "fine": "",
        "NaN at step 1": "loss is not finite in step 2 on rank 2's data (positions 20 to 23 of the run)",
        "infinite norm": "gradient norm is not finite in step 2",
    }.items():
        assert len(found[what]) == 3 and len(set(found[what])) == 1, what
        assert words in found[what][0] and bool(words) == bool(found[what][0]), what
    assert measured[3]["refusing"] == ["rank 2: no such shard"] * 3
