"""Plans: memory against closed forms and runs, communication against counted collectives, and what is said of them."""

import json
from dataclasses import replace

import pytest
import step_memory
import torch
from conftest import MICRO, ROOT, refusal
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.fake_ranks import fake_world
from flux_ref import config, config_file, sharding
from flux_ref.dataloader import allocate
from flux_ref.model import Flux
from flux_ref.precision.recipe import PrecisionRecipe
from flux_ref.trainer import Health, TrainState, train_step
from tools.plan import __main__ as commands
from tools.plan import memory, plan, region_costs, step_time
from tools.plan.region_costs import Footprint, Pass, Product
from tools.plan.step_time import Machine

SMALL = config_file.load(MICRO)
GPU, ASSUMED = step_time.load("h200")
WIDE = {  # a model whose parts outweigh all that is not counted
    **{"model__hidden": 192, "model__heads": 3, "model__rope_axes": (16, 24, 24), "model__text_tokens": 24},
    **{"model__double_blocks": 3, "model__single_blocks": 4, "compute__dtype": "bf16", "eval__batch": 1},
}


TRACE = region_costs.trace


def wide(**values):
    return config_file.replace(SMALL, **(WIDE | values))


@pytest.fixture(scope="module", autouse=True)
def traced_once():
    """Equal nets have equal footprints; many tests ask for the same."""
    trace = region_costs.trace

    def traced(cfg, arch, rows):
        parallel = replace(cfg.parallel, kept_regions=0, reduce_dtype="fp32")
        compute = replace(cfg.compute, cuda_graphs="auto")
        net = replace(config.Config(), model=cfg.model, parallel=parallel, compute=compute, precision=cfg.precision)
        return trace(net, arch, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(region_costs, "trace", traced)
        yield


def alike(one):
    """Footprints of a net whose regions and ends all take the same passes."""
    return dict.fromkeys(("double 1", "single 1", "ends"), Footprint(one, one))


@pytest.fixture
def untraced(monkeypatch):
    """What is said of a plan does not depend on what its regions take, so nothing is traced."""
    small = Pass(1e6, 2e6, 1e7, (Product(1e9, 1e6, False),), kernels=100)
    monkeypatch.setattr(region_costs, "trace", lambda *_: alike(small))


# Shards


def test_the_layout_is_that_of_fsdp2():
    """Parameters of each unit, and of its padded shards; on the meta device."""
    for gpus, node, blocks in ((1, 8, 1), (2, 8, 2), (3, 8, 1), (5, 8, 2), (8, 8, 1), (12, 4, 1)):
        cfg = wide(train__global_batch=gpus, parallel__region_blocks=blocks)
        with fake_world(gpus, node=node) as world, torch.device("meta"):
            net = Flux(cfg.model)
            sharding.shard(net, cfg, world, PrecisionRecipe(cfg))
            units = [*net.double_blocks, *net.single_blocks, net]
            groups = [unit._get_fsdp_state()._fsdp_param_group.fsdp_params for unit in units]
            sizes = []
            for group in groups:
                padded = sum(part.padded_sharded_param_size.numel() for part in group)
                sizes.append((sum(part.sharded_param.numel() for part in group), padded))
        layout = region_costs.node_layout(cfg, gpus, node)
        shards = min(gpus, node)
        assert (layout.shards, layout.replicas) == (shards, gpus // shards)
        assert [(unit.whole, layout.sharded(unit)) for unit in layout.units] == sizes
        lengths = [len(region.blocks) for region in units[:-1]]
        assert [int(unit.kind.split()[-1]) for unit in layout.units[:-1]] == lengths


# Footprints


@pytest.mark.slow  # a compiler traces
def test_a_smaller_budget_keeps_less_and_computes_more():
    own = [wide()] + [wide(compute__compile=True, compute__activation_memory_budget=budget) for budget in (1.0, 0.0)]
    traces = [region_costs.trace(cfg, "cpu", 4) for cfg in own]
    for kind in ("double 1", "single 1"):
        eager, whole, least = (found[kind] for found in traces)
        stream = 4 * (24 + 6) * 192 * 2
        assert eager.forward.kept > whole.forward.kept > 3 * least.forward.kept
        assert stream <= least.forward.kept < 1.2 * stream, "the output alone"
        eager, whole, least = (sum(p.flop for p in own.backward.products) for own in (eager, whole, least))
        assert eager == pytest.approx(whole, rel=0.02) and whole < least


def test_products_add_up_to_the_closed_form_and_fp8_moves_the_linears_of_blocks():
    """Attention's backward counts its scores a second time, which flops_and_bytes.per_sample leaves out."""
    sizes = {"model__text_tokens": 32, "model__latent_height": 8, "model__latent_width": 8}
    cfg = wide(precision__preset="fp8", compute__compile=True, **sizes)
    found = region_costs.trace(cfg, "gfx942", 1)
    S, D = cfg.model.text_tokens + cfg.model.image_tokens, cfg.model.hidden
    linear = 2 * S * 12 * D * D
    for kind, linears, modulation in (("double 1", 8, 24), ("single 1", 2, 6)):
        forward, backward = (work.products for work in found[kind])
        assert sum(product.flop for product in forward) == linear + 4 * S * S * D + modulation * D * D
        assert sum(product.flop for product in backward) == 2 * linear + 10 * S * S * D + 2 * modulation * D * D
        assert sum(product.is_fp8 for product in forward) == linears
        assert sum(product.is_fp8 for product in backward) == 2 * linears


@pytest.mark.slow  # a compiler traces
def test_a_smaller_budget_recomputes_no_product_of_a_linear():
    """But attention, 1.4 % of backward. torch takes products of flux_ref for cheap without sharding.partitioning."""
    flops = []
    for budget in (1.0, 0.9):
        cfg = config_file.replace(config.Config(), compute__compile=True, compute__activation_memory_budget=budget)
        cfg = config_file.replace(cfg, precision__preset="fp8_delayed", compute__dtype="bf16")
        found = TRACE(cfg, "sm90", 16)
        flops.append([sum(p.flop for p in found[kind].backward.products) for kind in ("double 1", "single 1")])
    assert all(low <= 1.02 * whole for whole, low in zip(*flops)), flops


@pytest.mark.slow  # a compiler traces
def test_bytes_are_those_of_the_kernels_that_inductor_generates():
    """bench/results/static_counts.json counts what Inductor's code for schnell reads and writes, without products."""
    text = (ROOT / "bench" / "results" / "static_counts.json").read_text()
    wanted = (("sm90", "bf16", 0.5), ("sm90", "fp8_delayed", 1.0), ("sm100", "fp8", 1.0))
    compared = {}
    for run in json.loads(text)["runs"]:
        case = (run["arch"], run["precision"], run["budget"])
        if case not in wanted or run["micro_batch"] != 8 or not run["compile"]:
            continue
        values = {"precision__preset": run["precision"], "compute__activation_memory_budget": run["budget"]}
        cfg = config_file.replace(config.Config(), compute__compile=True, compute__dtype="bf16", **values)
        found = TRACE(cfg, run["arch"], 8)
        passes = [(kind, way) for kind in ("double", "single") for way in ("forward", "backward")]
        moved = sum(getattr(found[f"{kind} 1"], way).moved for kind, way in passes)
        compared[case] = moved / sum(run["parts"][kind][way]["bytes"] for kind, way in passes)
    assert len(compared) == 3 and all(0.8 < ratio < 1.1 for ratio in compared.values()), compared


def test_nodes_of_a_captured_step():
    """Against the operations that a step dispatches, which have the optimizer's, too."""
    compared = []
    for micros in (1, 2):
        cfg = wide(train__micro_batch=1, train__global_batch=8 * micros)
        with fake_world(8) as world:
            state, health = TrainState(sharding.build(cfg, world, seed=None), cfg, world), Health(world.device)
            batch = allocate(cfg.model, micros, world.device)
            train_step(state.net, state.opt, batch, health, cfg)
            with Dispatched() as step:
                train_step(state.net, state.opt, batch, health, cfg)
        found = region_costs.trace(cfg, "cpu", 1)
        layout = region_costs.node_layout(cfg, 8, 8)
        compared.append(memory.graph_nodes(cfg, layout, found) / step.count)
    assert all(0.85 < ratio < 1.15 for ratio in compared), compared


class Dispatched(TorchDispatchMode):
    """Counts the operations that a device would execute."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # its shards come by themselves
        name = func._schema.name.partition("::")[2]
        self.count += not func.is_view and not name.startswith(("empty", "detach", "view", "_unsafe_view", "lift"))
        return func(*args, **(kwargs or {}))


# Memory

ROWS = 6  # per rank: activations outweigh weights
CASES = {
    "1 rank": (1, 8, {}),
    "8 ranks": (8, 8, {}),
    "kept": (8, 8, {"parallel__kept_regions": -1}),
    "some kept": (8, 8, {"parallel__kept_regions": 2, "train__global_batch": 8}),
    "bf16 reduced": (8, 8, {"parallel__reduce_dtype": "bf16", "parallel__region_blocks": 2}),
    "recomputed": (8, 8, {"compute__activation_checkpointing": "block"}),
    "hsdp": (8, 4, {"parallel__reduce_dtype": "bf16", "parallel__kept_regions": -1}),
    "averaged": (8, 8, {"optim__ema_half_life": 600}),
    "pairs in fp32": (3, 8, {"train__global_batch": 3, "parallel__region_blocks": 2, "compute__dtype": "fp32"}),
    "accumulated": (4, 4, {"train__micro_batch": 3}),
    "accumulated, few": (4, 4, {"train__micro_batch": 1, "train__global_batch": 8}),
    "hsdp accumulated": (8, 4, {"train__micro_batch": 1, "train__global_batch": 16, "parallel__reduce_dtype": "bf16"}),
}


def step_without_peers(name):
    """(planned, real) bytes of a step of rank 0 on real tensors whose collectives nobody answers."""
    gpus, node, values = CASES[name]
    cfg = wide(**({"train__global_batch": ROWS * gpus} | values))
    rows = config.micro_batch(cfg, gpus)
    layout, footprints = region_costs.node_layout(cfg, gpus, node), region_costs.trace(cfg, "cpu", rows)
    with fake_world(gpus, node=node) as world:
        return memory.fullest(cfg, layout, footprints).total, step_memory.tensor_bytes(cfg, world)


@pytest.mark.parametrize("names", [["some kept"], pytest.param(CASES, marks=pytest.mark.nightly)])
def test_memory_of_steps_without_peers(names):
    """In the case of pairs in fp32 the fullest instant is when gathered weights are copied."""
    compared = {name: step_without_peers(name) for name in names}
    assert {name: pair for name, pair in compared.items() if pair[0] != pytest.approx(pair[1], rel=0.03)} == {}


@pytest.mark.nightly
@pytest.mark.parametrize("name", step_memory.CASES)
def test_memory_of_real_ranks(name, tmp_path):
    """The better of two launches: on a busy machine collectives end late, and more buffers live at a time."""
    assert any(abs(step_memory.error(name, tmp_path)) <= 0.05 for _ in range(2))


# Time


def paced(kept, gpu=GPU, **values):
    """A step of 8 ranks that moves as many bytes as its memory moves in a second."""
    cfg = wide(train__global_batch=8, parallel__kept_regions=kept, **values)
    machine = Machine(gpu, replace(ASSUMED, hop_us=0.0), 8)
    second = Pass(0, 0, ASSUMED.memory_share * gpu.memory_tb_s * 1e12, ())
    footprints = alike(second)
    layout = region_costs.node_layout(cfg, 8, 8)
    return step_time.times(cfg, layout, footprints, machine), len(layout.units)


def links(times):
    """Seconds of all collectives of a step."""
    return times.all_gather + times.reduce_scatter + times.all_reduce


def test_fast_links_hide_behind_slow_compute():
    for kept in (0, -1):
        times, units = paced(kept)
        assert times.compute == pytest.approx(2 * units, rel=1e-3)
        assert 0 < times.step - times.compute < links(times) < 1e-2


def test_slow_links_are_waited_for():
    slow = replace(GPU, scale_up_gb_s=1e-4, scale_out_gb_s=1e-4)
    times, _ = paced(kept=0, gpu=slow)
    assert links(times) > 3 * times.compute
    assert links(times) - times.compute < times.step - times.compute < links(times) + 1
    some, _ = paced(kept=3, gpu=slow)
    every, _ = paced(kept=-1, gpu=slow)
    assert every.step < some.step < times.step and every.all_gather < some.all_gather < times.all_gather


def test_rings_by_closed_form():
    gpu = replace(GPU, scale_up_gb_s=400.0, scale_out_gb_s=50.0, domain=8)
    machine = Machine(gpu, replace(ASSUMED, link_share=0.5, hop_us=2.0), 64)
    assert machine.ring(8e9, 1) == 0
    assert machine.ring(8e9, 8) == pytest.approx(7e9 / 200e9 + 14e-6), "inside a node"
    assert machine.ring(8e9, 8, stride=8) == pytest.approx(7e9 / 25e9 + 14e-6), "one rank of each node"
    assert machine.ring(8e9, 64) == pytest.approx(7.875e9 / 200e9 + 126e-6), "all adapters of a node share a ring"
    assert machine.ring(8e9, 64, tree=True) == pytest.approx(7.875e9 / 200e9 + 6 * 2e-6), "six levels of a tree"


def test_products_take_what_is_longer():
    machine = Machine(GPU, ASSUMED, 1)
    peak, bandwidth = ASSUMED.gemm_share * GPU.bf16_tflops * 1e12, ASSUMED.memory_share * GPU.memory_tb_s * 1e12
    small, large = Product(peak, 2 * bandwidth, False), Product(3 * peak, bandwidth, False)
    eight = Product(peak, 0, True)
    assert machine.seconds(Pass(0, 0, bandwidth, (small, large))) == pytest.approx(1 + 2 + 3)
    assert machine.seconds(Pass(0, 0, 0, (eight,))) == pytest.approx(GPU.bf16_tflops / GPU.fp8_tflops)


# Hardware


def test_every_gpu_of_the_table_loads_and_names_its_source():
    blocks = step_time.TABLE.read_text().split("[gpu.")[1:]
    for block in blocks:
        name = block.partition("]")[0]
        for precision in ("bf16",) if name == "a100" else ("bf16", "fp8"):
            _, assumed = step_time.load(name, precision)
            assert 0.2 <= assumed.range <= 0.4 and assumed.source.startswith(("assumed", "fitted")), name
    assert step_time.TABLE.read_text().count("https://") >= len(blocks)


def test_without_graphs_a_step_takes_at_least_the_time_of_the_host(untraced):
    """A micro model's kernels are so short that the host decides. Three micro-batches take it three times."""
    machine = Machine(GPU, ASSUMED, 4)
    few = {"train__micro_batch": 1, "compute__cuda_graphs": "off"}
    captured = plan.make(config_file.replace(SMALL, train__micro_batch=1), machine)
    once, three = (
        plan.make(config_file.replace(SMALL, train__global_batch=batch, **few), machine) for batch in (4, 12)
    )
    assert captured.host == 0 < captured.graphs and once.graphs == 0 < once.host == once.times.step
    assert three.host == pytest.approx(3 * once.host, rel=0.05)
    for one, slow in ((captured, False), (once, True)):
        assert any("the host is slower than the card" in line for line in plan.warnings(one)) == slow


# The command

ARGS = [str(MICRO), "--train.global_batch=4", "--gpus", "4", "--gpu", "h200"]


def test_the_command_prints_the_plan(untraced, capsys):
    assert commands.main([*ARGS, "--eval.batch=4", "--price-per-gpu-hour=2"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    one = plan.make(config_file.load(MICRO, ["--eval.batch=4", "--train.global_batch=4"]), Machine(GPU, ASSUMED, 4))
    tensors = sum(one.instant.parts.values())
    assert one.total == pytest.approx(tensors * (1 + ASSUMED.margin) + one.graphs + ASSUMED.outside_gb * 1e9)
    assert one.samples == SMALL.train.max_samples and one.evaluations * one.evaluation < one.train
    text = " ".join(shown.split())
    for words in (
        f"step {one.times.step:.3g} s",
        f"{one.total / 1e9:.2f} GB of 141 GB",
        "no reference point fits",  # a micro model
        ", cost ",
        "WARNING validation: 3 of 48 rows are padding",
        "WARNING compute.dtype=fp32: times are those of bf16",
    ):
        assert words in text, words


def test_what_does_not_fit_has_no_time(untraced, capsys, monkeypatch):
    monkeypatch.setattr(step_time, "load", lambda *_: (replace(GPU, memory_gb=1), ASSUMED))
    assert commands.main([*ARGS, "--parallel.kept_regions=-1"]) == 1
    shown = capsys.readouterr().out
    assert "no times: this config does not fit the card" in shown and "\n0 layouts leave 4 GB free" in shown
    assert "\nstep " not in shown and "samples/s" not in shown


def test_command_refuses():
    schnell = [str(ROOT / "configs" / "schnell_gbs512.toml"), "--gpus", "8", "--gpu", "a100"]
    cases = [
        ([*ARGS[:-1], "h20"], "unknown GPU h20; known are a100, rtx4090, h100"),
        ([*ARGS, "--price-per-gpu-hour", "nan"], "nan: give a number from 0"),
        ([*ARGS, "--gpus", "5"], "is no multiple of 5, the number of ranks"),
        ([*schnell, "--precision.preset=fp8"], "needs FP8 matrix units"),
        ([*schnell, "--precision.preset=mxfp8"], "a plan knows the rates of bf16, fp8"),
    ]
    told = [(words, refusal(commands.main, args)) for args, words in cases]
    assert [(words, message) for words, message in told if words not in message] == []


@pytest.mark.slow
def test_what_pages_give_8_gpus_of_80_gb_fits_them():
    h100, assumed = step_time.load("h100")
    for name in ("own_256", "schnell_gbs512"):
        found = plan.make(config_file.load(ROOT / "configs" / f"{name}.toml"), Machine(h100, assumed, 8))
        assert found.total <= found.card and plan.warnings(found) == [], name
    dropping = config_file.replace(found.cfg, train__caption_drop=0.5)
    assert "no benchmark result: train.caption_drop=0.5" in plan.warnings(replace(found, cfg=dropping))[0]


def test_an_average_of_the_weights_costs_4_bytes_per_parameter(untraced):
    """The optimizer also moves it in each step: reads and writes it, and reads the weight once more."""
    without, with_average = (plan.make(wide(optim__ema_half_life=ema), Machine(GPU, ASSUMED, 1)) for ema in (0, 600))
    parameters = without.layout.parameters
    assert with_average.total - without.total == pytest.approx(4 * parameters * (1 + ASSUMED.margin))
    assert with_average.times.optimizer / without.times.optimizer == pytest.approx(52 / 40)


@pytest.mark.slow
def test_the_fastest_layouts_fit_and_none_beside_them_is_faster():
    """Against every number of kept regions. Gradients of a region do not grow with samples."""
    cfg = wide(train__global_batch=48)  # 12 samples of each rank
    machine = Machine(replace(GPU, arch="cpu"), ASSUMED, 4)
    half = plan.make(config_file.replace(cfg, train__micro_batch=4, parallel__kept_regions=3), machine)
    machine = replace(machine, gpu=replace(machine.gpu, memory_gb=(half.total + plan.SPARE) / 1e9))
    found = plan.fastest(cfg, machine)
    every = [
        plan.make(config_file.replace(cfg, train__micro_batch=rows, parallel__kept_regions=kept), machine)
        for rows in (3, 4, 6)
        for kept in range(-1, 7)
    ]
    fit = [one for one in every if one.total <= half.total]
    best = {
        rows: min(one.times.step for one in fit if one.layout.rows == rows) for rows in {one.layout.rows for one in fit}
    }
    steps = [one.times.step for one in found]
    assert best.keys() == {3, 4} and best.items() <= {one.layout.rows: one.times.step for one in found}.items()
    assert max(one.layout.rows for one in found) == 4 and steps == sorted(steps)
    eight = config_file.replace(cfg, precision__preset="fp8")
    assert plan.fastest(eight, machine) == [], "16 divides rows x 6"
