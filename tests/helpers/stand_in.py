"""A CPU that answers as an accelerator, so that tests marked gpu run where there is none: pytest -m gpu --stand-in.

    graphs   A capture runs the work once, may not wait for the device, and takes back what the work has written.
             Compiled work it does not run. A replay runs the work anew, under the limits of a graph. LOG tells
             what happened.
    compiler Traces regions and their backward as always, but runs them without Inductor, whose C++ takes minutes.
    waits    While torch.cuda.set_sync_debug_mode says "error", an operation whose result the host reads raises.
    memory   Each graph takes one byte in torch's pool and one outside of it. The device has ROOM bytes more.
    devices  There are two. Their ranks are processes on the CPU.

Not seen are kernels, memory in bytes, times, and the order between streams.
"""

import contextlib
from types import SimpleNamespace

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flux_ref import graphs, ranks, sharding

READS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero")
CPU = torch.device("cpu")
LIVE = set()
ROOM = 1000


class Log(list):
    """What happened, in order; and the graphs of stand-in recorders."""

    broken_at = None  # of the training replay that raises, counted from 0

    def __call__(self, what, then=lambda *args: None):
        """A function that first writes down `what`."""

        def noted(*args, **kwargs):
            self.append(what)
            return then(*args, **kwargs)

        return noted


LOG = Log()


class NoWaits(TorchDispatchMode):
    """Raises where the host would wait for the device. Keeps what each tensor held before its first change."""

    def __init__(self):
        super().__init__()
        self.before = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its shards come by themselves
        name = func._schema.name.partition("::")[2]
        if name in READS:
            raise RuntimeError(f"{name} waits for the device")
        kwargs = kwargs or {}
        given = dict(zip((one.name for one in func._schema.arguments), args)) | kwargs
        for tensor in tree_leaves([given.get(one.name) for one in func._schema.arguments if one.is_write]):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.before.setdefault(storage._cdata, (storage, storage.clone()))
        return func(*args, **kwargs)

    def take_back(self):
        """Undo every change."""
        for storage, old in self.before.values():
            if storage.nbytes() == old.nbytes():  # FSDP2 has freed the rest
                storage.copy_(old)


class Capture(contextlib.AbstractContextManager):
    """For torch.cuda.graph."""

    def __init__(self, graph, pool, stream, capture_error_mode):
        self.mode = NoWaits()

    def __enter__(self):
        self.mode.__enter__()

    def __exit__(self, *error):
        self.mode.__exit__(*error)
        self.mode.take_back()


class Graph:
    """Runs the captured work anew at each replay, and insists that all it uses lies where it lay at the capture.

    It takes a byte of memory until it is reset.
    """

    def __init__(self, work, steps):
        self.work = work
        self.kind = kind_of(work)
        self.steps = steps  # None: any work, not a step's
        self.places = places(self.steps) if self.steps else []
        LIVE.add(self)

    def replay(self):
        if LOG.broken_at == LOG.count("replay train") and self.kind == "train":
            raise RuntimeError("an error of the device")
        LOG.append(f"replay {self.kind}")
        if self.steps is None:
            self.work()
            return
        assert places(self.steps) == self.places, "a graph would still use the former tensors"
        self.work()
        sharding.reshard(self.steps.state.net)

    def reset(self):
        LOG.append("reset")
        LIVE.discard(self)


def places(steps):
    """The addresses of all that a step reads and writes."""
    opt = steps.state.opt
    own = (
        *steps.train_batch.values(),
        *steps.val_batch.values(),
        steps.health.loss,
        steps.health.grad_norm,
        steps.sums,
    )
    kept = (steps.health.step, steps.health.first_bad, opt.lr, *opt.shards, *(p.to_local() for p in opt.parameters))
    moments = [tensor for state in opt.adamw.state.values() for tensor in state.values()]
    remembered = [tensor for tensor in tree_leaves(vars(steps.state.recipe)) if isinstance(tensor, torch.Tensor)]
    return [tensor.data_ptr() for tensor in (*own, *kept, *moments, *remembered)]


def kind_of(work):
    """train or validate, for the steps of a trainer."""
    name = getattr(work, "func", work).__name__
    return {"train_step": "train", "validation_step": "validate"}.get(name, name.strip("_"))


class Recorder(graphs.Recorder):
    """The real recorder, on stand-ins for torch.cuda. What it returns runs the captured work anew."""

    def capture(self, work):
        LOG.append(f"capture {kind_of(work)}")
        steps = getattr(self, "steps", None)
        if steps is None or not steps.cfg.compute.compile:  # compiled code refuses to run under another mode
            super().capture(work)
        return Graph(work, steps)


def install(replace=setattr):
    """Let the CPU answer. replace: as monkeypatch.setattr. torch itself still finds no accelerator."""
    cuda, accelerator = torch.cuda, torch.accelerator
    stream = SimpleNamespace(wait_stream=lambda stream: None)
    modes = contextlib.ExitStack()

    def set_sync_debug_mode(name):
        modes.close()
        if name == "error":
            modes.enter_context(NoWaits())

    def compile_without_inductor(region, **_):
        torch.nn.Module.compile(region, fullgraph=True, dynamic=False, backend="aot_eager")

    made = graphs.CapturedTrainer.__init__

    def init(steps, *args):
        made(steps, *args)
        steps.recorder.steps = steps

    stand_ins = (
        (graphs.CapturedTrainer, "__init__", init),
        (sharding.Region, "compile", compile_without_inductor),
        (ranks, "_device", lambda local_rank: CPU),
        (accelerator, "device_count", lambda: 2),
        (accelerator, "synchronize", lambda *_: LOG.append("synchronize")),
        (cuda, "synchronize", lambda *_: None),
        (cuda, "set_sync_debug_mode", set_sync_debug_mode),
        (accelerator, "empty_cache", lambda: None),
        (accelerator, "memory_reserved", lambda: len(LIVE)),
        (accelerator, "memory_allocated", lambda: len(LIVE)),
        (accelerator, "max_memory_reserved", lambda: len(LIVE)),
        (accelerator, "reset_peak_memory_stats", lambda: None),
        (cuda, "mem_get_info", lambda *_: (ROOM, ROOM + 2 * len(LIVE))),
        (cuda, "Stream", lambda *_: stream),
        (cuda, "set_stream", lambda stream: None),
        (cuda, "stream", lambda stream: contextlib.nullcontext()),
        (cuda, "current_stream", lambda *_: stream),
        (cuda, "graph_pool_handle", lambda: "a pool"),
        (cuda, "CUDAGraph", SimpleNamespace),
        (cuda, "graph", Capture),
        (graphs, "Recorder", Recorder),
        (graphs, "obstacle", lambda device, cfg: ""),
    )
    for stand_in in stand_ins:
        replace(*stand_in)
