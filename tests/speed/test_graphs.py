"""The recorder of graphs, against the signatures of torch's own functions. test_steps.py tests what uses it."""

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
import torch
from conftest import MICRO
from fake_world import fake_world
from graph_ranks import Log
from torch.utils._python_dispatch import TorchDispatchMode

from flux_ref import config_file, schedule, sharding
from flux_ref.data import synthetic
from flux_ref.errors import Fault
from flux_ref.speed import graphs
from flux_ref.step import Health, State, train_step, validation_step

REAL_CAPTURE = inspect.signature(torch.cuda.graph)
AHEAD = {"parallel__forward_prefetch": 2, "parallel__backward_prefetch": 2, "parallel__kept_regions": 1}


class FailingCapture:
    """torch's context of a capture, whose end fails as it does when something went wrong inside."""

    def __init__(self, *args, **kwargs):
        self.bound = REAL_CAPTURE.bind(*args, **kwargs).arguments

    def __enter__(self) -> None:
        assert self.bound.pop("cuda_graph") == "a graph"
        assert self.bound == {"pool": "a pool", "stream": "a stream", "capture_error_mode": "thread_local"}

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind:
            raise RuntimeError("operation failed due to a previous error during capture")


def test_the_recorder_works_on_a_stream_of_its_own_and_tells_why_a_capture_failed(monkeypatch):
    log = Log()
    stand_ins = {
        "synchronize": log("synchronize"),
        "Stream": log("a new stream", lambda device: "a stream"),
        "set_stream": log.append,
        "graph_pool_handle": lambda: "a pool",
        "CUDAGraph": lambda: "a graph",
        "graph": FailingCapture,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    recorder = graphs.Recorder(torch.device("cuda", 0))
    assert log == ["synchronize", "a new stream", "a stream"]
    assert recorder.capture(log("the work")) == "a graph" and log[-1] == "the work"
    with pytest.raises(Fault, match=r"^a step cannot be captured: no\.item\(\) here; set graph\.enabled=off$"):
        recorder.capture(raising(RuntimeError("no.item() here\nand a stack of C++")))
    with pytest.raises(Fault, match="cannot be captured: by us"):
        recorder.capture(raising(AssertionError("by us")))


def raising(error: Exception):
    def work() -> None:
        raise error

    return work


# Streams


class Stream:
    """A stream that runs nothing. clock: how much work of each stream comes before whatever is enqueued next."""

    made: ClassVar[list["Stream"]] = []

    def __init__(self, priority: int = 0):
        self.clock: Counter = Counter()
        self.made.append(self)

    def wait_event(self, event: "Event") -> None:
        self.clock |= event.clock

    def wait_stream(self, stream: "Stream") -> None:
        self.clock |= stream.clock

    def record_event(self) -> "Event":
        return Event().record(self)


class Event:
    def record(self, stream: Stream | None = None) -> "Event":
        self.clock = Counter((stream or torch.cpu.current_stream()).clock)
        return self


class Enqueued(TorchDispatchMode):
    """Counts each operation as work of the current stream."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        stream = torch.cpu.current_stream()
        stream.clock[stream] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def streams(monkeypatch) -> list[Stream]:
    """The main stream and those that FSDP2 makes. FSDP2 asks torch.cpu for them, as it would ask torch.cuda."""
    monkeypatch.setattr(Stream, "made", [])
    current = [Stream()]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    for name, value in (("Stream", Stream), ("Event", Event), ("stream", on), ("current_stream", lambda: current[-1])):
        monkeypatch.setattr(torch.cpu, name, value)
    return Stream.made


def unjoined(streams: list[Stream]) -> list[int]:
    """The streams with work that the main stream does not wait for: a capture would end with an error."""
    return [number for number, stream in enumerate(streams) if stream.clock[stream] > streams[0].clock[stream]]


def test_all_work_of_a_step_is_joined_at_its_end(streams):
    """FSDP2's gathering streams end a validation with waits for the main stream, behind which no work comes."""
    deep = {"model__single_blocks": 3, "train__global_batch": 8, "train__micro_batch": 1}
    for node, values in ((4, {}), (2, {}), (4, {"parallel__reshard_after_forward": False}), (4, AHEAD)):
        cfg = config_file.replace(config_file.load(MICRO), **(deep | values))
        with fake_world(4, node=node) as world, Enqueued():
            state, batch = State.build(cfg, world, seed=None), synthetic(cfg.model, 2)
            sums = torch.zeros(3, schedule.TIMESTEPS, dtype=torch.float64)
            train_step(state, batch, Health(world.device), cfg)
            assert unjoined(streams) == [] and sum(bool(stream.clock[stream]) for stream in streams) >= 3
            sharding.reshard(state.net)
            validation_step(state.net, batch, sums, cfg)
            assert unjoined(streams) == []
    with Enqueued(), torch.cpu.stream(streams[1]):
        torch.zeros(1)
    assert unjoined(streams) == [1]
