"""Training in FP8 on one or several ranks: what test_fp8 uses, and what rank_runs.py measures of FP8."""

import math
import zlib
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from conftest import micro_config
from lively_nets import lively_net, of_all, whole

from flux_ref import config_file, ranks, schedule
from flux_ref.checkpoint import Saver
from flux_ref.dataloader import synthetic
from flux_ref.precision import blocks
from flux_ref.precision.recipe import PrecisionRecipe
from flux_ref.sharding import reshard
from flux_ref.trainer import Health, TrainState, train_step, validation_step

STEPS, ROWS = 4, 12  # samples per step over all ranks
FACTS = {"run": "a run", "train_samples": 50, "val_samples": 45}
SIZES = {"model__hidden": 48, "model__rope_axes": (8, 4, 4), "model__text_tokens": 16, "model__latent_width": 16}

# Of a run by train.py in such sizes: 3 steps, whose pictures are drawn from weights that stay gathered.
FP8_RUN = [
    *("--compute.dtype=bf16", "--model.hidden=48", "--model.rope_axes=[8, 4, 4]", "--eval.batch=16"),
    *("--train.global_batch=32", "--train.max_samples=96", "--parallel.kept_regions=-1"),
    "--precision.dynamic_steps=1",
]


def fp8_config(**values):
    """The micro config with sizes that FP8 can have, and delayed scaling from the first step on."""
    fp8 = {
        "precision__preset": "fp8_delayed",
        "precision__dynamic_steps": 0,
        "precision__history": 3,
        "compute__dtype": "bf16",
    }
    return micro_config(**(SIZES | fp8 | {"train__global_batch": ROWS} | values))


def lively_state(cfg, world):
    recipe = PrecisionRecipe(cfg)
    return TrainState(lively_net(cfg, world, recipe), cfg, world)


def steps(state, cfg, world, count=STEPS, norms=None):
    """Training steps on this rank's part of one synthetic batch: the losses over all ranks. norms: filled."""
    rows = ROWS // world.size
    part = slice(world.rank * rows, (world.rank + 1) * rows)
    batch = {name: tensor[part].to(world.device) for name, tensor in synthetic(cfg.model, ROWS).items()}
    losses, health = [], Health(world.device)
    state.opt.lr.fill_(2e-3)
    for _ in range(count):
        state.recipe.begin(state.step)
        loss, norm = train_step(state.net, state.opt, batch, health, cfg)
        if norms is not None:
            norms.append(float(norm))
        losses.append(sum(ranks.gather_objects(loss.tolist())) / world.size)
        state.advance(ROWS)
    return losses


def validated(state, cfg):
    """The sums of a validation step on two samples."""
    sums = torch.zeros(2, schedule.TIMESTEPS, dtype=torch.float64)
    validation_step(state.net, synthetic(cfg.model, 2), sums, cfg)
    assert sums[1].any()
    return sums


GATHERS = {  # ways to gather the same weights, by the number of ranks
    3: {"base": {}},
    4: {
        "kept, accumulated": {"parallel__kept_regions": -1, "train__micro_batch": 1},
        "dynamic, recomputed, regions of 2": {
            "precision__preset": "fp8",
            "compute__activation_checkpointing": "block",
            "parallel__region_blocks": 2,
        },
    },
}
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"  # of older torch


@contextmanager
def gathers_noted():
    """Yields a list that receives the bytes of each all-gather."""
    sent = []
    plain = getattr(dist, GATHER)
    with mock.patch.object(dist, GATHER, lambda out, *a, **k: (sent.append(out.nbytes), plain(out, *a, **k))[1]):
        yield sent


def gathered(cfg, world):
    """What training and validation compute, and the bytes of their gathers."""
    with gathers_noted() as sent:
        state = lively_state(cfg, world)
        losses = steps(state, cfg, world, count=2)
        figures = {"sums": validated(state, cfg), "losses": torch.tensor(losses), "history": state.recipe.history}
    reshard(state.net)
    return figures | whole(state.net), sum(sent)


def gathers(cfg, world):
    """By way: whether gathers in FP8 and in bf16 give equal bits on every rank, and their bytes."""
    found = {}
    for name, values in GATHERS[world.size].items():
        own, few = gathered(config_file.replace(cfg, **values, precision__gather=True), world)
        plain, many = gathered(config_file.replace(cfg, **values, precision__gather=False), world)
        found[name] = (of_all(all(torch.equal(own[key], plain[key]) for key in plain)), (few, many))
    return found


def one_nan(precision, world):
    """On every rank: whether a NaN of one tensor on the last rank stops the history of this tensor alone."""
    for number, amax in enumerate(precision.amaxes):
        amax.fill_(math.nan if number == 3 and world.rank == world.size - 1 else 7.0 + world.rank)
    precision.after_backward()
    moved = precision.history[:, 0] == 7.0 + world.size - 1
    return of_all(moved.tolist() == [number != 3 for number in range(len(moved))])


BLOCKS = {"model__hidden": 96, "model__rope_axes": (16, 8, 8), "model__single_blocks": 1}  # sizes of MX's blocks
BLOCKS |= {"precision__preset": "mxfp6_fp4"}


def rounding(world, micro):
    """What two steps round with, over all ranks: (step, number, place of a sample's or weight's first element, crc)."""
    cfg = fp8_config(**BLOCKS, train__micro_batch=micro)
    drawn = set()
    plain = blocks.chances

    def noted(place, like):
        found = plain(place, like)
        _, step, number, first = place.tolist()
        for part in found.chunk(1 if number % 3 == blocks.WEIGHT else micro):
            drawn.add((step, number, first, zlib.crc32(part.numpy().tobytes())))
            first += part.numel()
        return found

    with mock.patch.object(blocks, "chances", noted):
        steps(lively_state(cfg, world), cfg, world, count=2)
    return sorted(set().union(*of_all(drawn)))


def saved_now(state, cfg, world):
    """Save a checkpoint and wait for it."""
    Path(cfg.run.dir).mkdir(exist_ok=True)
    saver = Saver(cfg, world, state, FACTS, lambda line: None)
    saver.save(state)
    saver.finish()


def measure(world, folder):
    """FP8 on several ranks. folder: receives a run with one checkpoint."""
    cfg = fp8_config(run__dir=str(folder))
    state = lively_state(cfg, world)
    precision = state.recipe
    losses = steps(state, cfg, world, count=1)
    first = precision.history.clone()
    losses += steps(state, cfg, world, count=STEPS - 1)
    saved_now(state, cfg, world)
    return {
        "run": str(folder),
        "losses": losses,
        "first history": first,
        "histories": of_all(precision.history),
        "scales": of_all(torch.tensor(precision.scales)),
        "one NaN": one_nan(precision, world),
        "gathers": gathers(cfg, world),
    }
