"""FP8 in a net: one linear, the devices, delayed scaling, and training, validation and checkpoints with it.

On a CPU the decoded values are multiplied (test_fp8_numerics.py). Nothing here tells how fast or how stable a GPU is.
tests/golden holds casts and scales of hard values.
"""

import json
import math
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import fp8_net
import pytest
import torch
from conftest import called, micro_run, refusal, require_identical, trained
from fp8_net import low
from lively_nets import whole
from precision_ranks import STEPS, fp8_config, lively_state, steps, validated
from torch import nn

from flux_ref import checkpoint, config_file, sharding
from flux_ref.checkpoint import Checkpoint, load
from flux_ref.config import ModelConfig
from flux_ref.model import SingleStreamBlock
from flux_ref.precision import fp8
from flux_ref.precision.linear import PolicyLinear
from flux_ref.precision.recipe import PrecisionRecipe
from flux_ref.trainer import Trainer

ARCHS = ("cpu", "gfx942", "sm100")  # both families of formats, both rules of layout


def randn(*shape, seed=2):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def passed(net, x, grad):
    """The output and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    out = net(x)
    out.backward(grad)
    return [out.detach(), x.grad, *(parameter.grad for parameter in net.parameters())]


def test_a_linear_and_its_gradients_are_close_to_fp64_without_torchs_own_product(monkeypatch):
    """The bounds are what rounding to 3 and 2 bits of mantissa costs, measured 0.037 and 0.06."""
    monkeypatch.setattr(fp8, "_device_mm", None)
    for arch, (shape, bias) in product(ARCHS, (((2, 8, 768), True), ((64, 768), False))):
        exact = nn.Linear(768, 256, bias=bias).bfloat16().double()
        linear = nn.Linear(768, 256, bias=bias)
        linear.load_state_dict(exact.state_dict())
        x = randn(*shape)
        grad = randn(*shape[1:-1], 256, shape[0], seed=3).movedim(-1, 0)  # not contiguous
        found = passed(low(linear, arch=arch), x, grad)
        want = passed(exact, x.double(), grad.double())
        for values, reference, bound in zip(found, want, (0.045, 0.07, 0.07)):
            error = float((values.double() - reference).norm() / reference.norm())
            assert (values.dtype, values.shape) == (torch.bfloat16, reference.shape), arch
            assert 0.01 < error < bound, (arch, shape)
        assert not bias or torch.equal(found[3], grad.flatten(0, -2).contiguous().sum(0))


def test_a_history_keeps_the_newest_magnitudes_and_sets_the_next_scale(world, monkeypatch):
    """The largest of a step's micro-batches counts; 0 and infinity leave history and scale as they were."""
    cfg = fp8_net.config("fp8_delayed", history=2, dynamic_steps=1)
    linear = PolicyLinear(nn.Linear(32, 16).bfloat16(), "single_blocks.0.linear1", cfg, "cpu")
    state = PrecisionRecipe(cfg)
    state.find(linear, torch.device("cpu"))
    taken = []
    cast = fp8.cast

    def noted(x, scale, dtype):
        taken.append(float(scale))
        return cast(x, scale, dtype)

    monkeypatch.setattr(fp8, "cast", noted)
    ones = torch.ones(16, 32).bfloat16()
    histories = []
    for step, pair in enumerate(((2, 1), (4, 8), (1, 1), (0, 0), (1, math.inf), (1, 1))):
        state.begin(step)
        taken.clear()
        for factor in pair:
            linear(ones * factor).sum().backward()
        scales = [taken[0], taken[len(taken) // 2]]  # of the input of each micro-batch
        histories.append(state.history[0].tolist())
        assert set(state.history[1].tolist()) <= {0.0, 1.0}, "of the gradient"
        assert scales == [448 / (max(histories[step]) if step else factor) for factor in pair], step
        state.after_backward()
        linear.weight.data.mul_(2)
    assert histories == [[0, 0], [2, 0], [8, 2], [1, 8], [1, 8], [1, 8]]


def test_a_block_in_parts_gives_the_bits_of_one_with_whole_tensors_in_every_layout(monkeypatch):
    """Inputs and gradients in parts, with the largest magnitude in any part, dynamic and delayed."""
    in_parts = PolicyLinear.in_parts

    def joined(linear, parts, widths):
        (out,) = in_parts(linear, (torch.cat(parts, dim=-1),), (linear.out_features,))
        return out.split(widths, dim=-1)

    model = ModelConfig(hidden=64, heads=2, rope_axes=(16, 8, 8))

    def computed(linear_in_parts, arch, preset, seed):
        monkeypatch.setattr(PolicyLinear, "in_parts", linear_in_parts)
        torch.manual_seed(seed)
        block = SingleStreamBlock(model).bfloat16()
        linears = [low(one, preset, arch) for one in (block.linear1, block.linear2)]
        block.linear1, block.linear2 = linears
        leaves = [(randn(2, 16, 64) * torch.arange(1, 65).roll(seed * 40)).requires_grad_(), randn(2, 64, seed=3)]
        out = block(*leaves, torch.ones(16, 16, 2))
        out.backward(randn(2, 16, 64, seed=seed + 5))
        named = dict(block.named_parameters())
        assert list(named) == list(dict(SingleStreamBlock(model).named_parameters()))
        amaxes = [amax for one in linears if one.of_grad.scales for amax in (one.of_grad.amax, one.of_input.amax.max())]
        return [out, leaves[0].grad, *(one.grad for one in named.values()), *amaxes]

    for preset, seed in product(("fp8", "fp8_delayed"), range(3)):
        want = computed(joined, "sm89", preset, seed)
        for arch in ("sm89", "sm100"):
            assert all(map(torch.equal, computed(in_parts, arch, preset, seed), want)), (arch, preset, seed)
    for case in (("gfx942", "fp8_delayed", 1), ("cpu", "mxfp8", 1)):
        assert all(map(torch.equal, computed(in_parts, *case), computed(joined, *case))), case


def test_every_device_with_fp8_has_its_formats_and_layouts(monkeypatch):
    ocp = (torch.float8_e4m3fn, torch.float8_e5m2)
    fnuz = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    for archs, want in (
        ("gfx942", (*fnuz, True)),
        ("sm89 sm90 sm120 cpu gfx950 gfx1201", (*ocp, True)),
        ("sm100 sm103", (*ocp, False)),
    ):
        assert {tuple(fp8.support(arch)) for arch in archs.split()} == {want}
    for arch in ("sm80", "sm86", "gfx90a", "gfx1100"):
        assert f"{arch} does not; set precision.preset=bf16" in refusal(fp8.support, arch)
    known = SimpleNamespace(major=10, minor=3, gcnArchName="gfx942:sramecc+:xnack-")
    module = SimpleNamespace(get_device_properties=lambda device: known)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    for name, hip, kind in (("sm103", None, "cuda"), ("gfx942", "6.4", "cuda"), ("cpu", None, "cpu")):
        monkeypatch.setattr(torch.version, "hip", hip)
        assert fp8.architecture(torch.device(kind)) == name


def test_validation_has_dynamic_scales_and_notes_nothing_and_bf16_may_be_asked_for(world):
    sums = {}
    losses = {}
    for name, values in {
        "delayed": {},
        "dynamic": {"precision__preset": "fp8"},
        "fp8, then bf16": {"precision__eval": False, "precision__gather": False},
        "bf16": {"precision__preset": "bf16"},
    }.items():
        cfg = fp8_config(**values)
        state = lively_state(cfg, world)
        for scale, _ in () if name == "bf16" else state.recipe.scales:
            scale.fill_(1e-3)  # would turn inputs into zeros
        sums[name] = validated(state, cfg)
        assert name == "bf16" or not any(amax.any() for amax in state.recipe.amaxes)
        state.recipe.after_load()
        losses[name] = steps(state, cfg, world, count=1)
    assert torch.equal(sums["delayed"], sums["dynamic"])
    assert torch.equal(sums["fp8, then bf16"], sums["bf16"]) and not torch.equal(sums["delayed"], sums["bf16"])
    assert losses["delayed"] == losses["fp8, then bf16"] != losses["bf16"], "training is in FP8"


def test_infinity_that_a_remembered_scale_hides_stops_the_step(world):
    """A cast turns infinity into the largest value, so loss and gradients stay finite. Also over micro-batches."""
    cfg = fp8_config(train__micro_batch=3)
    state = lively_state(cfg, world)
    norms = []
    steps(state, cfg, world, count=1, norms=norms)
    assert all(inverse == 1 / scale for scale, inverse in state.recipe.scales)
    linear = state.recipe.linears[0]
    linear.register_forward_pre_hook(lambda _, args: (args[0].index_fill(-1, torch.tensor([0]), math.inf),))
    steps(state, cfg, world, count=2, norms=norms)
    assert [math.isfinite(norm) for norm in norms] == [True, False, False]


def test_a_warm_up_and_a_validation_leave_no_trace(world):
    cfg = fp8_config(precision__dynamic_steps=1, train__synthetic_steps=1)
    disturbed, undisturbed = (lively_state(cfg, world) for _ in range(2))
    memory = disturbed.recipe
    begun = []
    memory.begin = lambda step, begin=memory.begin: (begun.append(step), begin(step))
    Trainer(disturbed, cfg, world).warm_up()
    assert begun[:2] == [0, 1], "both ways of scaling have been compiled"
    assert not memory.history.any() and {float(scale) for scale, _ in memory.scales} == {1.0}
    assert not any(linear.of_input.scales for linear in memory.linears)
    losses = steps(disturbed, cfg, world, count=2)
    validated(disturbed, cfg)
    sharding.reshard(disturbed.net)
    losses += steps(disturbed, cfg, world, count=2)
    assert losses == steps(undisturbed, cfg, world, count=4)
    assert torch.equal(memory.history, undisturbed.recipe.history)
    require_identical(whole(disturbed.net), whole(undisturbed.net))


def test_ranks_share_one_state_and_any_number_of_them_reads_it(measured, world):
    found = measured[3]["fp8"]
    assert found["one NaN"] == [True] * 3
    for name in ("histories", "scales"):
        assert all(torch.equal(of_rank, found[name][0]) for of_rank in found[name])
    cfg = fp8_config()
    state = lively_state(cfg, world)
    losses = steps(state, cfg, world, count=1)
    assert losses[0] == pytest.approx(found["losses"][0], rel=1e-6)
    assert torch.equal(state.recipe.history[0::2], found["first history"][0::2])  # of inputs
    losses += steps(state, cfg, world, count=STEPS - 1)
    assert losses == pytest.approx(found["losses"], rel=1e-2), "each rank rounds gradients of its own scale"
    path = checkpoint.list_checkpoints(Path(found["run"]))[0]
    state.recipe.reset()
    load(path, state)
    assert torch.equal(state.recipe.history, found["histories"][0])

    assert torch.equal(torch.tensor(state.recipe.scales), found["scales"][0])
    saved = Checkpoint(path)
    written = [rows for _, file in saved.files.values() for key, rows in file.items() if key.startswith("fp8.history.")]
    assert [shape for key, shape in saved.shapes.items() if key.startswith("fp8.history.")] == [(2, 3)] * 12
    assert written == [[0, 2]] * 12, "written once"


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])  # 4: in 2 replicas
def test_weights_gathered_in_fp8_give_the_same_bits_with_fewer_bytes(measured, size):
    """A gather moves 1 byte for a converted weight and 2 for any other."""
    found = measured[3]["fp8"]["gathers"] if size == 3 else measured[4]["fp8 gathers"]
    assert len(found) == size - 2
    for name, (same, (few, many)) in found.items():
        assert all(same) and len(same) == size, name
        assert many / 2 < few < 0.75 * many, (name, few, many)


def test_a_run_says_what_it_computes_in_and_eval_finds_its_number(shapes_dir, tmp_path, capsys):
    run = tmp_path / "run"
    options = "model.hidden=48 model.rope_axes=[8,4,4] compute.dtype=bf16 train.global_batch=16 train.max_samples=48"
    options += " train.synthetic_steps=1 eval.every_samples=48 precision.preset=fp8_delayed precision.dynamic_steps=1"
    options += ' precision.history=2 precision.switch=[[32,"nvfp4"]]'
    assert called("train.py", *micro_run(shapes_dir, run, *(f"--{option}" for option in options.split()))) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    validation = "validation as in training, with dynamic scales"
    for line in (
        f"compute fp8_delayed; {validation}; attention kernel: chosen by torch",
        "samples 32 precision switches to nvfp4",
        "from 32 samples on: nvfp4",
        "12 forward: e4m3_delayed x e4m3",
    ):
        assert lines.count(line) == 1, line
    (logged,) = map(json.loads, (run / "eval.jsonl").read_text().splitlines())
    assert called("eval.py", run, "--json") == 0
    assert json.loads(capsys.readouterr().out)["val_loss"] == logged["val_loss"]
    histories = trained(run, "fp8.history.").values()
    assert len(histories) == 12 and all(history.isfinite().all() and history[0].all() for history in histories)


@pytest.mark.nightly
def test_compiled_regions_train_as_eager_ones(world):
    """There is one graph per kind of block, mode and way of scaling, at any depth, and one per shape of a weight."""
    cfg = fp8_config(precision__dynamic_steps=2)
    eager = steps(lively_state(cfg, world), cfg, world)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = config_file.replace(cfg, compute__compile=True)
    state = lively_state(compiled, world)
    assert steps(state, compiled, world) == pytest.approx(eager, rel=1e-2)
    assert state.recipe.history.all()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4 + 6
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.gpu
@pytest.mark.parametrize("preset", ["fp8", "fp8_delayed"])
def test_a_device_trains_as_the_cpu_does(preset, on_both):
    """A device's kernels take every product of the net; bf16 rounds otherwise on the way."""
    cfg = fp8_config(precision__preset=preset)
    on_device, on_cpu = on_both(lambda world: steps(lively_state(cfg, world), cfg, world))
    assert on_device == pytest.approx(on_cpu, rel=2e-2)
