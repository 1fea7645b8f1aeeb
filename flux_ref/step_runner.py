"""What outlives a step, and the training and the validation step on fixed buffers. graphs.py replays them as graphs.

A batch is copied from pinned memory just before its step, on the same stream. A second set of device buffers would
only hide the transfer: 147 MB for 64 samples of schnell, about 3 ms (calculated) in a step of more than a second.
"""

import torch

from flux_ref import schedule, sharding
from flux_ref.config import Config, rank_batch
from flux_ref.data import Feed, allocate, copy_next, synthetic
from flux_ref.errors import Fault, Say
from flux_ref.optim import ShardedAdamW
from flux_ref.ranks import World
from flux_ref.sharding import ShardedFlux
from flux_ref.step import NEVER, Health, train_step, validation_step


class State:
    """What outlives a step. A checkpoint holds it.

    arithmetic: how the net computes, and the history of that.
    step:       optimizer steps done.
    samples:    training samples consumed by all ranks: the clock of the benchmark.
    """

    def __init__(self, net: ShardedFlux, cfg: Config, world: World):
        self.net = net
        self.opt = ShardedAdamW(net, cfg, world)
        self.arithmetic = net.arithmetic
        self.step = 0
        self.samples = 0

    def set_counters(self, step: int, samples: int) -> None:
        """Set the counters, and choose how the next step and the next validation compute."""
        self.step = step
        self.samples = samples
        self.arithmetic.begin(step)

    def advance(self, global_batch: int) -> None:
        """Count one training step."""
        self.set_counters(self.step + 1, self.samples + global_batch)


class Validator:
    """The validation step of one net, on the buffers that the step reads and writes."""

    def __init__(self, net: ShardedFlux, cfg: Config, world: World):
        self.net = net
        self.cfg = cfg
        self.val_batch = allocate(cfg.model, cfg.eval.batch, world.device)
        self.sums = torch.zeros(2, schedule.TIMESTEPS, dtype=torch.float64, device=world.device)

    def validate(self) -> None:
        """Add `val_batch` to `sums`, as step.validation_step does. Every rank calls this equally often."""
        validation_step(self.net, self.val_batch, self.sums, self.cfg)

    def sharded(self) -> None:
        """Free all gathered weights, after a forward without backward (sharding.reshard)."""
        sharding.reshard(self.net)


class StepRunner(Validator):
    """The training step beside the validation step. Both compute as State.set_counters has chosen."""

    def __init__(self, state: State, cfg: Config, world: World):
        super().__init__(state.net, cfg, world)
        self.state = state
        self.train_batch = allocate(cfg.model, rank_batch(cfg, world.size), world.device)
        self.health = Health(world.device)
        self.loss = torch.zeros((), device=world.device)  # this rank's, of the newest step, as is the norm
        self.grad_norm = torch.zeros((), device=world.device)
        self.data_wait_s = 0.0  # seconds that the device has waited for training data
        self.graph_bytes = 0  # of device memory that captured steps take outside of torch's allocator

    def train_on(self, feed: Feed) -> None:
        """The next batch, then `step` on it."""
        self.data_wait_s += copy_next(feed, self.train_batch)
        self.step()

    def step(self) -> None:
        """One training step on `train_batch`: learning rate, `train`, clock."""
        state = self.state
        state.opt.lr.fill_(schedule.lr(state.step, self.cfg.optim))
        self.train()
        state.advance(self.cfg.train.global_batch)

    def train(self) -> None:
        """One optimizer step on `train_batch` at `opt.lr`. The clock does not move."""
        loss, grad_norm = train_step(self.state.net, self.state.opt, self.train_batch, self.health, self.cfg)
        self.loss.copy_(loss)
        self.grad_norm.copy_(grad_norm)

    def warm_up(self, at: Say = lambda place: None) -> None:
        """Real steps on synthetic batches before the clock starts. They compile, allocate and connect everything.

        at: called before each step with its name.

        spec: weights stay bit-identical, because the optimizer changes no weight at learning rate 0.
        Moments, step counts, the history of scales and the health are reset afterwards. Raises: Fault.
        """
        state = self.state
        few = synthetic(self.cfg.model, rows=8)
        for batch in (self.train_batch, self.val_batch):
            for name, tensor in batch.items():
                tensor.copy_(few[name][torch.arange(len(tensor)) % 8])
        state.opt.lr.zero_()
        for phase in state.arithmetic.phases:
            state.arithmetic.begin(phase)
            for step in range(self.cfg.train.synthetic_steps):
                at(f"step {step} of the warm-up, phase {phase}")
                StepRunner.train(self)
                Validator.validate(self)
                self.sharded()
                if self.health.first_bad.max() != NEVER:  # sync: before the clock starts
                    raise Fault(
                        "the warm-up's loss or gradient norm is not finite: weights of init.weights or of a checkpoint"
                        " are too large, or the device or a library is at fault"
                    )
        self.forget()
        if self.cfg.parallel.compile and self.cfg.train.synthetic_steps:
            sharding.forbid_recompilation()

    def forget(self) -> None:
        """Moments, step counts, the history of scales and the health are as before the first step, in place."""
        self.state.opt.lr.zero_()
        self.state.opt.reset()
        self.state.arithmetic.reset()
        self.health.restart(0)

    def capture(self, at: Say = lambda place: None) -> None:
        """Steps that run eagerly need no capture. at: called before each capture with its name."""

    def shortage(self) -> str:
        """Why no picture can be drawn beside captured steps; "" if it can. The same on all ranks. Collective."""
        return ""

    def close(self) -> None:
        """The end of training. Later steps run eagerly. Collective."""
