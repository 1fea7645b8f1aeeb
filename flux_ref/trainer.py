"""The training step: what outlives it, and the training and the validation step on fixed buffers.

`Trainer.step` takes one step of the loop in train.py. `train_step` computes it: forward, backward, clip and update.
Every batch lies in the same device memory, so a graph can hold a step (graphs.py). Eager, compiled and captured runs
call the same functions; only what wraps them differs.

A batch is copied from pinned memory just before its step, on the same stream. A second set of device buffers would
only hide the transfer: 147 MB for 64 samples of schnell, about 3 ms (calculated) in a step of more than a second.

What the words spec, numerics, port and sync mean in comments: PORTING.md.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from flux_ref import flow, schedule, sharding
from flux_ref.cli import Fault, Mark, no_op_mark
from flux_ref.config import Config, rank_batch
from flux_ref.dataloader import Batch, Feed, allocate, copy_next, synthetic
from flux_ref.optim import ShardedAdamW
from flux_ref.precision.recipe import DTYPES
from flux_ref.ranks import World
from flux_ref.sharding import ShardedFlux

NEVER = -1.0


class Health:
    """What is known of the training steps, on the device: the host does not wait.

    loss:      this rank's, of the newest step. grad_norm: the same, of all ranks before clipping.
    step:      the number of the next step, a scalar; the first step is 0. fp64 counts exactly and holds NEVER, too.
    first_bad: (2,) fp64, the step of the first bad loss and that of the first bad norm; NEVER where there is none.
    """

    def __init__(self, device: torch.device):
        self.loss = torch.zeros((), device=device)
        self.grad_norm = torch.zeros((), device=device)
        self.step = torch.empty((), dtype=torch.float64, device=device)
        self.first_bad = torch.empty(2, dtype=torch.float64, device=device)
        self.restart(0)

    def restart(self, step: int) -> None:
        """Forget all but the newest step, in place. step: the next one."""
        self.step.fill_(step)
        self.first_bad.fill_(NEVER)

    def update(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Note a step. loss, grad_norm: scalars on the device."""
        self.loss.copy_(loss)
        self.grad_norm.copy_(grad_norm)
        bad = ~torch.stack((loss, grad_norm)).isfinite()
        is_first = bad & (self.first_bad == NEVER)
        self.first_bad.copy_(torch.where(is_first, self.step, self.first_bad))
        self.step += 1


def train_step(net: ShardedFlux, opt: ShardedAdamW, batch: Batch, health: Health, cfg: Config) -> tuple[Tensor, Tensor]:
    """Forward, backward, clip and update over one rank's batch, at opt.lr, which Trainer.step has set.

    Each rank takes the mean over its own rows. FSDP2 then takes the mean over the ranks.
    Returns this rank's loss and the gradient norm of all ranks before clipping, both fp32 device scalars.
    """
    rows = len(batch["t"])
    micro = min(cfg.train.micro_batch or rows, rows)  # which divides rows (config_file.validate_world)
    loss = torch.zeros((), device=batch["t"].device)
    for first in range(0, rows, micro):
        part = {name: tensor[first : first + micro] for name, tensor in batch.items()}
        is_last = first + micro == rows
        # port: the weights' gradients of a micro-batch are in compute.dtype. They are cast to reduce_dtype, and
        # summed over ranks by a reduce-scatter. The sum over micro-batches is fp32; with replicas it is reduce_dtype.
        # The last backward also ends in an all-reduce over the replicas.
        net.set_requires_all_reduce(is_last)
        net.set_is_last_backward(is_last)  # FSDP2 then finishes what it has queued
        for unit in net.kept:
            unit.set_reshard_after_backward(is_last, recurse=False)
        part_loss = flow.losses(net, part, DTYPES[cfg.compute.dtype]).sum() / rows
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
        losses_B = flow.losses(net, batch, DTYPES[cfg.compute.dtype]).double()
        stats_2B = torch.stack((torch.ones_like(losses_B), losses_B))
        # numerics: a product with a one-hot matrix sums in a fixed order. Scattered adds on a GPU do not.
        one_hot = batch["timestep"][:, None] == torch.arange(schedule.TIMESTEPS, device=sums.device)
        sums += stats_2B @ one_hot.double()


class TrainState:
    """What outlives a step. A checkpoint holds it.

    recipe:  how the net computes, and the history of that.
    step:    optimizer steps done.
    samples: training samples consumed by all ranks: the clock of the benchmark.
    """

    def __init__(self, net: ShardedFlux, cfg: Config, world: World):
        self.net = net
        self.opt = ShardedAdamW(net, cfg, world)
        self.recipe = net.recipe
        self.step = 0
        self.samples = 0

    def set_counters(self, step: int, samples: int) -> None:
        """Set the counters, and choose how the next step and the next validation compute."""
        self.step = step
        self.samples = samples
        self.recipe.begin(step)

    def advance(self, global_batch: int) -> None:
        """Count one training step."""
        self.set_counters(self.step + 1, self.samples + global_batch)


class Validator:
    """The validation step of one net, on the buffers that the step reads and writes.

    validate: adds `val_batch` to `sums`, as `validation_step` does. Every rank calls it equally often.
    """

    def __init__(self, net: ShardedFlux, cfg: Config, world: World):
        self.net = net
        self.cfg = cfg
        self.val_batch = allocate(cfg.model, cfg.eval.batch, world.device)
        self.sums = torch.zeros(2, schedule.TIMESTEPS, dtype=torch.float64, device=world.device)
        self.validate: Callable[[], None] = partial(validation_step, net, self.val_batch, self.sums, cfg)

    def reshard(self) -> None:
        """Free all gathered weights, after a forward without backward (sharding.reshard)."""
        sharding.reshard(self.net)


class Trainer(Validator):
    """The training step beside the validation step. Both compute as TrainState.set_counters has chosen.

    train: one optimizer step on `train_batch` at `opt.lr`, as `train_step` takes it. The clock does not move.
    """

    def __init__(self, state: TrainState, cfg: Config, world: World):
        super().__init__(state.net, cfg, world)
        self.state = state
        self.train_batch = allocate(cfg.model, rank_batch(cfg, world.size), world.device)
        self.health = Health(world.device)
        self.train: Callable[[], object] = partial(train_step, state.net, state.opt, self.train_batch, self.health, cfg)
        self.data_wait_s = 0.0  # seconds that the device has waited for training data
        self.graph_bytes = 0  # of device memory that captured steps take outside of torch's allocator

    def step(self, feed: Feed | None = None) -> None:
        """One training step: the next batch of a feed, or the old one; learning rate; forward to update; clock."""
        if feed:
            self.data_wait_s += copy_next(feed, self.train_batch)
        self.state.opt.lr.fill_(schedule.lr(self.state.step, self.cfg.optim))
        self.train()
        self.state.advance(self.cfg.train.global_batch)

    def warm_up(self, mark: Mark = no_op_mark) -> None:
        """Real steps on synthetic batches before the clock starts. They compile, allocate and connect everything.

        mark: called before each step with its name.

        spec: weights stay bit-identical, because the optimizer changes no weight at learning rate 0.
        Moments, step counts, the history of scales and the health are reset afterwards. Raises: Fault.
        """
        few = synthetic(self.cfg.model, rows=8)
        for batch in (self.train_batch, self.val_batch):
            for name, tensor in batch.items():
                tensor.copy_(few[name][torch.arange(len(tensor)) % 8])
        self.state.opt.lr.zero_()
        for phase in self.state.recipe.phases:
            self.state.recipe.begin(phase)
            for step in range(self.cfg.train.synthetic_steps):
                mark(f"step {step} of the warm-up, phase {phase}")
                self.train()
                self.validate()
                self.reshard()
                if self.health.first_bad.max() != NEVER:  # sync: before the clock starts
                    raise Fault(
                        "the warm-up's loss or gradient norm is not finite: weights of init.weights or of a checkpoint"
                        " are too large, or the device or a library is at fault"
                    )
        self.reset()
        if self.cfg.compute.compile and self.cfg.train.synthetic_steps:
            torch.compiler.set_stance("fail_on_recompile")  # another shape, dtype or mode is an error from now on

    def reset(self) -> None:
        """Moments, step counts, the history of scales and the health are as before the first step, in place."""
        self.state.opt.lr.zero_()
        self.state.opt.reset()
        self.state.recipe.reset()
        self.health.restart(0)

    def capture(self, mark: Mark = no_op_mark) -> None:
        """Steps that run eagerly need no capture. mark: called before each capture with its name."""

    def shortage(self) -> str:
        """Why no picture can be drawn beside captured steps; "" if it can. The same on all ranks. Collective."""
        return ""

    def close(self) -> None:
        """The end of training. Later steps run eagerly. Collective."""
