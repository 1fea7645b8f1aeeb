"""Memory that tools.plan predicts against what a training step takes, on the CPU; bench/README.md explains it.

    python -m bench.plan_memory --json bench/results/plan_cpu.json
    python -m bench.plan_memory --only "eager, 1 rank"

Each case runs in processes of its own. Measured are the tensors' bytes: all that torch's allocator hands out and takes
back, by torch.profiler's memory events from before the net is built, inside of compiled code, kernels and gloo, too.
Exit codes: 0 done, 2 refused, 3 a case broke.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from bench import common
from bench.sources import ROOT
from flux_ref import config, config_file, ranks, sharding
from flux_ref.config import Config
from flux_ref.errors import Fault
from flux_ref.run import cli
from flux_ref.run.options import Options
from flux_ref.step import State
from flux_ref.step_runner import StepRunner
from tools.plan import footprint, memory
from tools.plan.memory import Moment
from tools.shared import json_option

# A seventh of schnell's width and a quarter of its tokens, so that two CPU cores take seconds for a step.
SMALL = (
    "--model.hidden=512 --model.heads=4 --model.rope_axes=[16,56,56] --model.double_blocks=3 --model.single_blocks=6"
    " --model.text_tokens=64 --model.latent_height=16 --model.latent_width=16 --train.synthetic_steps=1 --eval.batch=4"
    " --parallel.compile=false --parallel.activation_budget=1.0"
)
KEPT, RESHARDED = "--parallel.reshard_after_forward=false", "--parallel.reshard_after_forward=true"
COMPILED, BUDGET = "--parallel.compile=true", "--parallel.activation_budget"
BF16, HSDP = "--parallel.reduce_dtype=bf16", "--parallel.replicate=2"
CASES = {  # name: (ranks, micro-batch, overrides)
    "eager, 1 rank": (1, 16, RESHARDED),
    "eager, 1 rank, kept, small batch": (1, 2, KEPT),
    "recompute=block, 1 rank": (1, 16, f"{RESHARDED} --parallel.recompute=block"),
    "compiled, 1 rank": (1, 16, f"{RESHARDED} {COMPILED}"),
    "compiled, budget 0.5, 1 rank": (1, 16, f"{RESHARDED} {COMPILED} {BUDGET}=0.5"),
    "compiled, budget 0, 1 rank": (1, 16, f"{RESHARDED} {COMPILED} {BUDGET}=0.0"),
    "eager, 2 ranks": (2, 8, RESHARDED),
    "eager, 2 ranks, kept, bf16 reduced": (2, 8, f"{KEPT} {BF16}"),
    "compiled, budget 0.5, 2 ranks": (2, 8, f"{KEPT} {COMPILED} {BUDGET}=0.5"),
    "eager, HSDP 2 x 2": (4, 4, f"{KEPT} {HSDP}"),
    "eager, HSDP 2 x 2, bf16, accumulated": (4, 2, f"{RESHARDED} {HSDP} {BF16}"),
    "eager, regions of 2, 3 ranks": (3, 4, f"{RESHARDED} --parallel.region_blocks=2"),
}
CONFIG = "configs/schnell_gbs512.toml"
STEP, STEPS = "a step to be measured", 3


def overrides(name: str) -> list[str]:
    """The overrides of a case. The global batch is one micro-batch per rank, or two if accumulated."""
    ranks, micro, options = CASES[name]
    batch = ranks * micro * (2 if "accumulated" in name else 1)
    return [*SMALL.split(), *options.split(), f"--train.micro_batch={micro}", f"--train.global_batch={batch}"]


def predicted(cfg: Config, ranks: int) -> Moment:
    """The plan, and what gloo adds to it: a copy of what is reduced, which no GPU's library makes."""
    rows = config.micro_batch(cfg, ranks)
    layout, traced = footprint.layout(cfg, ranks, ranks), footprint.trace(cfg, "cpu", rows)
    sizes = [sharding.DTYPES[name].itemsize for name in (cfg.parallel.dtype, cfg.parallel.reduce_dtype)]
    found = []
    for moment in memory.moments(cfg, layout, traced, ranks, rows):
        copy = 0
        if moment.name.startswith("reduction") and layout.shards > 1:
            unit = layout.units[int(moment.name.split()[-1]) - 1]
            gradients, result = sizes[0] * unit.whole, sizes[1] * unit.padded // layout.shards
            copy = max(0, sizes[1] * unit.padded + result - max(gradients, result))  # made when gradients are gone
        found.append(Moment(moment.name, moment.parts | {"gloo": copy}))
    return memory.fullest(found)


def measure(name: str, out: Path) -> int:
    """One rank of a case: warm-up and STEPS steps, the profiler watching. Rank 0 writes what all find."""
    cfg = config_file.load(CONFIG, overrides(name))
    world = ranks.start(cfg.parallel)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        net = sharding.build(cfg, world, seed=0)
        steps = StepRunner(State.of(net, cfg, world), cfg, world)
        steps.state.opt.moments()
        for task in (steps.warm_up, *STEPS * (steps.train,)):
            with record_function(STEP):
                task()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident
    own = [float(min(peaks(profiler)[1:])), float(grown)]
    found = ranks.gather(torch.tensor(own, dtype=torch.float64))
    if world.rank == 0:
        out.write_text(json.dumps({"tensors": max(row[0] for row in found), "resident": max(row[1] for row in found)}))
    return 0


def peaks(profiler: profile) -> list[int]:
    """The most bytes that torch's allocator had handed out at a time, in each step that is marked STEP.

    The profiler does not hear of buffers that threads of gloo free. Memory that is handed out a second time was free,
    and nothing that a step makes outlives it. What else was not heard of can only raise a count, so that of equal
    steps the smallest is the nearest.
    """
    todo, events = list(profiler.profiler.kineto_results.experimental_event_tree()), []
    while todo:
        event = todo.pop()
        todo.extend(event.children)
        if event.tag == _EventType.Allocation:
            events.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name == STEP:
            events.append((event.start_time_ns, None, 0))
    lasting, passing, found = {}, {}, []
    now = 0
    for _, address, size in sorted(events, key=lambda event: event[0]):
        if address is None:
            now -= sum(passing.values())
            passing.clear()
            found.append(now)
            continue
        now -= lasting.pop(address, 0) + passing.pop(address, 0)
        if size > 0:
            (passing if found else lasting)[address] = size
            now += size
        if found:
            found[-1] = max(found[-1], now)
    return found


def launch(name: str) -> dict:
    """Measured and predicted bytes of a case. Raises: Fault."""
    ranks = CASES[name][0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += ["-m", "bench.plan_memory", "--measure", name, str(out)]
        env = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if done.returncode or not out.exists():
            raise Fault(f"{name}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}", alone=True)
        measured = json.loads(out.read_text())
    moment = predicted(config_file.load(CONFIG, overrides(name)), ranks)
    case = {"name": name, "ranks": ranks, "overrides": overrides(name), "measured": measured["tensors"]}
    case |= {"resident_growth": measured["resident"], "predicted": moment.total}
    return case | {"error": moment.total / measured["tensors"] - 1, "moment": moment.name, "parts": moment.parts}


def main(argv: list[str]) -> int:
    if argv[:1] == ["--measure"]:
        return measure(argv[1], Path(argv[2]))
    parser = Options("python -m bench.plan_memory", __doc__)
    json_option.json_option(parser)
    parser.add_argument("--only", choices=CASES, metavar="CASE")
    args = parser.parse_args(argv)
    report = common.head("bench.plan_memory", argv) | {"config": CONFIG, "cases": []}
    with json_option.text_beside(args.json):
        print(f"{'case':<40}{'measured':>8} {'plan':>8} {'resident':>8} MB{'error':>6}")
        for name in [args.only] if args.only else CASES:
            case = launch(name)
            report["cases"].append(case)
            mb = " ".join(f"{case[key] / 1e6:>8.0f}" for key in ("measured", "predicted", "resident_growth"))
            print(f"{name:<40}{mb} {case['error']:>+7.1%}", flush=True)
    json_option.give(report, args.json)
    return 0


if __name__ == "__main__":
    cli.leave(cli.run("bench.plan_memory", __doc__, main, sys.argv[1:]))
