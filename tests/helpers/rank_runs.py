"""Measures, on every rank of one launch, what test_sharding, test_evaluate, test_fp8 and test_checkpoint assert.

Starting torch takes longer than all the measuring, so there is one launch per number of ranks. Rank 0 writes the
findings. With 4 ranks the world is HSDP, 2 replicas x 2 shards.
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import precision_ranks
import torch
import torch.distributed as dist
from conftest import MICRO, data_overrides, script
from lively_nets import lively, lively_net, of_all, whole
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor

from flux_ref import checkpoint, config_file, errors, ranks, schedule, sharding, weights
from flux_ref.benchmark.mllog import BenchmarkLog
from flux_ref.config import Config
from flux_ref.data import TrainSet, ValSet, allocate, copy_next
from flux_ref.errors import Fault, Refusal
from flux_ref.evaluate import validation_loss
from flux_ref.model import Flux
from flux_ref.optim import ShardedAdamW
from flux_ref.ranks import World
from flux_ref.report import Reporter
from flux_ref.step import Health, train_step
from flux_ref.step_runner import State, StepRunner, Validator

SIZES = (1, 3, 4)  # numbers of ranks
STEPS = 4
CLIP = 1.2  # the norms of these steps lie on both sides of it
BASE = {"optim__clip_norm": CLIP, "train__caption_drop": 0.5}
NARROW = {"model__hidden": 12, "model__rope_axes": (0, 2, 2)}  # heads of 4 features: 3 ranks hold 2, 2 and 0
SPLITS = {  # ways to run the same steps
    "base": {},
    "accumulated": {"train__micro_batch": 1, "optim__ema": 24},
    "regions of 2, kept gathered": {"parallel__region_blocks": 2, "parallel__kept_regions": -1},
}
LEVERS = {"parallel__kept_regions": 2}  # of FSDP2, none of which changes a bit
GRADIENT_SCALES = (1e-3, 1.0, 1e-2)  # of three made-up gradients: unclipped, clipped, unclipped
VAL_SAMPLES = 36  # the clock at which validation is measured
TIMEOUT_S = 100


class Measured(dict):
    """The findings by number of ranks. One rank is this process, which must have no world yet."""

    def __init__(self, data: Path, shared: Callable):
        super().__init__()
        self.data, self.shared = data, shared
        for size in SIZES[:2]:
            self[size]

    def __missing__(self, size: int) -> dict:
        def measure(folder: Path) -> None:
            folder.mkdir()
            if size == 1:
                assert main(str(self.data), str(folder)) == 0
                return
            process = script("tests/helpers/rank_runs.py", self.data, folder, ranks=size, timeout=TIMEOUT_S)
            assert process.returncode == 0, process.stderr[-4000:]

        self[size] = torch.load(self.shared(f"{size}_ranks", measure) / "found.pt")
        return self[size]

    def checkpoint(self, size: int) -> Path:
        """The checkpoint that so many ranks have written."""
        self[size]
        return checkpoint_of(self.data.parent / f"{size}_ranks")


def checkpoint_of(run: Path) -> Path:
    (path,) = checkpoint.list_checkpoints(run)
    return path


def micro_config(data: Path, **values: object) -> Config:
    """The micro config with clipping in effect and half of the captions dropped."""
    return config_file.replace(config_file.load(MICRO, data_overrides(data)), **(BASE | values))


def open_sets(cfg: Config, world: World) -> tuple[TrainSet, ValSet]:
    sets = TrainSet(cfg, world.rank, world.size, False), ValSet(cfg, world.rank, world.size, False)
    for data_set in sets:
        data_set.open()
    return sets


def initial(cfg: Config, world: World) -> dict:
    net = sharding.build(cfg, world, seed=cfg.train.seed)
    rows = {name: len(p.to_local()) for name, p in sharding.named_parameters(net).items()}
    return {"whole": whole(net), "rows": of_all(rows)}


def mean(history: list[Tensor], cfg: Config) -> Tensor:
    """The average of the weights of a history, which begins before the first step.

    Weights count half after each half-life. Those before the first step count what is left by all steps.
    """
    left = 2 ** (-cfg.train.global_batch / cfg.optim.ema)
    counts = [left**age for age in reversed(range(len(history)))]
    counts[1:] = [(1 - left) * count for count in counts[1:]]
    return sum(count * weight.double() for count, weight in zip(counts, history))


def average_error(average: Tensor, history: list[Tensor], cfg: Config) -> float:
    """The largest error of an average on any rank. history, average: this rank's rows."""
    return max(of_all(float((average - mean(history, cfg)).abs().max()) if average.numel() else 0.0))


def training(cfg: Config, world: World, disturbed: bool = False) -> dict:
    """A few steps from lively weights. disturbed: after a warm-up, and with validations in between."""
    net = lively_net(cfg, world)
    state = State.of(net, cfg, world)
    train_set, val_set = open_sets(cfg, world)
    batch = allocate(cfg.model, cfg.train.global_batch // world.size)
    found = {}
    if disturbed:
        StepRunner(state, cfg, world).warm_up()
        found["warm"] = whole(net)
        states = [item for per_shard in state.opt.adamw.state.values() for item in per_shard.items()]
        found["largest state"] = max(of_all(max(float(one.abs().sum()) for kind, one in states if kind != "ema")))
        found["states"] = len(states)
    feed, health = train_set.feed(0), Health(world.device)
    losses, norms = [], []
    history = [torch.cat([shard.detach().flatten() for shard in state.opt.shards])]
    for _ in range(STEPS):
        copy_next(feed, batch)
        state.opt.lr.fill_(schedule.lr(state.step, cfg.optim.lr, cfg.optim.warmup_steps))
        loss, norm = train_step(state.net, state.opt, batch, health, cfg)
        state.advance(cfg.train.global_batch)
        losses.append(ranks.gather(loss.double()))
        norms.append(ranks.gather(norm.double()))
        history.append(torch.cat([shard.detach().flatten() for shard in state.opt.shards]))
        if disturbed:
            validation_loss(StepRunner(state, cfg, world), val_set, state.samples)
    feed.close()
    if averages := state.opt.moments().get("ema"):
        average = torch.cat([tensor.flatten() for tensor in averages])
        found["error of average"] = average_error(average, history, cfg)
    local = [parameter.to_local() for parameter in state.opt.parameters]
    shared = [a.data_ptr() == b.data_ptr() for a, b in zip(state.opt.shards, local) if a.numel()]
    return found | {
        "losses": [sum(ranks) / world.size for ranks in losses],
        "norms": norms,
        "whole": whole(net),
        "names": list(sharding.named_parameters(net)),
        "storage shared": all(of_all(all(shared))),
        "flags": [float(health.step), *health.first_bad.tolist()],
    }


def optimizer(cfg: Config, world: World) -> dict:
    """Optimizer over made-up gradients."""
    net = lively_net(cfg, world)
    opt = ShardedAdamW(net, cfg, world)
    norms = []
    for scale in GRADIENT_SCALES:
        for name, parameter in sharding.named_parameters(net).items():
            gradient = lively(f"gradient {scale} {name}", tuple(parameter.shape)) * scale
            parameter.grad = distribute_tensor(
                gradient, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        opt.lr.fill_(cfg.optim.lr)
        norms.append(float(opt.step()))
    found = {"norms": norms, "whole": whole(net), "gradients left": sum(p.grad is not None for p in net.parameters())}
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
        local = parameter.grad.to_local()
        if world.rank == world.size - 1 and local.numel():
            local.view(-1)[0] = math.nan
    return found | {"norm with a NaN": float(opt.step())}


def validation(cfg: Config, world: World) -> dict:
    """Validation of lively weights in several ways, and of others that are put in their place."""
    net = lively_net(cfg, world)

    def measure(net: Flux, **values: object) -> dict:
        own = config_file.replace(cfg, **values)
        _, val_set = open_sets(own, world)
        steps = Validator(net, own, world)
        result = validation_loss(steps, val_set, VAL_SAMPLES)
        return vars(result) | {"of all ranks": of_all(result.loss)}

    found = {f"batches of {rows}": measure(net, eval__batch=rows) for rows in (8, 5)}
    other = lively_net(cfg, world)
    for one in (net, other):
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.to_local().mul_(1.1)
    found["changed"], found["changed before use"] = measure(net), measure(other)
    return found


def reporting(cfg: Config, world: World, folder: Path) -> dict:
    """What the reporter of every rank says when something is wrong on the last rank."""
    folder = folder / "reporting"
    folder.mkdir(exist_ok=True)
    cfg = config_file.replace(cfg, run__dir=str(folder))
    reporter = Reporter(cfg, world, BenchmarkLog().text)
    reporter.begin(0, 0, warm_s=0.0)
    net = lively_net(cfg, world)
    state = State.of(net, cfg, world)
    train_set, _ = open_sets(cfg, world)
    feed, batch = train_set.feed(0), allocate(cfg.model, cfg.train.global_batch // world.size)

    def complaint(health: Health) -> str:
        one = torch.ones(())
        try:
            reporter.step(state, one, one, health, 0.0)
        except Fault as error:
            return str(error)
        return ""

    found = {"fine": of_all(complaint(Health(world.device)))}
    health = Health(world.device)
    health.update(torch.ones(()), torch.ones(()))
    health.update(torch.ones(()), torch.tensor(math.inf))
    found["infinite norm"] = of_all(complaint(health))

    health = Health(world.device)
    for step in range(STEPS):
        copy_next(feed, batch)
        if step == 1 and world.rank == world.size - 1:
            batch["mean"][0] = math.nan
        state.opt.lr.fill_(cfg.optim.lr)
        train_step(state.net, state.opt, batch, health, cfg)
        state.advance(cfg.train.global_batch)
    found["flags"] = of_all(health.first_bad.tolist())
    found["NaN at step 1"] = of_all(complaint(health))
    feed.close()
    reporter.close()
    return found


def refusing(world: World) -> list[str]:
    """What `agreed` raises on every rank when only the last rank is refused."""
    try:
        with ranks.agreed():
            if world.rank == world.size - 1:
                raise Refusal("no such shard")
    except Refusal as error:
        return of_all(str(error))
    return of_all("")


def loading_nan(cfg: Config, world: World, folder: Path) -> list[str]:
    """What `load_everywhere` raises on every rank when a NaN is in the rows of the last rank alone."""
    net, path = lively_net(cfg, world), folder / "nan.safetensors"
    tensors = whole(net)
    tensors["img_in.weight"][-1, 0] = math.nan
    if world.rank == 0:
        save_file(tensors, path)
    dist.barrier()
    try:
        weights.load_everywhere(net, path, cfg.model)
    except Refusal as error:
        return of_all(str(error))
    return of_all("")


def main(data: str, out: str) -> int:
    out, replicate = Path(out), 2 if os.environ.get("WORLD_SIZE") == "4" else 1
    cfg = micro_config(Path(data), parallel__replicate=replicate)
    world = ranks.start(cfg.parallel)
    import checkpoint_ranks  # it imports this file, too

    found = {"mesh": world.mesh.mesh.tolist(), "dimensions": world.mesh.mesh_dim_names}
    found["initial"] = initial(cfg, world)
    for name in SPLITS if world.size == 3 else ("base", "accumulated"):
        found[name] = training(config_file.replace(cfg, **SPLITS[name]), world)
    if world.size == 3:
        found["bf16"] = training(config_file.replace(cfg, parallel__dtype="bf16"), world)
        found["disturbed"] = training(config_file.replace(cfg, optim__ema=24), world, disturbed=True)
        found["narrow"] = training(config_file.replace(cfg, **NARROW), world)
        found["reporting"] = reporting(cfg, world, out)
        found["refusing"] = refusing(world)
        found["loading a NaN"] = loading_nan(cfg, world, out)
        found["fp8"] = precision_ranks.measure(world, out / "fp8")
    found["levers"] = training(config_file.replace(cfg, **LEVERS), world)
    if world.size == 4:
        flat = replace(world, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("shard",)))
        found["flat initial"] = initial(cfg, flat)
        found["flat"] = training(cfg, flat)
        found["fp8 gathers"] = precision_ranks.gathers(precision_ranks.fp8_config(), world)
    found["optimizer"] = optimizer(config_file.replace(cfg, optim__ema=24), world)
    if world.size in (2, 3):
        found["rounding"] = precision_ranks.rounding(world, micro=2)
    found["validation"] = validation(cfg, world)
    found["checkpoint"] = checkpoint_ranks.measure(world, out)
    if world.rank == 0:
        torch.save(found, out / "found.pt")
    ranks.stop()
    return 0


if __name__ == "__main__":
    errors.leave(main(*sys.argv[1:]))
