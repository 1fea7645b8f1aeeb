"""Where a step's time goes, kernel by kernel, from torch.profiler; bench/README.md explains every figure.

    python -m bench.kernels --config configs/FILE.toml --steps 3 --json bench/results/NAME.json

Trains on one synthetic batch as bench.step does. On an accelerator the timeline is the device's. On the CPU it is made
of operations, each without those that it calls. --section.key=value overrides the config as in train.py.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench import common
from bench.common import Clock
from bench.step import build, run_steps
from flux_ref import config_rules
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.ranks import World
from flux_ref.run import cli
from flux_ref.step import State
from flux_ref.step_runner import StepRunner

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
GAPS = ("median_gap_us", "longest_gap_us")
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
    """
    if not spans:
        raise Refusal("the timeline is empty: nothing was profiled")
    intervals = busy(spans)
    window = intervals[-1][1] - intervals[0][0]
    idle = window - length(intervals)
    gaps = sorted(right[0] - left[1] for left, right in pairwise(intervals))
    by_class, by_name = defaultdict(float), defaultdict(lambda: [0.0, 0])
    for span in spans:
        by_class[classify(span.name)] += span.duration - span.inside
        by_name[span.name][0] += span.duration - span.inside
        by_name[span.name][1] += 1
    others = busy([span for span in spans if classify(span.name) != "communication"])
    top = sorted(by_name.items(), key=lambda item: -item[1][0])[:TOP]
    per_step = 1e3 * steps
    gap_us = {"median_gap_us": gaps[len(gaps) // 2], "longest_gap_us": gaps[-1]} if gaps else dict.fromkeys(GAPS, 0.0)
    return {
        "steps": steps,
        "step_ms": window / per_step,
        "classes": {kind: {"ms": by_class[kind] / per_step, "share": by_class[kind] / window} for kind in NAMES},
        "idle": {"ms": idle / per_step, "share": idle / window, "gaps": len(gaps) / steps} | gap_us,
        "communication_exposed_ms": (length(intervals) - length(others)) / per_step,
        "top": [
            {"name": name, "class": classify(name), "ms": us / per_step, "calls": calls / steps}
            for name, (us, calls) in top
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


def profiled(task: Callable[[], object], device: torch.device, steps: int) -> dict:
    """`analyse` for a task of so many steps that leaves the device idle."""
    activities = [ProfilerActivity.CPU] if device.type == "cpu" else [ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        task()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return analyse(timeline(json.loads(path.read_text())), steps)


def measure(cfg: Config, world: World, args: argparse.Namespace) -> dict:
    """Profile some training steps on a synthetic batch. Collective."""
    config_rules.validate_world(cfg, world.size)
    state = State.of(build(cfg, world, synthetic=True), cfg, world)
    run, clock = StepRunner(state, cfg, world), Clock(world.device)

    def task() -> None:
        run_steps(run, None, clock, args.steps)
        clock.start()  # the device is idle before the profiler stops

    try:
        run.warm_up()
        run.capture()
        run_steps(run, None, clock, args.warmup)
        clock.start()
        return profiled(task, world.device, args.steps)
    finally:
        run.close()


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the config. Raises: Refusal."""
    return common.options("bench.kernels", __doc__, steps=3, warmup=2).parse_known_args(argv)


def main(argv: list[str]) -> int:
    return common.run("bench.kernels", argv, parse, measure)


if __name__ == "__main__":
    cli.leave(cli.run("bench.kernels", __doc__, main, sys.argv[1:]))
