"""One training step and one validation step, as plain functions over static device buffers.

Eager, compiled and captured runs call the same functions. Only what wraps the functions differs (steps.py).
"""

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flux_ref import flow, schedule, sharding
from flux_ref.config import Config, rank_batch
from flux_ref.data import Batch, synthetic
from flux_ref.errors import Fault
from flux_ref.optim import Optimizer
from flux_ref.ranks import World
from flux_ref.speed import regions
from flux_ref.speed.precision import Precision

NEVER = -1.0


@dataclass
class State:
    """All that outlives a step. What is not in here does not survive a restart."""

    net: nn.Module
    opt: Optimizer | None  # None in evaluation
    precision: Precision  # the stages of the policy, and the history of delayed scales
    step: int = 0  # optimizer steps done
    samples: int = 0  # training samples consumed by all ranks: the clock of the benchmark

    @classmethod
    def build(cls, cfg: Config, world: World, seed: int | None, trains: bool = True) -> "State":
        """A sharded net, its optimizer and its precision. seed: of the weights; None leaves the weights undefined."""
        return cls.of(sharding.build(cfg, world, seed), cfg, world, trains)

    @classmethod
    def of(cls, net: nn.Module, cfg: Config, world: World, trains: bool = True) -> "State":
        """The state of a sharded net before its first step. trains: with an optimizer."""
        opt = Optimizer(net, cfg.optim, world) if trains else None
        first = world.rank * rank_batch(cfg, world.size)
        return cls(net, opt, Precision(net, cfg, world.device, first))

    def advance(self, global_batch: int) -> None:
        self.step = self.step + 1
        self.samples = self.samples + global_batch


class Health:
    """Remembers on the device the first step whose loss or norm was not finite. The host does not wait.

    flags: (steps taken, step of the first bad loss, step of the first bad norm) in fp64. The first step is 0. NEVER
           stands where no loss or norm was bad.
    """

    def __init__(self, device: torch.device, step: int = 0):
        self.flags = torch.empty(3, dtype=torch.float64, device=device)
        self.restart(step)

    def restart(self, step: int) -> None:
        """Forget all, in place."""
        self.flags.fill_(NEVER)[0] = step

    def update(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Look at one step. loss, grad_norm: scalars on the device."""
        bad = ~torch.stack((loss, grad_norm)).isfinite()
        first = bad & (self.flags[1:] == NEVER)
        self.flags[1:] = torch.where(first, self.flags[0], self.flags[1:])
        self.flags[0] += 1


def train_step(state: State, batch: Batch, health: Health, cfg: Config) -> tuple[Tensor, Tensor]:
    """Forward, backward, clip and update over one rank's batch, micro-batch by micro-batch.

    Each rank takes the mean over its own rows. FSDP2 then takes the mean over the ranks.
    Returns this rank's loss and the gradient norm of all ranks before clipping, both fp32 device scalars.
    """
    rows = batch["t"].shape[0]
    micro = cfg.train.micro_batch or rows
    dtype = sharding.DTYPES[cfg.parallel.dtype]
    loss = torch.zeros((), device=batch["t"].device)
    for start in range(0, rows, micro):
        part = {name: tensor[start : start + micro] for name, tensor in batch.items()}
        last = start + micro == rows
        # Each micro-batch is reduced to shards at once. Replicas are averaged with the last micro-batch only.
        state.net.set_is_last_backward(last)
        state.precision.micro_batch(start)
        state.net.set_requires_all_reduce(last)
        part_loss = (flow.losses(state.net, part, dtype) * part["weight"]).sum() / rows
        part_loss.backward()
        loss += part_loss.detach()
    norm_factor = state.precision.remember_magnitudes()  # NaN where a magnitude was not finite
    grad_norm = state.opt.step(norm_factor)
    health.update(loss, grad_norm)
    return loss, grad_norm


def validation_step(net: nn.Module, batch: Batch, sums: Tensor, cfg: Config) -> None:
    """Add a batch to sums, (3, 8) fp64: per timestep the sum of weights, of losses and of squared losses."""
    with torch.no_grad():
        losses = flow.losses(net, batch, sharding.DTYPES[cfg.parallel.dtype]).double()
        weight = batch["weight"].double()
        rows = torch.stack((weight, weight * losses, weight * losses.square()))
        # numerics: a product with a one-hot matrix sums in a fixed order. Scattered adds on a GPU do not.
        one_hot = batch["timestep"][:, None] == torch.arange(schedule.TIMESTEPS, device=sums.device)
        sums += rows @ one_hot.double()


def warm_up(state: State, train_batch: Batch, val_batch: Batch, cfg: Config) -> float:
    """Real steps on synthetic batches before the clock starts. They compile, allocate and connect everything.

    spec: weights stay bit-identical, because at learning rate 0 AdamW's decay factor is 1 and its update is 0. Moments,
    step counts and the history of scales are zeroed afterwards. Returns the seconds of the last step with validation.
    """
    few = synthetic(cfg.model, rows=8)
    for batch in (train_batch, val_batch):
        for name, tensor in batch.items():
            for part in tensor.split(8):
                part.copy_(few[name][: len(part)])
    state.opt.lr.zero_()
    health = Health(state.opt.lr.device)
    seconds = 0.0
    sums = torch.zeros(3, schedule.TIMESTEPS, dtype=torch.float64, device=health.flags.device)
    for phase in state.precision.phases:
        state.precision.begin(phase)
        for _ in range(cfg.train.synthetic_steps):
            begin = time.perf_counter()
            train_step(state, train_batch, health, cfg)
            validation_step(state.net, val_batch, sums, cfg)
            sharding.reshard(state.net)
            if health.flags[1:].max() != NEVER:  # sync: before the clock starts
                raise Fault("the warm-up's loss or gradient norm is not finite; the device or a library is at fault")
            seconds = time.perf_counter() - begin
    state.opt.reset()
    state.precision.reset()
    if cfg.parallel.compile and cfg.train.synthetic_steps:
        regions.forbid_recompilation()
    return seconds
