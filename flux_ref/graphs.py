"""Steps as graphs: when they are captured, the proof that a graph computes what the eager step does, replays, the end.

A graph repeats recorded work on the memory that the work used: forward and backward of all micro-batches, collectives,
clipping, the update. So every tensor that a step reads or writes is allocated once and then filled in place: batches,
`opt.lr`, weights, moments, loss, norm, health and sums. A graph holds no generator: draws come with the batch, and
stochastic rounding (precision/) draws from the number of the step, which lies on the device.

A port to another device may answer every `obstacle` with a reason: then all steps run eagerly.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flux_ref import ranks, sharding
from flux_ref.config import Config
from flux_ref.errors import Fault, Refusal
from flux_ref.ranks import World
from flux_ref.sharding import ShardedFlux
from flux_ref.step_runner import State, StepRunner

CAPTURED = "captured"
KEPT: list[dict] = []  # after an error a graph stays until the process ends: to destroy it may wait for a lost rank
# Relative differences between a graph and the eager step that libraries' workspaces may cause.
FLOORS = {"loss": 1e-5, "norm": 1e-3}
OPEN = 30.0  # a gate so wide that one hidden channel of a block shows in the gradient norm
DECODING_BYTES = 2e9  # of the autoencoder and its activations for a picture of 256 x 256 pixels (calculated)


def mode(cfg: Config, device: torch.device) -> str:
    """How a device runs the steps of a run: CAPTURED, or "eager (REASON)".

    Raises: Refusal if graph.enabled=on cannot be honoured.
    """
    reason = "graph.enabled=off" if cfg.graph.enabled == "off" else obstacle(device, cfg)
    if reason and cfg.graph.enabled == "on":
        raise Refusal(f"graph.enabled=on cannot be honoured: {reason}; graph.enabled=auto runs eagerly then")
    return f"eager ({reason})" if reason else CAPTURED


def obstacle(device: torch.device, cfg: Config) -> str:
    """Why the steps of a run cannot be captured on a device; "" if they can."""
    if device.type != "cuda":
        return f"a device of type {device.type} captures no graphs"
    if torch.version.hip and cfg.graph.enabled != "on":
        return "on HIP graphs are captured only when asked for"
    return ""


def runner(state: State, cfg: Config, world: World) -> StepRunner:
    """The steps of a run as its mode asks for."""
    return (CapturedRunner if mode(cfg, world.device) == CAPTURED else StepRunner)(state, cfg, world)


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

        Raises: Fault, torch.OutOfMemoryError.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: NCCL's watchdog and other threads may go on calling the device.
            with torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"):
                work()
        except RuntimeError as error:
            root = error.__context__ or error  # the end of the capture fails too, with a vaguer message
            if isinstance(root, torch.OutOfMemoryError):
                raise root from None
            reason = str(root).partition("\n")[0]
            raise Fault(f"a step cannot be captured: {reason}; set graph.enabled=off", alone=True) from error
        return graph


class CapturedRunner(StepRunner):
    """Steps that are captured as graphs after the warm-up, and replayed from then on."""

    def __init__(self, state: State, cfg: Config, world: World):
        super().__init__(state, cfg, world)
        self.recorder = Recorder(world.device)
        self.graphs: dict[str, Any] = {}  # what the recorder returns, by kind and phase
        self.drawing_bytes = 0.0  # what a drawing takes beside the graphs, about

    def train(self) -> tuple[Tensor, Tensor]:
        if not self.graphs:
            return super().train()
        self.graphs[f"train {self.state.arithmetic.phase(self.state.step)}"].replay()
        return self.loss, self.grad_norm

    def validate(self) -> None:
        if not self.graphs:
            return super().validate()
        self.graphs[f"validate {self.state.arithmetic.phase(self.state.step)}"].replay()

    def warm_up(self) -> None:
        super().warm_up()
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_reserved()
        super().validate()
        self.sharded()
        self.drawing_bytes = torch.accelerator.max_memory_reserved() - before
        if self.cfg.data.kind != "shapes":
            self.drawing_bytes += DECODING_BYTES

    def capture(self) -> None:
        """Capture the steps and prove the graphs. The weights stay; what a step remembers is reset. Collective.

        Call `warm_up` first, and load moments afterwards. Raises: Fault.
        """
        with changed(self):
            want, again = measured(self), measured(self)
        # The training graphs are larger. Captured first, they leave freed memory for the validation graphs.
        graphs = {}
        for kind, work in (("train", super().train), ("validate", super().validate)):
            for phase in self.state.arithmetic.phases:
                self.state.arithmetic.begin(phase)
                graphs[f"{kind} {phase}"] = self._captured(work)
        self.graphs = graphs
        KEPT.append(graphs)
        self.sharded()  # after a capture, FSDP2 takes the weights for gathered
        with changed(self):
            found = measured(self)
        with ranks.agreed():
            require_equal(found, want, again)
        self.forget()  # an average holds changed weights
        self.state.arithmetic.begin(self.state.step)

    def _captured(self, work: Callable[[], object]) -> Any:
        """With the net at the start of a step, and all ranks at rest. sync: before the clock starts."""
        self.sharded()
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
        ranks.barrier()


# The proof: a graph that had kept weights, gradients or a batch of its capture would not see what changes after it.


def changes(state: State) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of one known change in each block and in the head: a row, and what it becomes.

    A gate of a fresh net is 0 and hides its block. So a change opens the gate of one hidden channel, and reverses the
    row of the projection that this channel comes from.
    """
    parameters = sharding.named_parameters(state.net)
    hidden = len(parameters["img_in.bias"])
    for name, parameter in parameters.items():
        first, local = sharding.local_rows(parameter)
        is_gate = name.endswith(("img_mod.lin.bias", "modulation.lin.bias"))
        channel = int(name.split(".")[1]) if "_blocks." in name else 0
        place = channel + 2 * hidden * is_gate - first
        if not 0 <= place < len(local):
            continue
        row = local[place]
        if is_gate:
            yield row, torch.full_like(row, OPEN)
        elif name.endswith(("img_attn.proj.weight", "linear2.weight")):
            yield row, row.flip(-1)
        elif name == "final_layer.linear.bias":
            yield row, row + 1


@contextmanager
@torch.no_grad()
def changed(steps: StepRunner) -> Iterator[None]:
    """A block with other weights and batches than those of the capture. The weights come back bit for bit.

    Raises: Fault if the block has changed a weight, as a step at another learning rate than 0 would.
    """
    pairs = [(row, row.clone(), other) for row, other in changes(steps.state)]
    noises = [batch["noise"] for batch in (steps.train_batch, steps.val_batch)]
    sums = _sums(steps.state.net)
    for row, _, other in pairs:
        row.copy_(other)
    for noise in noises:
        noise.neg_()
    yield
    for noise in noises:
        noise.neg_()
    for row, old, _ in pairs:
        row.copy_(old)
    if not torch.equal(_sums(steps.state.net), sums):
        raise Fault("a step at learning rate 0 has changed weights; set graph.enabled=off", alone=True)


def _sums(net: ShardedFlux) -> Tensor:
    """A number for each weight shard that tells equal bits from others, up to chance."""
    shards = (sharding.local_rows(parameter)[1] for parameter in sharding.named_parameters(net).values())
    return torch.stack([shard.view(torch.int32).sum(dtype=torch.int64) for shard in shards])


def measured(steps: StepRunner) -> dict[str, float]:
    """Loss and norm of two steps at learning rate 0 and the sum of a validation, in each phase, from the same start.

    The second step shows gradients that the first one has left. sync: the host reads them all.
    """
    found = {}
    step = steps.state.step
    for phase in steps.state.arithmetic.phases:
        steps.forget()
        steps.state.set_counters(phase, steps.state.samples)
        for number in (1, 2):
            loss, norm = steps.train()
            found[f"loss of step {number} in phase {phase}"] = float(loss)
            found[f"norm of step {number} in phase {phase}"] = float(norm)
        steps.sums.zero_()
        steps.validate()
        found[f"loss of validation in phase {phase}"] = float(steps.sums[1].sum())
        steps.sharded()
    steps.forget()
    steps.state.set_counters(step, steps.state.samples)
    return found


def require_equal(found: dict[str, float], want: dict[str, float], again: dict[str, float]) -> None:
    """found: of the graphs. want, again: of the eager steps, twice. Raises: Fault."""
    for name, value in want.items():
        floor = FLOORS[name.partition(" ")[0]] * abs(value)
        allowed = max(floor, 4 * abs(again[name] - value))
        if not abs(found[name] - value) <= allowed:
            raise Fault(
                f"a captured step computes another {name} than the eager step: {found[name]:.8g}, not {value:.8g}"
                f" (allowed: {allowed:.2g}); set graph.enabled=off"
            )
