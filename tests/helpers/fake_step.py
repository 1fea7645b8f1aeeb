"""Captures and a short training loop as rank 0 of many ranks, on a device that does not exist.

    python tests/helpers/fake_step.py '[{"gpus": 64, "config": "configs/schnell_gbs512.toml", "values": {}}]'

Prints a list in JSON: per case where the host waits for the device, what each capture communicates and leaves
allocated, and the events of the loop. "planted": true adds three faults to the training step.

train.py's loop and all of flux_ref below it run as they are. Their tensors are fake: they have shapes, devices and
storages, but no memory, and no kernel runs. Their device is of torch's PrivateUse1 kind, filled from Python. This needs
a process of its own, because nothing undoes the registration. Not seen are compiled regions, the order between streams,
and what kernels and libraries do inside. Values are made up: numbers read from a tensor are -1.
"""

import contextlib
import gc
import itertools
import json
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from stand_in import READS
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _foreach_utils, backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import train
from flux_ref import config_file, data, ranks, step
from flux_ref.arithmetic import arithmetic_of
from flux_ref.benchmark.mllog import BenchmarkLog
from flux_ref.config import Config
from flux_ref.run.reporter import Reporter
from flux_ref.step_runner import State, StepRunner

KIND, NODE = "nodev", 8  # the device, and how many of them a node has
STEPS = 3  # of the loop
EAGER = {"parallel__compile": False, "parallel__activation_budget": 1.0, "parallel__attention": "flash"}


def nothing(*args, **kwargs) -> None:
    pass


class Watch(TorchDispatchMode):
    """Sees every operation before FakeTensorMode does, also those of backward."""

    def __init__(self):
        super().__init__()
        self.events: list[str] = []  # since the last `told`, in order
        self.collectives: list[list] = []  # the same: operation, group, ranks, dtype, bytes
        self.alive = weakref.WeakValueDictionary()  # storages on the device, by identity
        self.born = weakref.WeakValueDictionary()  # those that were made in the capture
        self.pinned: dict[int, torch.UntypedStorage] = {}
        self.condition = True  # the value of every bool that is read from the device

    def told(self) -> list[str]:
        events, self.events = self.events, []
        return events

    def wait(self, what: str) -> None:
        """Note that the host waits for the device, and the innermost line of flux_ref that it waits in."""
        frames = traceback.extract_stack()
        own = [frame for frame in frames if "/flux_ref/" in frame.filename or frame.name == "planted"]
        place = (own or frames)[-1]
        self.events.append(f"{what} at {place.filename.rpartition('/')[2]}:{place.lineno} {place.name}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if dist.tensor.DTensor in types:
            return NotImplemented  # its shards come by themselves
        space, name = func._schema.name.split("::")
        kwargs = dict(kwargs or {})
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if space == "c10d":
            self._note_collective(name, args, given)
        near = any(tensor.device.type == KIND for tensor in given)
        is_mask = name in ("index", "index_put_") and any(tensor.dtype == torch.bool for tensor in given[1:])
        if near and (name in READS or is_mask):
            self.wait(name)
        if name in ("copy_", "_to_copy"):
            self._note_copy(name, args, kwargs, given)
        if name == "equal":
            return True
        if name == "_local_scalar_dense" and isinstance(given[0], FakeTensor):
            return self.condition if given[0].dtype == torch.bool else -1.0
        if name == "_fused_adamw_":
            return None  # it works in place and has no fake
        pins = kwargs.pop("pin_memory", False)  # torch would ask a driver
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note_storage(tensor.untyped_storage(), tensor.device.type, pins)
        return result

    def _note_collective(self, name: str, args: tuple, given: list[torch.Tensor]) -> None:
        group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
        group, size = dist.ProcessGroup.unbox(group), max(tensor.nbytes for tensor in given)
        dtype = str(given[0].dtype).removeprefix("torch.")
        self.collectives.append([name.strip("_"), group.group_desc, group.size(), dtype, size])

    def _note_copy(self, name: str, args: tuple, kwargs: dict, given: list[torch.Tensor]) -> None:
        target, source = torch.device(kwargs.get("device") or given[0].device), given[-1]
        if {target.type, source.device.type} != {"cpu", KIND}:
            return
        host = source if source.device.type == "cpu" else given[0]
        if host.untyped_storage()._cdata not in self.pinned or not (kwargs.get("non_blocking") or True in args[2:]):
            self.wait(f"{name} from {source.device.type} to {target.type}")

    def _note_storage(self, storage: torch.UntypedStorage, kind: str, pins: bool) -> None:
        if pins:
            self.pinned[storage._cdata] = storage
        elif kind == KIND and storage._cdata not in self.alive:
            self.alive[storage._cdata] = self.born[storage._cdata] = storage


WATCH = Watch()


class Event:
    """For torch.Event and torch.cuda.Event. Only the reading threads may wait for one unnoticed."""

    __init__ = record = wait = nothing

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        if threading.current_thread() is threading.main_thread():
            WATCH.wait("event.synchronize")


class Stream:
    stream_id, device_index, device_type = 0, 0, 20  # 20: PrivateUse1
    __init__ = wait_event = wait_stream = nothing

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()

    def synchronize(self) -> None:
        WATCH.wait("stream.synchronize")


def made_up_device() -> types.ModuleType:
    """What FSDP2, checkpoints and flux_ref ask of torch.cuda, for torch.nodev."""
    module, only = types.ModuleType(f"torch.{KIND}"), Stream()
    vars(module).update(
        is_available=lambda: False,  # or FakeTensorMode would make real tensors
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        device_count=lambda: NODE,
        current_device=lambda: 0,
        set_device=nothing,
        get_device_properties=lambda device: types.SimpleNamespace(major=9, minor=0),
        get_amp_supported_dtype=lambda: [torch.bfloat16],
        max_memory_allocated=lambda device: 0,
        Event=Event,
        Stream=Stream,
        current_stream=lambda device=None: only,
        stream=lambda stream: contextlib.nullcontext(),
        synchronize=lambda device=None: WATCH.wait("device.synchronize"),
    )
    return module


class Recorder:
    """For speed.graphs.Recorder. A capture runs the work once; a replay is an event."""

    def __init__(self):
        self.captures = []

    def synchronize(self) -> None:
        WATCH.wait("device.synchronize")

    def capture(self, work) -> types.SimpleNamespace:
        before = WATCH.told()
        WATCH.born.clear()
        WATCH.collectives.clear()
        work()
        gc.collect()
        left = [storage.nbytes() for storage in WATCH.born.values() if storage.nbytes()]
        found = {"waits": WATCH.told(), "left": left, "collectives": [*WATCH.collectives]}
        self.captures.append({"work": work.__name__} | found)
        WATCH.events = before
        return types.SimpleNamespace(replay=lambda: WATCH.events.append(f"replay {work.__name__}"))


def planted(health: step.Health, loss: torch.Tensor, norm: torch.Tensor) -> None:
    loss.item()
    loss.cpu()
    norm.copy_(torch.zeros(()), non_blocking=True)


def samples(cfg: Config, rows: int, batches: int) -> types.SimpleNamespace:
    """For data.TrainSet and ValSet: real feeds of real host buffers that hold zeros."""
    buffers = [data.HostBatch(cfg.model, rows, True) for _ in range(3)]

    def feed(*args: object) -> Iterator[data.HostBatch]:
        return data.read_ahead(itertools.repeat(range(rows), batches), nothing, buffers, 1)

    return types.SimpleNamespace(feed=feed, batches=batches)


def gather_objects(value: object, group: object = None) -> list:
    WATCH.wait("gather_objects")
    return [value] * dist.get_world_size()


def configured(gpus: int, config: str, values: dict[str, object], micros: int = 1) -> Config:
    """The config of a case: STEPS steps of so many micro-batches, each of them logged, then an evaluation."""
    cfg = config_file.replace(config_file.load(config), **EAGER, **values)
    batch = gpus * micros * cfg.train.micro_batch
    counts = {"train__max_samples": STEPS * batch, "eval__every_samples": STEPS * batch}
    return config_file.replace(cfg, train__global_batch=batch, train__log_every_samples=batch, **counts)


def watched(gpus: int, cfg: Config) -> dict:
    """One case, as rank 0."""
    config_file.validate_world(cfg, gpus)
    dist.init_process_group(f"cpu:fake,{KIND}:fake", store=FakeStore(), rank=0, world_size=gpus)
    nodes = [str(rank // NODE) for rank in range(gpus)]
    mesh = ranks.make_mesh(KIND, gpus, ranks.replica_count(cfg.parallel.replicate, nodes))
    world = ranks.World(0, gpus, torch.device(KIND, 0), mesh, nodes)
    with WATCH:
        sets = samples(cfg, cfg.train.global_batch // gpus, STEPS), samples(cfg, cfg.eval.batch, 2)
        with FakeTensorMode(allow_non_fake_inputs=True):
            WATCH.condition = True  # to AdamW: is the learning rate sound?
            state = State.build(cfg, world, None, arithmetic_of(cfg))
            steps = StepRunner(state, cfg, world)
            WATCH.condition = False  # to the warm-up: is any flag of the health set?
            steps.warm_up()
            steps.recorder = Recorder()
            gc.freeze()  # or each capture would search all of torch for garbage
            steps.capture()
            gc.unfreeze()
            log = BenchmarkLog()
            report = Reporter(cfg, world, log.text)
            report.speaks = False
            found = {"before the loop": WATCH.told(), "captures": steps.recorder.captures}
            WATCH.collectives.clear()
            alive = types.SimpleNamespace(at=nothing, watch=types.SimpleNamespace())
            train.Run(cfg, state, steps, *sets, None, report, log, alive, None).train(sets[0].feed(0))
            found |= {"loop": WATCH.told(), "collectives": [*WATCH.collectives]}
    ranks.stop()
    return found


def main(cases: list[dict]) -> None:
    backend_registration._setup_privateuseone_for_python_backend(KIND, made_up_device())
    _foreach_utils._foreach_supported_types.append(FakeTensor)
    mock.patch.object(torch, "Event", Event).start()
    mock.patch.object(ranks, "gather_objects", gather_objects).start()
    found = []
    for case in cases:
        faults = {"update": planted} if case.pop("planted", False) else {}
        with mock.patch.multiple(step.Health, **faults) if faults else contextlib.nullcontext():
            found.append(watched(case["gpus"], configured(**case)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
