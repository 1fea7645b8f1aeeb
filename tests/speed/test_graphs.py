"""The recorder of graphs, against the signatures of torch's own functions. test_step_runner.py tests what uses it."""

import inspect

import pytest
import torch
from stand_in import Log

from flux_ref.errors import Fault
from flux_ref.speed import graphs

REAL_CAPTURE = inspect.signature(torch.cuda.graph)


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
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory$"):  # train.py names the remedy
        recorder.capture(raising(torch.OutOfMemoryError("CUDA out of memory")))


def raising(error: Exception):
    def work() -> None:
        raise error

    return work
