"""Where a step's time goes, kernel by kernel, from torch.profiler: what bench.step --profile reports.

On an accelerator the timeline is the device's. On the CPU it is made of operations, each without those that it calls.
"""

import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from flux_ref.errors import Refusal

TOP = 15
DEVICE_SPANS = ("kernel", "gpu_memcpy", "gpu_memset")  # a trace's categories
HOST_SPANS = ("cpu_op", "user_annotation")
# The first that matches a name in lower case decides. What Inductor writes is named after the operations fused in it.
CLASSES = (
    ("communication", r"nccl|rccl|gloo|c10d|record_param_comms|all_?gather|reduce_?scatter|all_?reduce|fsdp::"),
    ("optimizer", r"adam|optimizer|lpnorm|foreach_norm"),
    ("gemm", r"^triton_(tem|mm)"),
    ("elementwise", r"^triton_|cpp_fused|compiledfunction|torch-compiled region"),
    ("attention", r"attention|flash|fmha|sdpa|attn|cudnn::fusion|^bwd_kernel_|^bwd_preprocess"),
    ("gemm", r"gemm|cutlass|nvjet|cublas|splitk|^cijk_|xmma|mkldnn|aten::(mm|addmm|bmm|baddbmm|linear|_scaled_mm)"),
    ("copy", r"memcpy|memset|copy|_cast|catarray|chunk_cat|fill|::cat$|::to$|::zero_$|::contiguous|::clone"),
    ("elementwise", r"elementwise|reduce|norm|softmax|gelu|silu|multi_tensor|aten::"),
)
NAMES = ("gemm", "attention", "elementwise", "copy", "communication", "optimizer", "other")


@dataclass
class Span:
    """Something that ran; times in microseconds."""

    name: str
    start: float
    duration: float
    inside: float = 0.0  # of the duration, what it spent in operations that it called

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def own(self) -> float:
        return self.duration - self.inside


def classify(name: str) -> str:
    """The class of a kernel or operation by its name; "other" if nothing is known of it."""
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name.lower())), "other")


def busy(spans: list[Span]) -> list[tuple[float, float]]:
    """The intervals in which anything runs, in order and apart from each other."""
    found: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda span: span.start):
        if found and span.start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], span.end))
        else:
            found.append((span.start, span.end))
    return found


def length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def analyse(spans: list[Span], steps: int = 1) -> dict:
    """Milliseconds per step by class, their share of the timeline, the idle time and the TOP kernels.

    The timeline runs from the first start to the last end. Spans may overlap (streams, threads): the shares of the
    classes then add up to more than what is not idle. communication_exposed_ms: while nothing else ran.
    Raises: Refusal if there is no span.
    """
    if not spans:
        raise Refusal("the timeline is empty: nothing was profiled")
    intervals = busy(spans)
    window = intervals[-1][1] - intervals[0][0]
    idle = window - length(intervals)
    gaps = [right[0] - left[1] for left, right in pairwise(intervals)]
    own_time = {kind: 0.0 for kind in NAMES}
    by_name = defaultdict(list)
    for span in spans:
        own_time[classify(span.name)] += span.own
        by_name[span.name].append(span.own)
    others = busy([span for span in spans if classify(span.name) != "communication"])
    top = sorted(by_name, key=lambda name: -sum(by_name[name]))[:TOP]
    per_step = 1e3 * steps
    return {
        "steps": steps,
        "step_ms": window / per_step,
        "classes": {kind: {"ms": us / per_step, "share": us / window} for kind, us in own_time.items()},
        "idle": {
            "ms": idle / per_step,
            "share": idle / window,
            "gaps": len(gaps) / steps,
            "longest_gap_us": max(gaps, default=0.0),
        },
        "communication_exposed_ms": (length(intervals) - length(others)) / per_step,
        "top": [
            {
                "name": name,
                "class": classify(name),
                "ms": sum(by_name[name]) / per_step,
                "calls": len(by_name[name]) / steps,
            }
            for name in top
        ],
    }


def timeline(trace: dict) -> list[Span]:
    """The spans of a trace as torch.profiler exports it: the device's if it has any, else the host's operations."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    device = [event for event in events if event.get("cat") in DEVICE_SPANS]
    if device:
        return [Span(event["name"], event["ts"], event["dur"]) for event in device]
    spans, callers = [], defaultdict(list)
    host = [event for event in events if event.get("cat") in HOST_SPANS]
    for event in sorted(host, key=lambda event: (event["ts"], -event["dur"])):
        span, stack = Span(event["name"], event["ts"], event["dur"]), callers[event["pid"], event["tid"]]
        while stack and stack[-1].end <= span.start:
            stack.pop()
        if stack:
            stack[-1].inside += span.duration
        stack.append(span)
        spans.append(span)
    return spans


def profiled(task: Callable[[], object], steps: int) -> dict:
    """`analyse` for a task of so many steps."""
    has_device = torch.accelerator.is_available()
    with profile(activities=[ProfilerActivity.CUDA if has_device else ProfilerActivity.CPU]) as profiler:
        task()
        if has_device:
            torch.accelerator.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return analyse(timeline(json.loads(path.read_text())), steps)
