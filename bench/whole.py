"""The full model on one device, without sharding: what a rank's compute costs; bench/README.md explains every figure.

    python -m bench.whole --config configs/schnell_gbs512.toml --micro-batches 8,16,32 --parallel.compile=true
    python -m bench.whole --config tests/micro.toml --micro-batches 2,4 --evaluate 8

All weights and gradients lie on one device in the compute dtype (schnell in bf16: 48 GB). Forward and backward are
whole; the optimizer is timed on the fp32 shards of one of --ranks N (8) ranks. Not in it: communication, gathering and
reducing, data, the cast from fp32 master weights. --steps N (5) timed, --evaluate B[,B] also times validation at
B samples per forward. --section.key=value overrides the config as in train.py.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import argparse
import gc
import sys
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from bench import ceiling, common
from bench.common import END, Clock
from flux_ref import flow, schedule, sharding
from flux_ref.benchmark import VAL_SAMPLES
from flux_ref.config import Config
from flux_ref.data import Batch, allocate, synthetic
from flux_ref.errors import Refusal
from flux_ref.model import Flux, parameter_table
from flux_ref.optim import ShardedAdamW
from flux_ref.ranks import World
from flux_ref.run import cli
from flux_ref.run.environment import peak_memory_gb
from flux_ref.speed import fp8_product, linear, policy, regions
from flux_ref.speed.attention import allow_attention_of
from flux_ref.speed.precision import Precision
from flux_ref.step import validation_step

WARMUP = 2
LEFT_OUT = "communication, data, casts from fp32 master weights"


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the overrides of the config. Raises: Refusal."""
    parser = common.options("bench.whole", __doc__, steps=5, ranks=8)
    parser.add_argument("--micro-batches", type=ceiling.SIZES, default=[8])
    parser.add_argument("--evaluate", type=ceiling.SIZES, default=[])
    return parser.parse_known_args(argv)


def build(cfg: Config, device: torch.device) -> Flux:
    """The unsharded net in regions as training has them, random weights in the compute dtype."""
    allow_attention_of(cfg, device)
    with torch.device("meta"):
        net = Flux(cfg.model).to(sharding.DTYPES[cfg.parallel.dtype])
        linear.convert(net, cfg, fp8_product.architecture(device))
    net.double_blocks = regions.regions(net.double_blocks, cfg.parallel)
    net.single_blocks = regions.regions(net.single_blocks, cfg.parallel)
    if cfg.parallel.compile:
        regions.compile_all([*net.double_blocks, *net.single_blocks], cfg, device)
    net.to_empty(device=device)
    net.rope = net.make_rope().to(device)
    torch.manual_seed(cfg.train.seed)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.02)
    for module in net.modules():
        if getattr(module, "layer", None) in policy.layers_gathered_in_fp8(cfg).values():
            module.encode()  # as FSDP2 gathers it
    net.precision = Precision(net, cfg, device)
    net.precision.begin(cfg.precision.dynamic_steps)  # as in all but the first steps
    return net


def batch_of(cfg: Config, rows: int, device: torch.device) -> Batch:
    """A synthetic batch of any number of rows, repeating eight."""
    batch, few = allocate(cfg.model, rows, device), synthetic(cfg.model, 8)
    for name, tensor in batch.items():
        for start in range(0, rows, 8):
            tensor[start : start + 8].copy_(few[name][: min(8, rows - start)])
    return batch


def training(net: Flux, cfg: Config, rows: int, steps: int, clock: Clock) -> dict:
    """Median ms of forward and backward of one micro-batch, and the device's peak memory in GB."""
    batch, dtype = batch_of(cfg, rows, clock.device), sharding.DTYPES[cfg.parallel.dtype]
    fresh_peak(clock.device)

    def step() -> None:
        clock.mark("forward")
        loss = flow.losses(net, batch, dtype).mean()
        clock.mark("backward")
        loss.backward()
        net.precision.remember_magnitudes()
        clock.mark(END)
        net.zero_grad(set_to_none=True)

    for i in range(WARMUP + steps):
        if i == WARMUP:
            clock.start()
        step()
    times = clock.steps()
    found = {part: median(step[part] for step in times) for part in ("forward", "backward")}
    return found | {"peak_memory_gb": peak_memory_gb(clock.device)}


def evaluation(net: Flux, cfg: Config, rows: int, steps: int, clock: Clock) -> dict:
    """Milliseconds of one validation batch, and what the benchmark's whole validation set would take on one device."""
    batch = batch_of(cfg, rows, clock.device)
    sums = torch.zeros(3, schedule.TIMESTEPS, dtype=torch.float64, device=clock.device)
    fresh_peak(clock.device)
    ms = clock.repeated("validation", steps, lambda: validation_step(net, batch, sums, cfg), WARMUP)
    rate, peak = rows * 1e3 / ms, peak_memory_gb(clock.device)
    return {"ms": ms, "samples_per_s": rate, "whole_set_s": VAL_SAMPLES / rate, "peak_memory_gb": peak}


def optimizer(cfg: Config, world: World, rank_count: int, steps: int, clock: Clock) -> dict:
    """Median milliseconds of the optimizer's step and clipping, over the shards that rank 0 of `rank_count` holds."""
    shards = nn.Module()
    for number, shape in enumerate(parameter_table(cfg.model).values()):
        local = torch.randn(-(-shape[0] // rank_count), *shape[1:], device=world.device)
        shards.register_parameter(f"p{number}", nn.Parameter(DTensor.from_local(local, world.mesh, [Shard(0)])))
    opt = ShardedAdamW(shards, cfg, world)
    opt.lr.fill_(cfg.optim.lr)
    gradients = [DTensor.from_local(torch.randn_like(local), world.mesh, [Shard(0)]) for local in opt.shards]

    def step() -> None:
        for parameter, gradient in zip(shards.parameters(), gradients):
            parameter.grad = gradient  # opt.step drops it
        opt.step()

    fresh_peak(clock.device)
    ms = clock.repeated("optimizer", steps, step, WARMUP)
    count = sum(parameter.numel() for parameter in opt.shards)
    return {"ms": ms, "ranks": rank_count, "parameters": count, "peak_memory_gb": peak_memory_gb(clock.device)}


def fresh_peak(device: torch.device) -> None:
    """Forget the largest memory so far; the CPU cannot."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()


def unless_too_large(task: Callable[..., dict], *args: object) -> dict:
    """What a task returns, or that the device's memory did not suffice."""
    try:
        return task(*args)
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
    return {"failed": reason}  # outside of except, which would keep the task's tensors alive


def measure(cfg: Config, world: World, args: argparse.Namespace) -> dict:
    """Everything: the optimizer first, whose memory the net then needs. Raises: Refusal."""
    if world.size > 1:
        raise Refusal(f"bench.whole measures one device; this is one of {world.size} ranks")
    if cfg.graph.enabled == "on":
        raise Refusal("bench.whole captures no graphs; leave graph.enabled at auto")
    clock = Clock(world.device)
    spent = unless_too_large(optimizer, cfg, world, args.ranks, args.steps, clock)
    fresh_peak(world.device)
    net = build(cfg, world.device)
    runs = []
    for rows in args.micro_batches:
        run = {"micro_batch": rows} | unless_too_large(training, net, cfg, rows, args.steps, clock)
        net.zero_grad(set_to_none=True)
        if "failed" not in run and "failed" not in spent:
            ms = run["forward"] + run["backward"] + spent["ms"]
            run |= {"optimizer": spent["ms"], "ms": ms, "samples_per_s": rows * 1e3 / ms}
        runs.append(run)
    validations = [
        {"batch": rows} | unless_too_large(evaluation, net, cfg, rows, args.steps, clock) for rows in args.evaluate
    ]
    del net
    fresh_peak(world.device)
    for run in runs:
        if "samples_per_s" in run:
            run["tflop"] = ceiling.achieved(cfg, run["samples_per_s"], clock)
    return {
        "steps": args.steps,
        "optimizer": spent,
        "runs": runs,
        "evaluation": validations,
        "left_out": LEFT_OUT,
    }


def main(argv: list[str]) -> int:
    return common.run("bench.whole", argv, parse, measure)


if __name__ == "__main__":
    cli.leave(cli.run("bench.whole", __doc__, main, sys.argv[1:]))
