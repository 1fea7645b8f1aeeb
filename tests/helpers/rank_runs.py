"""Measures, on every rank of one launch, what tests of several ranks assert.

Starting torch takes longer than all the measuring, so there is one launch per number of ranks. Rank 0 writes the
findings. With 4 ranks the world is HSDP, 2 replicas x 2 shards.
"""

import math
import os
import sys
from pathlib import Path

import precision_ranks
import torch
import torch.distributed as dist
from conftest import micro_config, open_sets, script
from lively_nets import lively_net, of_all, whole
from safetensors.torch import save_file

from flux_ref import checkpoint, cli, config_file, ranks, schedule, sharding, weights
from flux_ref.cli import Fault, Refusal
from flux_ref.dataloader import allocate, copy_next
from flux_ref.evaluate import validation_loss
from flux_ref.mlperf_log import BenchmarkLog
from flux_ref.report import Reporter
from flux_ref.trainer import Health, Trainer, TrainState, Validator, train_step

SIZES = (1, 3, 4)  # numbers of ranks
STEPS = 2
CLIP = 1.62  # the norms of these two steps lie on both sides of it
BASE = {"optim__clip_norm": CLIP, "train__caption_drop": 0.5}
NARROW = {"model__hidden": 12, "model__rope_axes": (0, 2, 2)}  # heads of 4 features: 3 ranks hold 2, 2 and 0
BF16 = {"compute__dtype": "bf16"}
MICRO_BATCHES = {1: 2, 3: 2, 4: 3}  # of each rank in a step that accumulates, by the number of ranks
SPLITS = {  # ways to run the same steps
    "base": {},
    "accumulated": {},
    "accumulated, kept gathered": {"parallel__kept_regions": -1},
    "accumulated, some kept": {"parallel__kept_regions": 2},
    "regions of 2, kept gathered": {"parallel__region_blocks": 2, "parallel__kept_regions": -1},
}
VAL_SAMPLES = 36  # the clock at which validation is measured
TIMEOUT_S = 240


class Measured(dict):
    """The findings by number of ranks. One rank is this process, which must have no world yet."""

    def __init__(self, data, shared):
        super().__init__()
        self.data, self.shared = data, shared
        for size in SIZES[:2]:
            self[size]

    def __missing__(self, size):
        def measure(folder):
            folder.mkdir()
            if size == 1:
                assert main(str(self.data), str(folder)) == 0
                return
            process = script("tests/helpers/rank_runs.py", self.data, folder, ranks=size, timeout=TIMEOUT_S)
            assert process.returncode == 0, process.stderr[-4000:]

        self[size] = torch.load(self.shared(f"{size}_ranks", measure) / "found.pt")
        return self[size]

    def checkpoint(self, size):
        """The checkpoint that so many ranks have written."""
        self[size]
        return checkpoint_of(self.data.parent / f"{size}_ranks")


def checkpoint_of(run):
    return checkpoint.list_checkpoints(run)[-1]


def clipped_config(data, **values):
    """The micro config with clipping in effect and half of the captions dropped."""
    return micro_config(data, **(BASE | values))


def initial(cfg, world):
    net = sharding.build(cfg, world, seed=cfg.train.seed)
    rows = {name: len(p.to_local()) for name, p in sharding.named_parameters(net).items()}
    return {"whole": whole(net), "rows": of_all(rows)}


def training(cfg, world, disturbed=False):
    """A few steps from lively weights. disturbed: after a warm-up, and with validations in between."""
    net = lively_net(cfg, world)
    state = TrainState(net, cfg, world)
    train_set, val_set = open_sets(cfg, world)
    batch = allocate(cfg.model, cfg.train.global_batch // world.size)
    steps = Trainer(state, cfg, world)
    if disturbed:
        steps.warm_up()
    feed, health = train_set.feed(0), Health(world.device)
    losses, norms = [], []
    gathers = []  # their number in each step
    for _ in range(STEPS):
        copy_next(feed, batch)
        state.opt.lr.fill_(schedule.lr(state.step, cfg.optim))
        with precision_ranks.gathers_noted() as sent:
            loss, norm = train_step(state.net, state.opt, batch, health, cfg)
        gathers.append(len(sent))
        state.advance(cfg.train.global_batch)
        losses.append(sum(ranks.gather_objects(loss.tolist())) / world.size)
        norms.append(ranks.gather_objects(norm.tolist()))
        if disturbed:
            validation_loss(steps, val_set, state.samples)
    feed.close()
    return {
        "losses": losses,
        "norms": norms,
        "gathers": gathers,
        "whole": whole(net),
        "names": list(sharding.named_parameters(net)),
        "flags": [float(health.step), *health.first_bad.tolist()],
    }


def validation(cfg, world):
    """Validation of lively weights, by the size of its batches."""
    net, found = lively_net(cfg, world), {}
    for rows in (8, 5):
        own = config_file.replace(cfg, eval__batch=rows)
        _, val_set = open_sets(own, world)
        result = validation_loss(Validator(net, own, world), val_set, VAL_SAMPLES)
        found[rows] = vars(result) | {"of all ranks": of_all(result.val_loss)}
    return found


def reporting(cfg, world, folder):
    """What the reporter of every rank says after a NaN in the last rank's data of the second step."""
    folder = folder / "reporting"
    folder.mkdir(exist_ok=True)
    reporter = Reporter(config_file.replace(cfg, run__dir=str(folder)), world, BenchmarkLog().text)
    reporter.begin(0)
    state = TrainState(lively_net(cfg, world), cfg, world)
    train_set, _ = open_sets(cfg, world)
    steps = Trainer(state, cfg, world)
    feed = train_set.feed(0)
    for step in range(STEPS + 1):
        copy_next(feed, steps.train_batch)
        if step == 1 and world.rank == world.size - 1:
            steps.train_batch["mean"][0] = math.nan
        steps.step()
    feed.close()
    found = {"flags": of_all(steps.health.first_bad.tolist())}
    try:
        reporter.step(steps)
    except Fault as error:
        found["said"] = of_all(str(error))
    reporter.close()
    return found


def loading_nan(cfg, world, folder):
    """What `load_pretrained` raises on every rank when a NaN is in the rows of the last rank alone."""
    net, path = lively_net(cfg, world), folder / "nan.safetensors"
    tensors = whole(net)
    tensors["img_in.weight"][-1, 0] = math.nan
    if world.rank == 0:
        save_file(tensors, path)
    dist.barrier()
    try:
        weights.load_pretrained(net, path, cfg.model)
    except Refusal as error:
        return of_all(str(error))
    return of_all("")


def main(data, out):
    out, replicate = Path(out), 2 if os.environ.get("WORLD_SIZE") == "4" else 1
    cfg = clipped_config(Path(data), parallel__replicate=replicate)
    world = ranks.start(cfg.parallel)
    import checkpoint_ranks  # it imports this file, too

    found = {"mesh": world.mesh.mesh.tolist(), "dimensions": world.mesh.mesh_dim_names}
    found["initial"] = initial(cfg, world)
    micro = cfg.train.global_batch // world.size // MICRO_BATCHES[world.size]
    for name in SPLITS if world.size == 3 else list(SPLITS)[:4]:
        own = {"train__micro_batch": micro if "accumulated" in name else 0}
        found[name] = training(config_file.replace(cfg, **own, **SPLITS[name]), world)
    if world.size == 3:
        found["bf16"] = training(config_file.replace(cfg, **BF16), world)
        found["disturbed"] = training(cfg, world, disturbed=True)
        found["narrow"] = training(config_file.replace(cfg, **NARROW), world)
        found["reporting"] = reporting(cfg, world, out)
        found["loading a NaN"] = loading_nan(cfg, world, out)
        found["fp8"] = precision_ranks.measure(world, out / "fp8")
    if world.size == 4:
        found["fp8 gathers"] = precision_ranks.gathers(precision_ranks.fp8_config(), world)
    if world.size in (2, 3):
        found["rounding"] = precision_ranks.rounding(world, micro=2)
    found["validation"] = validation(cfg, world)
    found["checkpoint"] = checkpoint_ranks.measure(world, out)
    if world.rank == 0:
        torch.save(found, out / "found.pt")
    ranks.stop()
    return 0


if __name__ == "__main__":
    cli.exit_now(main(*sys.argv[1:]))
