"""The streams of FSDP2 in captures of whole steps: all work joins, and no wait crosses the border of a capture.

FSDP2 of the installed torch runs on stand-in streams (streams.py), once per case of the config.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from conftest import MICRO
from fake_world import fake_world
from streams import EAGER, Stream, Streams

from flux_ref import config_file, ranks, sharding, step_runner
from flux_ref.arithmetic import arithmetic_of
from flux_ref.ranks import World
from flux_ref.step_runner import State, StepRunner

SIZE, UNITS = 4, 6  # ranks; five regions and the root
SMALL = {"train__global_batch": SIZE, "eval__batch": 1}
FP8 = {
    **{"model__hidden": 48, "model__rope_axes": (8, 4, 4), "model__text_tokens": 16, "model__latent_width": 16},
    **{"precision__preset": "fp8_delayed", "precision__dynamic_steps": 0, "precision__history": 3},
    "parallel__dtype": "bf16",
}


def accumulated(micros: int) -> dict[str, int]:
    """Settings for so many micro-batches of one sample."""
    return {"train__global_batch": SIZE * micros, "train__micro_batch": 1}


CASES = {  # ranks of a node, and settings
    "FSDP": (4, {}),
    "HSDP": (2, {}),
    "accumulation": (4, accumulated(2)),
    "HSDP with accumulation": (2, accumulated(2)),
    "kept regions": (4, {"parallel__kept_regions": 1}),
    "weights stay gathered": (4, {"parallel__kept_regions": -1} | accumulated(2)),
    "one rank per node": (1, accumulated(2)),
    "FP8 gather": (2, FP8 | accumulated(2)),
}


class Recorder:
    """Takes the place of graphs.Recorder: a capture runs its work once, on streams that take part in the capture."""

    def __init__(self, streams: Streams):
        self.streams = streams

    def capture(self, work: Callable[[], None]) -> SimpleNamespace:
        taken = work.__self__.health.step
        before = taken.clone()
        with self.streams.capture():
            work()
        taken.copy_(before)  # a real capture executes nothing
        return SimpleNamespace(reset=lambda: None)

    def bytes_of(self, work: Callable[[], None]) -> int:
        work()
        return 0

    def free_bytes(self) -> int:
        return 0

    def synchronize(self) -> None:
        pass


@pytest.fixture
def streams(monkeypatch) -> Streams:
    """Streams on which steps are captured from here on."""
    streams = Streams(monkeypatch)
    monkeypatch.setattr(step_runner, "Recorder", lambda device: Recorder(streams))
    monkeypatch.setattr(step_runner, "obstacle", lambda device, cfg: "")
    monkeypatch.setattr(step_runner, "gc", SimpleNamespace(collect=lambda: None))  # which takes longer than a test
    monkeypatch.setattr(ranks, "gather_objects", lambda value, *_: [value] * SIZE)
    return streams


def run(
    streams: Streams, world: World, plant: Callable[[StepRunner], None] | None = None, **values: object
) -> list[str]:
    """Eager steps, captures of training, validation, training and validation, eager steps again. Returns all faults.

    Before and after the captures of a training and a validation stands a drawing.

    plant: called just before the first capture.
    """
    cfg = config_file.replace(config_file.load(MICRO), **(SMALL | values))
    with streams:
        steps = StepRunner(State.build(cfg, world, None, arithmetic_of(cfg)), cfg, world)
        eager(steps, 2)
        if plant:
            plant(steps)
        steps.capture(beside=partial(drawing, steps))
        steps.capture(beside=partial(drawing, steps))
        steps.close(agreed=True)
        eager(steps, 1)
    return streams.faults


def drawing(steps: StepRunner) -> None:
    """What a drawing does with the net."""
    steps._validate()
    sharding.reshard(steps.state.net)


def eager(steps: StepRunner, count: int) -> None:
    for _ in range(count):
        steps.train()
        steps.validate()
        sharding.reshard(steps.state.net)


def collectives(streams: Streams, *captures: int) -> Counter:
    return Counter((work.name, work.group) for work in streams.log if work.capture in captures and work.group)


def expected(streams: Streams) -> Counter:
    """Of a training and a validation, had they run eagerly. There were three of them, and four drawings."""
    drawn = collectives(streams, 2)
    return Counter({kind: (count - 4 * drawn[kind]) // 3 for kind, count in collectives(streams, EAGER).items()})


USUAL = ("FSDP", "prefetch, HSDP with accumulation", "FP8 gather")  # together they meet most of the other cases


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case not in USUAL)) for case in CASES])
def test_no_wait_crosses_the_border_of_a_capture_and_all_work_is_joined(case, streams):
    """Else the capture fails, or a graph depends on what ran before it."""
    node, values = CASES[case]
    with fake_world(SIZE, node=node) as world:
        assert run(streams, world, **values) == []
    assert streams.captures == 4 and streams.unjoined() == [] and streams.busy() >= (3 if node > 1 else 2)
    assert collectives(streams, 1, 2) == collectives(streams, 3, 4) == expected(streams)


# Faults that are planted


def an_early_event(steps: StepRunner) -> None:
    """A unit still waits for its reduction in the warm-up."""
    group = steps.state.net.double_blocks[1]._get_fsdp_state()._fsdp_param_group
    group._post_reduce_event = torch.cpu.current_stream().record_event()


def a_stream_apart(steps: StepRunner) -> None:
    """A region works on a stream that waits for nothing."""
    before_region(steps, torch.cpu.Stream())


def a_loose_end(steps: StepRunner) -> None:
    """A region works on a stream that waits for the main stream. The main stream does not wait for the region's."""
    stream = torch.cpu.Stream()
    before_region(steps, stream, lambda: stream.wait_stream(torch.cpu.current_stream()))


def a_late_wait(steps: StepRunner) -> None:
    """The event of a step is waited for in the next step."""
    event = torch.cpu.Event()

    def wait(*args) -> None:
        torch.cpu.current_stream().wait_event(event)
        event.record()

    steps.state.net.register_forward_pre_hook(wait)


def before_region(steps: StepRunner, stream: Stream, join: Callable[[], None] = lambda: None) -> None:
    def work(*args) -> None:
        join()
        with torch.cpu.stream(stream):
            torch.zeros(1)

    steps.state.net.double_blocks[0].register_forward_pre_hook(work)


@pytest.mark.parametrize(
    ("plant", "fault"),
    [
        (an_early_event, "stream 0 waits for an event from before the capture"),
        (a_stream_apart, "is put on stream 5, which has not joined the capture"),
        (a_loose_end, "the work of stream 5 is not joined"),
        (a_late_wait, "stream 0 waits for an event of capture 1, which has ended"),
    ],
)
def test_a_planted_fault_is_seen(plant, fault, streams, monkeypatch):
    monkeypatch.setattr(step_runner, "require_settled", lambda net: None)
    with fake_world(SIZE) as world:
        assert any(fault in found for found in run(streams, world, plant))


# Accumulation and replicas in one graph


def test_replicas_are_averaged_once_per_unit_on_a_stream_of_their_own_before_the_update(streams):
    """The order holds on the device (`comes_after`), not only on the host."""
    micros = 3
    with fake_world(SIZE, node=2) as world:
        assert run(streams, world, **accumulated(micros)) == []
        replicas, shards = (world.mesh.get_group(axis).group_name for axis in range(2))
    works = [work for work in streams.log if work.capture == 1]
    averages = [work for work in works if work.group == replicas]
    sums = [work for work in works if work.group == shards and "reduce_scatter" in work.name]
    assert len(averages) == UNITS and len(sums) == micros * UNITS
    of_replicas, of_shards = averages[0].stream, sums[0].stream
    assert {work.stream for work in averages} == {of_replicas} and {work.stream for work in sums} == {of_shards}
    assert of_replicas is not of_shards and streams.main not in (of_replicas, of_shards)
    for average, last in zip(averages, sums[-UNITS:]):
        assert average.comes_after(last) and works.index(average) > works.index(last)
    assert all(average.comes_after(early) for average in averages for early in sums[:-UNITS])
    (update,) = [work for work in works if work.name.startswith("aten::_fused_adamw_")]
    (norm,) = [work for work in works if work.group and work.group not in (replicas, shards)]
    assert update.stream is norm.stream is streams.main and update.comes_after(norm)
    assert all(norm.comes_after(work) for work in (*averages, *sums))
