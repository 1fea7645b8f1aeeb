"""Stand-in streams and events: what comes before what on a device, and what a device refuses during a capture.

FSDP2 asks torch.cpu for streams, as it would ask torch.cuda. Nothing runs at the same time as anything else. The
streams inside a backend of collectives do not exist here, nor do those that autograd chooses.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

EAGER = 0  # the number of no capture
LOGGED = ("c10d::", "aten::_fused_adamw_")  # names of operations begin so


class Streams(TorchDispatchMode):
    """All streams, the main stream first. As a context, it takes each operation for work of the current stream.

    faults: what a device would have refused, in words. log: collectives and updates, in the order of the host.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.all, self.log, self.faults = [], [], []
        self.captures, self.capturing = 0, EAGER  # how many there were, and the number of the one under way
        self.main = Stream(self)
        self.current = [self.main]
        for name in ("Stream", "Event"):
            monkeypatch.setattr(torch.cpu, name, partial(globals()[name], self))
        monkeypatch.setattr(torch.cpu, "stream", self.on)
        monkeypatch.setattr(torch.cpu, "current_stream", lambda: self.current[-1])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.current[-1].enqueue(func.name(), args)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    @contextmanager
    def capture(self) -> Iterator[None]:
        """A capture that begins and ends on the main stream. Another stream joins by waiting for an event of it."""
        self.captures += 1
        self.capturing = self.main.capture = self.captures
        yield
        self.faults += [f"the work of stream {number} is not joined" for number in self.unjoined()]
        self.capturing = EAGER
        for stream in self.all:
            stream.capture = EAGER

    def unjoined(self) -> list[int]:
        """The streams with work that the main stream does not wait for: a capture would end with an error."""
        return [stream.number for stream in self.all if stream.clock[stream] > self.main.clock[stream]]

    def busy(self) -> int:
        """How many streams have had work."""
        return sum(bool(stream.clock[stream]) for stream in self.all)


class Stream:
    """clock: how much work of each stream comes before whatever is enqueued next."""

    def __init__(self, streams: Streams, priority: int = 0):
        self.streams, self.number = streams, len(streams.all)
        self.clock, self.capture = Counter(), EAGER
        streams.all.append(self)

    def enqueue(self, name: str, args: tuple) -> None:
        if self.capture != self.streams.capturing:
            self.streams.faults.append(f"{name} is put on stream {self.number}, which has not joined the capture")
        self.clock[self] += 1
        if name.startswith(LOGGED):
            self.streams.log.append(Work(name, self, Counter(self.clock), self.capture, group_of(name, args)))

    def wait_event(self, event: "Event") -> None:
        """As CUDA does: an event that was never recorded is not waited for."""
        if event.clock is None:
            return
        if event.capture != self.capture:
            if event.capture == self.streams.capturing:
                self.capture = event.capture
            else:
                origin = f"of capture {event.capture}, which has ended" if event.capture else "from before the capture"
                self.streams.faults.append(f"stream {self.number} waits for an event {origin}")
        self.clock |= event.clock

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.streams)
        event.record(self)
        return event


class Event:
    """The place of a stream at the last `record`."""

    def __init__(self, streams: Streams):
        self.streams, self.clock, self.capture = streams, None, EAGER

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.streams.current[-1]
        self.clock, self.capture = Counter(stream.clock), stream.capture


@dataclass(frozen=True)
class Work:
    """One operation on a stream. clock: with the operation itself. group: the name of a collective's process group."""

    name: str
    stream: Stream
    clock: Counter
    capture: int
    group: str

    def comes_after(self, other: "Work") -> bool:
        return self.clock[other.stream] >= other.clock[other.stream]


def group_of(name: str, args: tuple) -> str:
    """The name of the process group of a collective; "" for other operations."""
    if not name.startswith("c10d::"):
        return ""
    (boxed,) = (arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
    return dist.ProcessGroup.unbox(boxed).group_name
