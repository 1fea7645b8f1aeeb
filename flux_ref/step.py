"""One training step and one validation step, as plain functions over static device buffers.

Eager, compiled and captured runs call the same functions. Only what wraps the functions differs (step_runner.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flux_ref import flow, schedule, sharding
from flux_ref.config import Config, rank_batch
from flux_ref.data import Batch
from flux_ref.optim import Optimizer, ShardedAdamW
from flux_ref.ranks import World
from flux_ref.speed.precision import Precision

NEVER = -1.0


@dataclass
class State:
    """What outlives a step. A checkpoint holds it."""

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
        opt = ShardedAdamW(net, cfg, world) if trains else None
        first_sample = world.rank * rank_batch(cfg, world.size)
        return cls(net, opt, Precision(net, cfg, world.device, first_sample))

    def set_clock(self, step: int, samples: int) -> None:
        """Set the counters, and choose how the next step and the next validation compute."""
        self.step = step
        self.samples = samples
        self.precision.begin(step)

    def advance(self, global_batch: int) -> None:
        """Count one training step."""
        self.set_clock(self.step + 1, self.samples + global_batch)


class Health:
    """Remembers on the device the first step whose loss or norm was not finite. The host does not wait.

    step:      the number of the next step, a scalar in fp64. The first step is 0.
    first_bad: (2,) fp64, the step of the first bad loss and that of the first bad norm; NEVER where there is none.
    """

    def __init__(self, device: torch.device, step: int = 0):
        self.step = torch.empty((), dtype=torch.float64, device=device)
        self.first_bad = torch.empty(2, dtype=torch.float64, device=device)
        self.restart(step)

    def restart(self, step: int) -> None:
        """Forget all, in place."""
        self.step.fill_(step)
        self.first_bad.fill_(NEVER)

    def update(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Look at one step. loss, grad_norm: scalars on the device."""
        bad = ~torch.stack((loss, grad_norm)).isfinite()
        is_first = bad & (self.first_bad == NEVER)
        self.first_bad.copy_(torch.where(is_first, self.step, self.first_bad))
        self.step += 1


def train_step(state: State, batch: Batch, health: Health, cfg: Config) -> tuple[Tensor, Tensor]:
    """Forward, backward, clip and update over one rank's batch, micro-batch by micro-batch.

    Each rank takes the mean over its own rows. FSDP2 then takes the mean over the ranks.
    Returns this rank's loss and the gradient norm of all ranks before clipping, both fp32 device scalars.
    """
    rows = len(batch["t"])
    micro = cfg.train.micro_batch or rows
    dtype = sharding.DTYPES[cfg.parallel.dtype]
    loss = torch.zeros((), device=batch["t"].device)
    for first in range(0, rows, micro):
        part = {name: tensor[first : first + micro] for name, tensor in batch.items()}
        is_last = first + micro == rows
        # Each micro-batch is reduced to shards at once. Replicas are averaged with the last micro-batch only.
        state.net.set_is_last_backward(is_last)
        state.net.set_requires_all_reduce(is_last)
        state.precision.micro_batch(first)
        part_loss = flow.losses(state.net, part, dtype).sum() / rows
        part_loss.backward()
        loss += part_loss.detach()
    norm_factor = state.precision.remember_magnitudes()  # NaN where a magnitude was not finite
    grad_norm = state.opt.step(norm_factor)
    health.update(loss, grad_norm)
    return loss, grad_norm


def validation_step(net: nn.Module, batch: Batch, sums: Tensor, cfg: Config) -> None:
    """Add a batch to sums, (3, TIMESTEPS) fp64: per timestep rows, their losses and squared losses.

    A row of padding has no timestep, so it counts nowhere.
    """
    with torch.no_grad():
        losses = flow.losses(net, batch, sharding.DTYPES[cfg.parallel.dtype]).double()
        rows = torch.stack((torch.ones_like(losses), losses, losses.square()))
        # numerics: a product with a one-hot matrix sums in a fixed order. Scattered adds on a GPU do not.
        one_hot = batch["timestep"][:, None] == torch.arange(schedule.TIMESTEPS, device=sums.device)
        sums += rows @ one_hot.double()
