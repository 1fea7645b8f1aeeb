"""A rank's memory as tools.plan predicts it against that of real training steps, on ranks of gloo.

Measured are the tensors' bytes: all that torch's allocator hands out and takes back, by torch.profiler's memory events
from before the net is built, inside of compiled code and kernels, too. What gloo allocates inside a collective does not
count, since NCCL allocates nothing there.
"""

from pathlib import Path

from conftest import ROOT, script
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile, record_function

from flux_ref import config, config_file, ranks, sharding
from flux_ref.dataloader import allocate
from flux_ref.precision.recipe import PrecisionRecipe
from flux_ref.trainer import Health, Trainer, TrainState, train_step
from tools.plan import memory, region_costs

# A seventh of schnell's width and a quarter of its tokens, so that two CPU cores take seconds for a step.
SMALL = (
    "--model.hidden=512 --model.heads=4 --model.rope_axes=[16,56,56] --model.double_blocks=3 --model.single_blocks=6"
    " --model.text_tokens=64 --model.latent_height=16 --model.latent_width=16 --train.synthetic_steps=1 --eval.batch=4"
    " --compute.compile=false --compute.activation_memory_budget=1.0 --compute.dtype=fp32"  # a CPU may be slow in bf16
)
KEPT, RESHARDED = "--parallel.kept_regions=-1", "--parallel.kept_regions=0"
COMPILED, BUDGET = "--compute.compile=true", "--compute.activation_memory_budget"
BF16, HSDP = "--parallel.reduce_dtype=bf16", "--parallel.replicate=2"
CASES = {  # name: (ranks, micro-batch, overrides)
    "eager, 1 rank": (1, 16, RESHARDED),
    "recompute=block, 1 rank": (1, 16, f"{RESHARDED} --compute.activation_checkpointing=block"),
    "compiled, budget 0.5, 1 rank": (1, 16, f"{RESHARDED} {COMPILED} {BUDGET}=0.5"),
    "compiled, budget 0, 1 rank": (1, 16, f"{RESHARDED} {COMPILED} {BUDGET}=0.0"),
    "eager, 2 ranks, averaged": (2, 8, f"{RESHARDED} --optim.ema_half_life=600"),
    "eager, 2 ranks, kept, bf16 reduced": (2, 8, f"{KEPT} {BF16}"),
    "eager, HSDP 2 x 2, bf16, accumulated": (4, 2, f"{RESHARDED} {HSDP} {BF16}"),
    "eager, regions of 2, 3 ranks": (3, 4, f"{RESHARDED} --parallel.region_blocks=2"),
}
STEP = "a step to be measured"
GLOO = ("c10d::", "gloo:")  # how the profiler names collectives, where they begin and in their threads
CONFIG = ROOT / "configs" / "schnell_gbs512.toml"
STEPS = 3


def overrides(name):
    """The overrides of a case. The global batch is one micro-batch per rank, or two if accumulated."""
    ranks, micro, options = CASES[name]
    batch = ranks * micro * (2 if "accumulated" in name else 1)
    return [*SMALL.split(), *options.split(), f"--train.micro_batch={micro}", f"--train.global_batch={batch}"]


def predicted(name):
    """Bytes of the plan."""
    count = CASES[name][0]
    cfg = config_file.load(CONFIG, overrides(name))
    rows = config.micro_batch(cfg, count)
    layout, traced = region_costs.node_layout(cfg, count, count), region_costs.trace(cfg, "cpu", rows)
    return memory.fullest(cfg, layout, traced).total


def main(name, out):
    """One rank of a case: warm-up and STEPS steps, the profiler watching. Rank 0 writes the most bytes of any rank."""
    cfg = config_file.load(CONFIG, overrides(name))
    world = ranks.start(cfg.parallel)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        net = sharding.build(cfg, world, seed=0)
        steps = Trainer(TrainState(net, cfg, world), cfg, world)
        steps.state.opt.states()
        for task in (steps.warm_up, *STEPS * (steps.train,)):
            with record_function(STEP):
                task()
    found = ranks.gather_objects(float(min(peaks(profiler)[1:])))
    if world.rank == 0:
        Path(out).write_text(str(max(found)))
    return 0


def peaks(profiler):
    """The most bytes that torch's allocator had handed out at a time, in each step that is marked STEP.

    The profiler does not hear of what other threads free. Memory that is handed out a second time was free, and nothing
    that a step makes outlives it. What else was not heard of can only raise a count, so that of equal steps the
    smallest is the nearest.
    """
    todo = [(event, False) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    events = []
    while todo:
        event, in_gloo = todo.pop()
        todo.extend((child, in_gloo or event.name.startswith(GLOO)) for child in event.children)
        if event.tag == _EventType.Allocation and not (in_gloo and event.extra_fields.alloc_size > 0):
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


def tensor_bytes(cfg, world):
    """The most bytes of a rank's tensors in an eager step of an optimizer that has its moments, on a CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        state = TrainState(sharding.build(cfg, world, None, PrecisionRecipe(cfg)), cfg, world)
        health = Health(world.device)
        batch, _ = (allocate(cfg.model, rows) for rows in (config.rank_batch(cfg, world.size), cfg.eval.batch))
        for _ in range(2):
            with record_function(STEP):
                train_step(state.net, state.opt, batch, health, cfg)
    return peaks(profiler)[1]


def error(name, folder):
    """The plan's error for a case, relative to what its ranks measure."""
    out = folder / "bytes"
    done = script("tests/helpers/step_memory.py", name, out, ranks=CASES[name][0], timeout=600)
    assert done.returncode == 0, done.stderr
    return predicted(name) / float(out.read_text()) - 1
