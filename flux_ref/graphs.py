"""Steps as graphs: when they are captured, the proof that a graph computes what the eager step does, replays, the end.

A graph repeats recorded work on the memory that the work used: forward and backward of all micro-batches, collectives,
clipping, the update. So every tensor that a step reads or writes is allocated once and then filled in place: batches,
`opt.lr`, weights, moments, loss, norm, health and sums. A graph holds no generator: draws come with the batch, and
stochastic rounding (precision/) draws from the number of the step, which lies on the device.

A port to a device without graphs lets `obstacle` always return a reason: then all steps run eagerly.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flux_ref import ranks
from flux_ref.cli import Fault, Mark, Refusal, no_op_mark
from flux_ref.config import Config
from flux_ref.ranks import World
from flux_ref.trainer import Trainer, TrainState

CAPTURED = "captured"
Figures = dict[str, float]  # of steps, by what they are
KEPT: list[dict] = []  # after an error a graph stays until the process ends: to destroy it may wait for a lost rank
# Relative differences between a graph and the eager step that libraries' workspaces may cause.
FLOORS = {"loss": 1e-5, "norm": 1e-3, "sum": 1e-3}
RATE = 1e-5  # of the step of the proof that changes weights
DECODING_BYTES = 2e9  # of the autoencoder and its activations for a picture of 256 x 256 pixels (calculated)


def mode(cfg: Config, device: torch.device) -> str:
    """How a device runs the steps of a run: CAPTURED, or "eager (REASON)".

    Raises: Refusal if compute.cuda_graphs=on cannot be honoured.
    """
    reason = "compute.cuda_graphs=off" if cfg.compute.cuda_graphs == "off" else obstacle(device, cfg)
    if reason and cfg.compute.cuda_graphs == "on":
        raise Refusal(f"compute.cuda_graphs=on cannot be honoured: {reason}; set it to auto, which runs eagerly then")
    return f"eager ({reason})" if reason else CAPTURED


def obstacle(device: torch.device, cfg: Config) -> str:
    """Why the steps of a run cannot be captured on a device; "" if they can."""
    if device.type != "cuda":
        return f"a device of type {device.type} captures no graphs"
    if torch.version.hip and torch.__version__ < "2.12":  # github.com/pytorch/pytorch, issues 177309 and 176251
        return f"RCCL's watchdog invalidates captures in torch {torch.__version__}; 2.12 and later capture on HIP"
    if torch.version.hip and cfg.compute.cuda_graphs != "on":
        return "on HIP graphs are captured only when asked for"
    return ""


def make_trainer(state: TrainState, cfg: Config, world: World) -> Trainer:
    """The trainer that the mode of a run asks for."""
    return (CapturedTrainer if mode(cfg, world.device) == CAPTURED else Trainer)(state, cfg, world)


class Recorder:
    """Captures work as graphs that share one pool of memory, on a stream of its own.

    From its creation on, its stream is the current stream of this thread. Copies into buffers, the warm-up, replays and
    reads of results therefore follow one another on the device.
    """

    def __init__(self, device: torch.device):
        torch.accelerator.synchronize()  # the previous stream may still be at work
        self.stream = torch.cuda.Stream(device)
        torch.cuda.set_stream(self.stream)
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Callable[[], object]) -> Any:
        """The work as a graph with `replay` and `reset`. The device executes nothing of it.

        Raises: Fault; torch's error, if memory is short.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: NCCL's watchdog and other threads may go on calling the device.
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            root = error.__context__ or error  # the end of the capture fails too, with a vaguer message
            if "out of memory" in str(root):  # of the allocator, or of the driver, which keeps the graph's nodes
                raise root from None
            reason = str(root).partition("\n")[0]
            raise Fault(f"a step cannot be captured: {reason}; set compute.cuda_graphs=off", alone=True) from error
        return graph


class CapturedTrainer(Trainer):
    """Steps that are captured as graphs after the warm-up, and replayed from then on."""

    def __init__(self, state: TrainState, cfg: Config, world: World):
        super().__init__(state, cfg, world)
        self.recorder = Recorder(world.device)
        self.eager: dict[str, Callable[[], Any]] = {"train": self.train, "validate": self.validate}
        self.graphs: dict[str, Any] = {}  # what the recorder returns, by kind of step and phase
        self.drawing_bytes = 0.0  # what a drawing takes beside the graphs, about

    def _replay(self, kind: str) -> None:
        self.graphs[f"{kind} {self.state.recipe.phase(self.state.step)}"].replay()

    def warm_up(self, mark: Mark = no_op_mark) -> None:
        super().warm_up(mark)
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_reserved()
        self.validate()
        self.reshard()
        self.drawing_bytes = torch.accelerator.max_memory_reserved() - before
        if self.cfg.data.kind != "toy":
            self.drawing_bytes += DECODING_BYTES

    def capture(self, mark: Mark = no_op_mark) -> None:
        """Capture the steps and prove the graphs. The weights stay; what a step remembers is reset. Collective.

        Call it after `warm_up` and before a checkpoint is loaded. Raises: Fault.
        """
        mark("the eager steps of the proof")
        with perturbed_state(self) as weights:
            want = run_probe_steps(self, weights)
            again = run_probe_steps(self, weights)
        outside = bytes_outside()
        # The training graphs are larger. Captured first, they leave freed memory for the validation graphs.
        graphs = {}
        for kind, work in self.eager.items():
            for phase in self.state.recipe.phases:
                self.state.recipe.begin(phase)
                mark(f"the capture of {kind} {phase}")
                graphs[f"{kind} {phase}"] = self._captured(work)
        self.graphs = graphs
        self.train = partial(self._replay, "train")
        self.validate = partial(self._replay, "validate")
        KEPT.append(graphs)
        mark("the proof of the captured steps")
        self.reshard()  # after a capture, FSDP2 takes the weights for gathered
        with perturbed_state(self) as weights:
            found = run_probe_steps(self, weights)
        self.graph_bytes = bytes_outside() - outside
        with ranks.agreed():
            require_equal(found, want, again)
        self.reset()  # also the average: it holds changed weights

    def _captured(self, work: Callable[[], object]) -> Any:
        """With the net at the start of a step, and all ranks at rest. sync: before the clock starts."""
        self.reshard()
        gc.collect()  # what dies during a capture would be freed into it
        torch.accelerator.synchronize()
        ranks.barrier()  # no rank's collectives run into another's capture
        return self.recorder.capture(work)

    def shortage(self) -> str:
        if not self.graphs:
            return ""
        torch.accelerator.empty_cache()  # a drawing cannot use the memory of the graphs
        free = min(ranks.gather_objects(torch.cuda.mem_get_info()[0]))
        if free >= self.drawing_bytes:
            return ""
        need = f"a drawing takes about {self.drawing_bytes / 1e9:.3g} GB beside the graphs"
        return f"{need}, a rank has {free / 1e9:.3g} GB; lower train.micro_batch or eval.batch"

    def close(self) -> None:
        """Drop the graphs. Call this before the process group ends: a graph keeps its communicator alive."""
        torch.accelerator.synchronize()  # no graph is dropped while it runs
        for graph in self.graphs.values():
            graph.reset()
        self.graphs.clear()
        self.train = self.eager["train"]
        self.validate = self.eager["validate"]
        ranks.barrier()


def bytes_outside() -> int:
    """Device memory outside of torch's allocator: contexts, libraries, communicators and the nodes of graphs."""
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.accelerator.memory_reserved()


# The proof: a graph that had kept weights, gradients, moments, a rate, a clip factor or a batch of its capture would
# not see what changes after it.


@contextmanager
@torch.no_grad()
def perturbed_state(trainer: Trainer) -> Iterator[list[Tensor]]:
    """A block with other weights and batches than those of the capture. They come back bit for bit.

    Each FSDP unit has a bias of a modulation or the head's. It grows by 1 and so opens the gates of a block; those of a
    fresh net are 0 and hide the block. The noise is so large that gradients are clipped. Gives copies of the block's
    weight shards on the host.
    """
    opt = trainer.state.opt
    biases = [shard for name, shard in zip(opt.names, opt.shards) if name.endswith((".lin.bias", ".linear.bias"))]
    noises = [trainer.train_batch["noise"], trainer.val_batch["noise"]]
    olds = [tensor.clone() for tensor in (*biases, *noises)]
    torch._foreach_add_(biases, 1)
    torch._foreach_mul_(noises, 16)
    yield [shard.to("cpu", copy=True) for shard in opt.shards]
    torch._foreach_copy_([*biases, *noises], olds)


def run_probe_steps(trainer: Trainer, weights: list[Tensor]) -> Figures:
    """What two steps at learning rate 0, a validation and a step at RATE compute, in each phase, from the same start.

    The second step shows gradients that the first one has left.
    weights: as `perturbed_state` gives them. They are in place again at the end. sync: the host reads all figures.
    """
    found = {}
    opt = trainer.state.opt
    for phase in trainer.state.recipe.phases:
        trainer.reset()
        trainer.state.set_counters(phase, 0)
        for number, rate in ((1, 0.0), (2, 0.0), (3, RATE)):
            opt.lr.fill_(rate)
            trainer.train()
            after = f"step {number} in phase {phase}"
            found[f"loss of {after}"] = float(trainer.health.loss)
            found[f"norm of {after}"] = float(trainer.health.grad_norm)
            changes = (shard.detach() - weight.to(shard.device) for shard, weight in zip(opt.shards, weights))
            for kind, tensors in (*opt.states().items(), ("changes of weights", changes)):
                found[f"sum of {kind} after {after}"] = sum(float(tensor.abs().sum()) for tensor in tensors)
        for shard, weight in zip(opt.shards, weights):
            shard.detach().copy_(weight)
        trainer.sums.zero_()
        trainer.validate()
        found[f"loss of validation in phase {phase}"] = float(trainer.sums[1].sum())
        trainer.reshard()
    trainer.state.set_counters(0, 0)
    return found


def require_equal(found: Figures, want: Figures, again: Figures) -> None:
    """found: of the graphs. want, again: of the eager steps, twice. Raises: Fault."""
    for name, value in want.items():
        floor = FLOORS[name.partition(" ")[0]] * abs(value)
        allowed = max(floor, 4 * abs(again[name] - value))
        if not abs(found[name] - value) <= allowed:
            raise Fault(
                f"a captured step computes another {name} than the eager step: {found[name]:.8g}, not {value:.8g}"
                f" (allowed: {allowed:.2g}); set compute.cuda_graphs=off"
            )
