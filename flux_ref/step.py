"""One training step and one validation step: functions that update net, opt, health and sums in place.

Their batch lies in the same device memory at every step, so that a graph can hold them (graphs.py). Eager, compiled and
captured runs call the same functions; only what wraps them differs (step_runner.py).

What the words spec, numerics, port and sync mean in comments: PORTING.md.
"""

import torch
from torch import Tensor, nn

from flux_ref import flow, schedule
from flux_ref.arithmetic import DTYPES
from flux_ref.config import Config
from flux_ref.data import Batch
from flux_ref.optim import ShardedAdamW
from flux_ref.sharding import ShardedFlux

NEVER = -1.0


class Health:
    """Remembers on the device the first step whose loss or norm was not finite. The host does not wait.

    step:      the number of the next step, a scalar; the first step is 0. fp64 counts exactly and holds NEVER, too.
    first_bad: (2,) fp64, the step of the first bad loss and that of the first bad norm; NEVER where there is none.
    """

    def __init__(self, device: torch.device):
        self.step = torch.empty((), dtype=torch.float64, device=device)
        self.first_bad = torch.empty(2, dtype=torch.float64, device=device)
        self.restart(0)

    def restart(self, step: int) -> None:
        """Forget all, in place."""
        self.step.fill_(step)
        self.first_bad.fill_(NEVER)

    def update(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Note a step if its loss or norm, scalars on the device, is not finite."""
        bad = ~torch.stack((loss, grad_norm)).isfinite()
        is_first = bad & (self.first_bad == NEVER)
        self.first_bad.copy_(torch.where(is_first, self.step, self.first_bad))
        self.step += 1


def train_step(net: ShardedFlux, opt: ShardedAdamW, batch: Batch, health: Health, cfg: Config) -> tuple[Tensor, Tensor]:
    """Forward, backward, clip and update over one rank's batch, at opt.lr, which StepRunner.step has set.

    Each rank takes the mean over its own rows. FSDP2 then takes the mean over the ranks.
    Returns this rank's loss and the gradient norm of all ranks before clipping, both fp32 device scalars.
    """
    rows = len(batch["t"])
    micro = min(cfg.train.micro_batch or rows, rows)  # which divides rows (config_file.validate_world)
    loss = torch.zeros((), device=batch["t"].device)
    for first in range(0, rows, micro):
        part = {name: tensor[first : first + micro] for name, tensor in batch.items()}
        is_last = first + micro == rows
        # port: the weights' gradients of a micro-batch are in parallel.dtype. They are cast to reduce_dtype, and
        # summed over ranks by a reduce-scatter. The sum over micro-batches is fp32; with replicas it is reduce_dtype.
        # The last backward also ends in an all-reduce over the replicas.
        net.set_requires_all_reduce(is_last)
        net.set_is_last_backward(is_last)  # FSDP2 then finishes what it has queued
        for unit in net.kept:
            unit.set_reshard_after_backward(is_last, recurse=False)
        part_loss = flow.losses(net, part, DTYPES[cfg.parallel.dtype]).sum() / rows
        part_loss.backward()
        loss += part_loss.detach()
    grad_norm = opt.step()
    health.update(loss, grad_norm)
    return loss, grad_norm


def validation_step(net: nn.Module, batch: Batch, sums: Tensor, cfg: Config) -> None:
    """Add a batch to sums, (2, TIMESTEPS) fp64: per timestep: number of rows, sum of losses.

    A row of padding has no timestep, so it counts nowhere.
    """
    with torch.no_grad():
        losses_B = flow.losses(net, batch, DTYPES[cfg.parallel.dtype]).double()
        stats_2B = torch.stack((torch.ones_like(losses_B), losses_B))
        # numerics: a product with a one-hot matrix sums in a fixed order. Scattered adds on a GPU do not.
        one_hot = batch["timestep"][:, None] == torch.arange(schedule.TIMESTEPS, device=sums.device)
        sums += stats_2B @ one_hot.double()
