"""How long a training step takes and where its time goes; bench/README.md explains every figure.

    python -m bench.step                                    configs/tiny.toml on this machine
    python -m bench.step --steps 50 --json bench/results/NAME.json
    torchrun --nproc-per-node 8 -m bench.step --config configs/schnell_gbs512.toml --synthetic

--steps N (20) are timed after --warmup N (3). --synthetic measures without data. --profile TRACE.json records three
further steps for a viewer of traces, such as ui.perfetto.dev. --section.key=value overrides the config as in train.py.
--fake-ranks N computes as one rank of N whose others do not exist: the capture, the memory and FSDP2's copies of N
ranks on one device. It implies --synthetic.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import re
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, closing
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from bench import ceiling, common, fake_ranks
from bench.common import END, Clock
from flux_ref import cli, config_file, graphs, ranks, sharding, toy
from flux_ref.cli import Fault
from flux_ref.config import Config, micro_batch
from flux_ref.dataloader import Feed, TrainSet, copy_next
from flux_ref.precision import policy
from flux_ref.ranks import World, peak_memory_gb
from flux_ref.sharding import ShardedFlux
from flux_ref.trainer import NEVER, Trainer, TrainState
from tools.figures import between

SPLIT_STEPS = 5
PROFILED_STEPS = 3
TOP = 20  # kernels in a report
PARTS = (  # what a kernel, or an operation of a CPU, works for: the first pattern that its name has decides
    ("elementwise", "^triton_(?!tem)"),  # the compiler names its kernels by all that it fused
    ("links", "nccl|c10d|gloo"),
    ("products", "gemm|nvjet|xmma|cutlass|splitk|cijk|flash|fmha|sdpa|attention|attn|bwd_kernel|triton_tem|mm$"),
    ("copies", "copy|cat_cuda|catarray|memcpy|memset|fsdp"),
    ("optimizer", "multi_tensor|foreach|adam"),
    ("elementwise", ""),
)


def measure(cfg: Config, world: World, args: Namespace) -> dict:
    """Train as train.py does and report the timed steps, their split, memory and FLOP/s. Collective."""
    config_file.validate_world(cfg, world.size)
    clock = Clock(world.device)
    synthetic = args.synthetic or bool(args.fake_ranks)
    train_set = None if synthetic else data_set(cfg, world)
    policy.require_rows(cfg, micro_batch(cfg, world.size))
    state = TrainState(build(cfg, world, synthetic), cfg, world)
    run = graphs.make_trainer(state, cfg, world)
    run.warm_up()
    feed = None
    kernels: dict[str, object] = {}
    with ExitStack() as stack:
        if world.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()  # a replay allocates nothing, its capture does
        run.capture()
        if state.recipe.state():
            state.set_counters(cfg.precision.dynamic_steps, 0)  # all but the first steps are like those from here on
        if train_set:
            with ranks.agreed():
                train_set.open()
            feed = stack.enter_context(closing(train_set.feed(state.samples)))
        run_steps(run, feed, clock, args.warmup)
        clock.start()
        loss = run_steps(run, feed, clock, args.steps)
        steps = clock.steps()
        if args.profile:
            kernels = profiled(lambda: run_steps(run, feed, clock, PROFILED_STEPS), args.profile, world)
        run.close()  # `split` needs the memory of the graphs
    totals = [sum(step.values()) for step in steps]
    samples_per_s = cfg.train.global_batch * 1e3 / mean(totals)
    return {
        "steps": args.steps,
        "warmup": args.warmup,
        "synthetic": synthetic,
        "samples_per_s": samples_per_s,
        "step_ms": {"median": median(totals), "min": min(totals), "max": max(totals)},
        "split_ms": split(run, clock),
        "data_share": sum(step["data"] for step in steps) / sum(totals) if feed else None,
        "peak_memory_gb": max(ranks.gather_objects(peak_memory_gb(world.device))),
        "tflop": ceiling.achieved(cfg, samples_per_s / world.size, clock),
        "last_loss": loss,
        **kernels,
        **(fake_ranks.beside_plan(cfg, world, run.train) if args.fake_ranks else {}),
    }


def profiled(task: Callable[[], object], path: Path, world: World) -> dict[str, object]:
    """The TOP kernels of PROFILED_STEPS by their time, and the sums of all by PARTS; of a CPU operations, without those
    that they call.

    The trace of rank 0 goes to `path`. ms, calls: per step; streams overlap.
    """
    has_device = world.device.type != "cpu"
    with profile(activities=[ProfilerActivity.CUDA if has_device else ProfilerActivity.CPU]) as profiler:
        task()
        torch.get_device_module(world.device).synchronize()
    if world.rank == 0:
        profiler.export_chrome_trace(str(path))
    spent = "self_device_time_total" if has_device else "self_cpu_time_total"  # in microseconds
    parts = dict.fromkeys(dict(PARTS), 0.0)
    kernels: list[dict] = []
    for one in profiler.key_averages():
        ms = getattr(one, spent) / 1e3 / PROFILED_STEPS
        parts[part_of(one.key)] += ms
        kernels.append({"name": one.key, "ms": ms, "calls": one.count / PROFILED_STEPS})
    kernels.sort(key=itemgetter("ms"), reverse=True)
    return {"kernels": kernels[:TOP], "parts_ms": parts}


def part_of(kernel: str) -> str:
    """What a kernel, or an operation of a CPU, works for, by its name."""
    return next(part for part, pattern in PARTS if re.search(pattern, kernel.lower()))


def data_set(cfg: Config, world: World) -> TrainSet:
    """The config's training set; rank 0 makes that of tiny if it is missing. Collective."""
    with ranks.agreed():
        if world.rank == 0:
            toy.ensure(cfg)
    with ranks.agreed():
        return TrainSet(cfg, world.rank, world.size, world.pin)


def build(cfg: Config, world: World, synthetic: bool) -> ShardedFlux:
    """The sharded net; for synthetic batches with random weights in every layer, drawn by the device.

    As training begins, gates are zero and so are most gradients; products of zeros cost a device less power and time.
    """
    net = sharding.build(cfg, world, None if synthetic else cfg.train.seed)
    if synthetic:
        torch.manual_seed(cfg.train.seed)
        with torch.no_grad():
            for parameter in net.parameters():
                cast(DTensor, parameter).to_local().normal_(std=0.02)
    return net


def run_steps(steps: Trainer, feed: Feed | None, clock: Clock, count: int) -> float:
    """The steps of train.py's loop, marked; returns this rank's last loss. Raises: Fault if a value is not finite.

    On an accelerator the span "data" begins when the device has finished the step before and ends when the batch
    is on it. The span is the device's wait, not the time that the host waits. Without a feed the batch stays as it is.
    """
    steps.health.restart(steps.state.step)
    for _ in range(count):
        clock.mark("data")
        if feed:
            copy_next(feed, steps.train_batch)
        clock.mark("step")
        steps.step()
        clock.mark(END)
    if (steps.health.first_bad != NEVER).any():
        remedy = "lower optim.lr or take another compute.attention"
        raise Fault(f"the loss or the gradient norm is not finite, so the times mean nothing; {remedy}")
    return float(steps.health.loss)


def split(run: Trainer, clock: Clock) -> dict:
    """Median milliseconds of forward, backward and optimizer over eager steps, each begun on an idle device.

    The marks sit in hooks around train_step, so micro-batches add up.
    """
    before = run.net.register_forward_pre_hook(lambda *_: clock.mark("forward"), prepend=True)
    after = run.net.register_forward_hook(lambda *_: clock.mark("backward"))  # the loss is counted here
    steps = []
    update = run.state.opt.step

    def optimizer() -> Tensor:
        clock.mark("optimizer")
        return update()

    with patch.object(run.state.opt, "step", optimizer):
        for _ in range(SPLIT_STEPS):
            clock.start()
            clock.mark("forward")
            run.train()
            clock.mark(END)
            steps += clock.steps()
    before.remove()
    after.remove()
    parts = {part: median(step[part] for step in steps) for part in ("forward", "backward", "optimizer")}
    return parts | {"steps": SPLIT_STEPS, "note": "measured apart from step_ms"}


def main(argv: list[str]) -> int:
    parser = common.step_options("bench.step", __doc__)
    parser.add_argument("--synthetic", action="store_true")
    parser.add_argument("--profile", type=Path, metavar="TRACE.json")
    parser.add_argument("--fake-ranks", type=between(1, 8192), metavar="N")
    return common.run(parser, argv, measure)


if __name__ == "__main__":
    cli.exit_now(cli.run("bench.step", main, sys.argv[1:]))
