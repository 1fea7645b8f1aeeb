"""The two steps of a run over static buffers: run eagerly, or captured once each as a graph and then replayed.

A graph repeats the work that it has seen, on the memory where it was: forward and backward of all micro-batches,
collectives, clipping, AdamW. What a step reads and writes is therefore made once and only filled in place: batches,
`opt.lr`, weights, moments, and here loss, norm, health and sums. Draws come with the batch, so no generator is inside.

A batch is copied from pinned memory just before its step, on the same stream; the host enqueues the copy while the
device is still busy with the step before. What a second set of device buffers would hide is the transfer alone: for 64
samples of schnell 147 MB, some 3 ms in a step of more than a second. It is not worth the events.
"""

import gc
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from flux_ref import ranks, schedule, sharding
from flux_ref.config import Config
from flux_ref.data import allocate
from flux_ref.errors import Fault, Refusal
from flux_ref.ranks import World
from flux_ref.speed import regions
from flux_ref.speed.graphs import Recorder, obstacle
from flux_ref.step import Health, State, train_step, validation_step, warm_up

CAPTURED = "captured"
WARM_STEPS = 2  # before a capture: the first makes what is made lazily, the second is like all that follow


class Graph(Protocol):
    """What `Recorder.capture` returns."""

    def replay(self) -> None: ...
    def reset(self) -> None: ...


def manner(cfg: Config, device: torch.device) -> str:
    """How the steps of a run are run on a device: CAPTURED, or "eager" and why.

    Raises: Refusal if graph.enabled=on cannot be honoured.
    """
    enabled, warm = cfg.graph.enabled, cfg.train.synthetic_steps
    if enabled == "off":
        return "eager (graph.enabled=off)"
    reason = obstacle(device, asked=enabled == "on")
    if not reason and warm < WARM_STEPS:
        reason = f"train.synthetic_steps={warm} must be at least {WARM_STEPS}, the steps before a capture"
    if reason and enabled == "on":
        raise Refusal(f"graph.enabled=on cannot be honoured: {reason}; graph.enabled=auto runs eagerly then")
    return f"eager ({reason})" if reason else CAPTURED


class Steps:
    """The training and the validation step of one net, with the buffers that they read and write.

    Fill `train_batch` and `val_batch` (parallel.to_device) and `state.opt.lr` before each step.
    """

    def __init__(self, state: State, cfg: Config, world: World):
        self.state, self.cfg = state, cfg
        self.recorder = Recorder(world.device) if manner(cfg, world.device) == CAPTURED else None
        self.graphs: dict[str, Graph] = {}
        self.train_batch = allocate(cfg.model, cfg.train.global_batch // world.size, world.device)
        self.val_batch = allocate(cfg.model, cfg.eval.batch, world.device)
        self.health = Health(world.device)
        self.loss, self.grad_norm = torch.zeros(2, device=world.device).unbind()
        self.sums = torch.zeros(3, schedule.TIMESTEPS, dtype=torch.float64, device=world.device)

    def train(self) -> tuple[Tensor, Tensor]:
        """One optimizer step; returns this rank's loss and the norm, device scalars that the next step overwrites."""
        fp8 = self.state.net.fp8
        fp8.begin(self.state.step)
        if self.graphs:
            self.graphs[f"train {fp8.phase(self.state.step)}"].replay()
        else:
            self._train()
        return self.loss, self.grad_norm

    def validate(self, sums: Tensor) -> None:
        """Add the validation batch to sums, as step.validation_step does. Every rank calls it equally often."""
        if self.graphs:
            self.graphs["validate"].replay()
        else:
            self._validate()
        sums += self.sums

    def _train(self) -> None:
        loss, grad_norm = train_step(self.state.net, self.state.opt, self.train_batch, self.health, self.cfg)
        self.loss.copy_(loss)
        self.grad_norm.copy_(grad_norm)

    def _validate(self) -> None:
        self.sums.zero_()
        validation_step(self.state.net, self.val_batch, self.sums, self.cfg)

    def warm_up(self) -> None:
        """step.warm_up on the buffers, and on the stream, of what follows. Raises: Fault."""
        warm_up(self.state, self.train_batch, self.val_batch, self.cfg)

    def capture(self) -> None:
        """If steps are to be captured, do it; none is executed. After `warm_up`. Collective. Raises: Fault."""
        if self.recorder is None:
            return
        self.state.opt.moments()  # AdamW must not make its state inside a graph
        before = self.health.flags.clone()
        try:
            # The larger ones first: the last then lives in the memory that they have freed.
            for phase in self.state.net.fp8.phases:
                self.state.net.fp8.begin(phase)
                self._capture(f"train {phase}", self._train)
            self._capture("validate", self._validate)
            sharding.reshard(self.state.net)  # the capture has left it as if weights had been gathered
            if not torch.equal(before, self.health.flags):
                raise Fault("the capture of a step has executed it; set graph.enabled=off", alone=True)
        except BaseException:
            self.close()
            raise

    def _capture(self, name: str, work: Callable[[], None]) -> None:
        self._settle()
        self.graphs[name] = self.recorder.capture(work)

    def _settle(self) -> None:
        """Bring the net to where a step begins, and all ranks to a halt. sync: before the clock starts."""
        net = self.state.net
        sharding.reshard(net)
        require_settled(net)
        gc.collect()  # what dies during a capture would be freed into it
        self.recorder.synchronize()
        ranks.gather_objects(None)  # no rank's collectives run into another's capture

    def close(self, agreed: bool = False) -> None:
        """Drop the graphs; steps run eagerly from here on. Before the process group ends, for good or ill.

        A communicator is not let go of while a graph holds it: leaving the group would wait for ever.
        agreed: all ranks close now, so that they can wait for each other.
        """
        if self.cfg.parallel.compile:
            regions.permit_compilation()
        if self.recorder is None:
            return
        recorder, self.recorder = self.recorder, None
        try:
            recorder.synchronize()  # no graph is dropped while it runs
            for graph in self.graphs.values():
                graph.reset()
            self.graphs.clear()
            gc.collect()
            recorder.synchronize()
        except RuntimeError:
            if agreed:
                raise  # otherwise what broke the run is on its way, and says more
        finally:
            self.graphs.clear()
        if agreed:
            ranks.gather_objects(None)


def require_settled(net: nn.Module) -> None:
    """Of a net between two steps: a capture that begins otherwise records a wrong step, or fails.

    Weights that are gathered already would not be gathered by the graph, which would use them for ever; gradients
    would be added to; an event of an eager step cannot be waited for.
    """
    for name, module in net.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()  # torch has no public way to ask
            group = state._fsdp_param_group
            assert group is None or group.is_sharded, f"the weights of {name or 'the root'} are gathered"
            assert getattr(state._comm_ctx, "all_gather_state", None) is None, "an all-gather is under way"
    kept = [name for name, parameter in net.named_parameters() if parameter.grad is not None]
    assert not kept, f"gradients are left: {kept[0]}, ..."
