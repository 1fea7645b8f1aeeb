"""The training and the validation step on fixed buffers, run eagerly or replayed as captured graphs.

A graph repeats recorded work on the memory that the work used: forward and backward of all micro-batches, collectives,
clipping, the update. So every tensor that a step reads or writes is allocated once and then filled in place: batches,
`opt.lr`, weights, moments, loss, norm, health and sums. A graph holds no generator: draws come with the batch, and
stochastic rounding (precision/) draws from the number of the step, which lies on the device.

A batch is copied from pinned memory just before its step, on the same stream. A second set of device buffers would
only hide the transfer: 147 MB for 64 samples of schnell, about 3 ms (calculated) in a step of more than a second.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from flux_ref import ranks, schedule, sharding
from flux_ref.arithmetic import Arithmetic, plain
from flux_ref.config import Config, rank_batch
from flux_ref.data import HostBatch, allocate, copy_next, synthetic
from flux_ref.errors import Fault, Refusal
from flux_ref.optim import ShardedAdamW
from flux_ref.ranks import World
from flux_ref.speed.graphs import Recorder, obstacle
from flux_ref.speed.settled import require_settled
from flux_ref.step import NEVER, Health, train_step, validation_step

CAPTURED = "captured"
KEPT = []  # graphs that no rank may destroy
WARM_STEPS = 2  # before a capture: the first step allocates lazily; the second is like all later steps


def mode(cfg: Config, device: torch.device) -> str:
    """How a device runs the steps of a run: CAPTURED, or "eager (REASON)".

    Raises: Refusal if graph.enabled=on cannot be honoured.
    """
    if cfg.graph.enabled == "off":
        return "eager (graph.enabled=off)"
    reason = obstacle(device, cfg)
    warm = cfg.train.synthetic_steps
    if not reason and warm < WARM_STEPS:
        reason = f"train.synthetic_steps={warm} must be at least {WARM_STEPS}, the steps before a capture"
    if not reason:
        return CAPTURED
    if cfg.graph.enabled == "on":
        raise Refusal(f"graph.enabled=on cannot be honoured: {reason}; graph.enabled=auto runs eagerly then")
    return f"eager ({reason})"


@dataclass
class State:
    """What outlives a step. A checkpoint holds it, and the skipped samples that data.TrainSet keeps."""

    net: FSDPModule
    opt: ShardedAdamW | None  # None in evaluation
    arithmetic: Arithmetic  # how the net computes, and the history of that
    step: int = 0  # optimizer steps done
    samples: int = 0  # training samples consumed by all ranks: the clock of the benchmark

    @classmethod
    def build(
        cls, cfg: Config, world: World, seed: int | None, arithmetic: Arithmetic | None = None, trains: bool = True
    ) -> "State":
        """A sharded net and its optimizer. seed: of the weights; None leaves the weights undefined.

        arithmetic: arithmetic_of(cfg); None is the plain one. trains: with an optimizer.
        """
        arithmetic = arithmetic or plain(cfg)
        return cls.of(sharding.build(cfg, world, seed, arithmetic), cfg, world, arithmetic, trains)

    @classmethod
    def of(
        cls, net: FSDPModule, cfg: Config, world: World, arithmetic: Arithmetic | None = None, trains: bool = True
    ) -> "State":
        """The state of a sharded net before its first step. arithmetic: that of the net."""
        arithmetic = arithmetic or plain(cfg)
        return cls(net, ShardedAdamW(net, cfg, world, arithmetic.checks) if trains else None, arithmetic)

    def set_clock(self, step: int, samples: int) -> None:
        """Set the counters, and choose how the next step and the next validation compute."""
        self.step = step
        self.samples = samples
        self.arithmetic.begin(step)

    def advance(self, global_batch: int) -> None:
        """Count one training step."""
        self.set_clock(self.step + 1, self.samples + global_batch)


class StepRunner:
    """Runs the training and the validation step of one net on the buffers that the steps read and write.

    Both steps compute as State.set_clock has chosen for the present step.
    A state without an optimizer has a validation step only, which runs eagerly.
    """

    def __init__(self, state: State, cfg: Config, world: World):
        self.state = state
        self.cfg = cfg
        captures = state.opt is not None and mode(cfg, world.device) == CAPTURED
        self.recorder = Recorder(world.device) if captures else None
        self.graphs = {}  # what the recorder returns, with `replay` and `reset`, by name
        rows = rank_batch(cfg, world.size) if state.opt else 0
        self.train_batch = allocate(cfg.model, rows, world.device)
        self.val_batch = allocate(cfg.model, cfg.eval.batch, world.device)
        self.health = Health(world.device)
        self.loss = torch.zeros((), device=world.device)
        self.grad_norm = torch.zeros((), device=world.device)
        self.sums = torch.zeros(3, schedule.TIMESTEPS, dtype=torch.float64, device=world.device)
        self.warm_s = 0.0  # seconds of a training step and a validation batch, once warmed up
        self.data_wait_s = 0.0  # seconds that the device has waited for training data

    def train_on(self, feed: Iterator[HostBatch]) -> tuple[Tensor, Tensor]:
        """The next batch, then `step` on it. Returns what `train` returns."""
        self.data_wait_s += copy_next(feed, self.train_batch)
        return self.step()

    def step(self) -> tuple[Tensor, Tensor]:
        """One training step on `train_batch`: learning rate, `train`, clock. Returns what `train` returns."""
        state = self.state
        state.opt.lr.fill_(schedule.lr(state.step, self.cfg.optim.lr, self.cfg.optim.warmup_steps))
        self.train()
        state.advance(self.cfg.train.global_batch)
        return self.loss, self.grad_norm

    def train(self) -> tuple[Tensor, Tensor]:
        """One optimizer step on `train_batch` at `opt.lr`. The clock does not move.

        Returns this rank's loss and the gradient norm, fp32 device scalars that the next step overwrites.
        """
        if self.graphs:
            self.graphs[f"train {self.state.arithmetic.phase(self.state.step)}"].replay()
        else:
            self._train()
        return self.loss, self.grad_norm

    def validate(self) -> None:
        """Add `val_batch` to `sums`, as step.validation_step does. Every rank calls this equally often."""
        if self.graphs:
            self.graphs[f"validate {self.state.arithmetic.phase(self.state.step)}"].replay()
        else:
            self._validate()

    def _train(self) -> None:
        loss, grad_norm = train_step(self.state.net, self.state.opt, self.train_batch, self.health, self.cfg)
        self.loss.copy_(loss)
        self.grad_norm.copy_(grad_norm)

    def _validate(self) -> None:
        validation_step(self.state.net, self.val_batch, self.sums, self.cfg)

    def warm_up(self) -> None:
        """Real steps on synthetic batches before the clock starts. They compile, allocate and connect everything.

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
            for _ in range(self.cfg.train.synthetic_steps):
                begin = time.perf_counter()
                self._train()
                self._validate()
                sharding.reshard(state.net)
                if self.health.first_bad.max() != NEVER:  # sync: before the clock starts
                    raise Fault(
                        "the warm-up's loss or gradient norm is not finite: weights of init.weights or of a checkpoint"
                        " are too large, or the device or a library is at fault"
                    )
                self.warm_s = time.perf_counter() - begin
        state.opt.reset()
        state.arithmetic.reset()
        self.health.restart(0)
        if self.cfg.parallel.compile and self.cfg.train.synthetic_steps:
            sharding.forbid_recompilation()

    def capture(self, beside: Callable[[], object] | None = None) -> None:
        """Capture the steps as graphs if the mode asks for it. No step is executed. Call `warm_up` first.

        beside: eager work such as will be done between replays. It may use the net without gradients, and leaves the
        net's weights sharded. It is done before the capture, which tells what memory it takes, and after it.
        Collective. Raises: Fault; Refusal if the graphs leave too little memory for this work.
        """
        if self.recorder is None:
            return
        arithmetic = self.state.arithmetic
        before = self.health.step.clone()
        try:
            need = self.recorder.bytes_of(partial(self._rehearse, beside)) if beside else 0
            # The training graphs are larger. Captured first, they leave freed memory for the validation graphs.
            for kind, work in (("train", self._train), ("validate", self._validate)):
                for phase in arithmetic.phases:
                    arithmetic.begin(phase)
                    self._capture(f"{kind} {phase}", work)
            sharding.reshard(self.state.net)  # after a capture, FSDP2 takes the weights for gathered
            require_settled(self.state.net)  # eager work cannot wait for an event of a capture
            if not torch.equal(before, self.health.step):
                raise Fault("the capture of a step has executed it; set graph.enabled=off", alone=True)
            if beside:
                self._require_room(need)
                self._rehearse(beside)  # the allocator keeps the memory for later
            arithmetic.begin(self.state.step)
        except BaseException:
            self.close()
            raise

    def _rehearse(self, beside: Callable[[], object]) -> None:
        """Do eager work once in each phase."""
        for phase in self.state.arithmetic.phases:
            self.state.arithmetic.begin(phase)
            beside()

    def _require_room(self, need: int) -> None:
        """On all ranks alike, because a rank without memory would leave the others in a collective. Raises: Refusal."""
        with ranks.agreed():
            free = self.recorder.free_bytes()
            if need > free:
                raise Refusal(
                    f"sample.every_samples={self.cfg.sample.every_samples} draws pictures between captured steps, which"
                    f" takes {need / 1e9:.3g} GB beside the graphs; the device has {free / 1e9:.3g} GB left; lower"
                    " train.micro_batch, sample.count or eval.batch, or set sample.every_samples=0 or graph.enabled=off"
                )

    def _capture(self, name: str, work: Callable[[], None]) -> None:
        """With the net at the start of a step, and all ranks at rest. sync: before the clock starts."""
        sharding.reshard(self.state.net)
        require_settled(self.state.net)
        gc.collect()  # what dies during a capture would be freed into it
        self.recorder.synchronize()
        ranks.gather_objects(None)  # no rank's collectives run into another's capture
        self.graphs[name] = self.recorder.capture(work)

    def close(self, agreed: bool = False) -> None:
        """Drop the graphs. Later steps run eagerly. Call this before the process group ends, also after an error.

        A graph keeps its communicator alive, so destroying the process group first would hang.
        agreed: all ranks close now and can wait for each other. Otherwise a rank may be lost, and the device may wait
        for it for ever. Then the graphs stay until the process ends, unless this rank is the only one.
        """
        if self.cfg.parallel.compile:
            sharding.permit_compilation()
        if self.recorder is None:
            return
        recorder = self.recorder
        self.recorder = None
        if not (agreed or ranks.is_single()):
            KEPT.append(self.graphs)
            return
        try:
            recorder.synchronize()  # no graph is dropped while it runs
            for graph in self.graphs.values():
                graph.reset()
            self.graphs.clear()
            gc.collect()
            recorder.synchronize()
        except RuntimeError:
            if agreed:
                raise  # otherwise the error that broke the run follows, and says more
        finally:
            self.graphs.clear()
        if agreed:
            ranks.gather_objects(None)
