"""FP8: the arithmetic of one product, the state of delayed scaling, and that neither shows anywhere else.

The CPU multiplies FP8 by the same arithmetic as a GPU, in any layout. What a GPU would refuse is asserted by the code
and tested here; nothing here says how fast or how stable a GPU is.
"""

import json
import math
import random
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import require_identical, script, trained
from precision_ranks import FACTS, STEPS, fp8_config, lively_state, steps
from rank_runs import plain_net, whole
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as recompute

import eval as eval_script
import train
from flux_ref import checkpoint, config, config_file, config_rules, ranks, schedule, sharding
from flux_ref.config import Config, Fp8Config
from flux_ref.data import TrainSet, allocate, synthetic
from flux_ref.errors import Refusal
from flux_ref.formats import checkpoint_files
from flux_ref.model import Flux, parameter_table
from flux_ref.speed import fp8
from flux_ref.speed.fp8 import Fp8Linear, Fp8State, arithmetic, cast, scaled_mm
from flux_ref.step import Health, State, train_step, validation_step, warm_up

CPU = torch.device("cpu")
ARCHS = ("cpu", "gfx942", "sm100")  # both families of formats, both rules of layout
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
ONE = torch.tensor(1.0)


@pytest.fixture
def world():
    yield ranks.start(config.ParallelConfig())
    ranks.stop()


def random_linear(arch: str = "cpu", inputs: int = 96, outputs: int = 64, bias: bool = True, **values: object):
    """A converted linear in bf16 with lively weights."""
    torch.manual_seed(1)
    linear = nn.Linear(inputs, outputs, bias=bias).bfloat16()
    return Fp8Linear(linear, Fp8Config(recipe="dynamic", **values), arithmetic(arch))


def relative(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want).norm() / want.norm())


# One linear


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 8, 768), (16, 16, 768), (64, 768)])
def test_a_linear_and_its_gradients_are_close_to_fp64(arch, bias, shape):
    """The bounds are what rounding to 3 and 2 bits of mantissa costs, measured 0.037 and 0.06."""
    linear = random_linear(arch, inputs=768, outputs=256, bias=bias)
    x = torch.randn(shape).bfloat16().requires_grad_()
    out = linear(x)
    grad = torch.randn(*shape[1:-1], 256, shape[0]).bfloat16().movedim(-1, 0)  # not contiguous
    out.backward(grad)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, linear.weight)]
    want = F.linear(*exact, linear.bias.detach().double() if bias else None)
    want.backward(grad.double())
    for found, reference, bound in (
        (out.detach(), want.detach(), 0.045),
        (x.grad, exact[0].grad, 0.07),
        (linear.weight.grad, exact[1].grad, 0.07),
    ):
        assert found.dtype == torch.bfloat16 and found.shape == reference.shape
        assert 0.01 < relative(found, reference) < bound
        assert F.cosine_similarity(found.double().flatten(), reference.flatten(), dim=0) > 0.997
    assert not bias or torch.equal(linear.bias.grad, grad.flatten(0, -2).contiguous().sum(0))


def test_gradients_keep_the_range_of_e5m2():
    """Rows of a gradient that are 2**25 smaller than others are as exact as those."""
    linear = random_linear()
    x = torch.randn(32, 96).bfloat16().requires_grad_()
    grad = torch.randn(32, 64).bfloat16()
    grad[16:] *= 2**-25
    linear(x).backward(grad)
    want = grad.double() @ linear.weight.detach().double()
    assert relative(x.grad[16:], want[16:]) < 0.07


def test_layouts_change_no_bit():
    """sm89 wants row times column, sm100 takes all."""
    found = []
    for arch in ("sm89", "sm100"):
        linear = random_linear(arch)
        x = torch.linspace(-2, 3, 32 * 96).sin().view(32, 96).bfloat16().requires_grad_()
        linear(x).square().mean().backward()
        found.append((x.grad, linear.weight.grad))
    assert all(map(torch.equal, *found))


def test_delayed_scales_that_equal_the_dynamic_ones_change_no_bit():
    found = []
    for scaling in ("dynamic", "delayed"):
        torch.manual_seed(1)
        linear = Fp8Linear(nn.Linear(96, 64).bfloat16(), Fp8Config(recipe="delayed"), arithmetic("cpu"))
        x, grad = torch.randn(16, 96).bfloat16().requires_grad_(), torch.randn(16, 64).bfloat16()
        linear.scale_x.copy_(448 / x.detach().abs().max().float())
        linear.scale_g.copy_(57344 / grad.abs().max().float())
        linear.scaling = scaling
        out = linear(x)
        out.backward(grad)
        assert linear.amax_x == x.abs().max() and linear.amax_g == grad.abs().max()
        found.append((out, x.grad, linear.weight.grad, linear.bias.grad))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_under_dynamic_scales_shows(bad):
    x = torch.randn(16, 96).bfloat16()
    x[3, 5] = bad
    assert not random_linear()(x).isfinite().all()


def test_zeros_stay_zeros():
    linear = random_linear(bias=False)
    x = torch.zeros(16, 96).bfloat16().requires_grad_()
    out = linear(x)
    out.backward(torch.zeros(16, 64).bfloat16())
    assert not out.any() and not x.grad.any() and not linear.weight.grad.any()


# The product and the cast


def operands(a_dtype: torch.dtype, b_dtype: torch.dtype, rows: int = 24, inner: int = 48, columns: int = 32):
    torch.manual_seed(0)
    return torch.randn(rows, inner).to(a_dtype), torch.randn(columns, inner).to(b_dtype)


@pytest.mark.parametrize(
    "a_dtype,b_dtype",
    [(a, b) for family in (FORMATS[:2], FORMATS[2:]) for a in family for b in family if not a == b == family[1]],
)
def test_a_product_equals_that_of_the_dequantised_sides(a_dtype, b_dtype):
    a_MK, b_NK = operands(a_dtype, b_dtype)
    scales = torch.tensor(3.0), torch.tensor(0.7)
    want = (a_MK.double() / 3.0) @ (b_NK.double() / scales[1].double()).t()
    exact = scaled_mm(a_MK, b_NK.t(), *scales, row_times_column=True, out_dtype=torch.float32)
    torch.testing.assert_close(exact.double(), want, rtol=1e-6, atol=1e-5)
    bias = torch.randn(32).bfloat16()
    rounded = scaled_mm(a_MK, b_NK.t(), *scales, row_times_column=True, bias_N=bias)
    torch.testing.assert_close(rounded.double(), want + bias.double(), rtol=2**-8, atol=2**-8)


def test_what_a_gpu_would_refuse_is_refused():
    e4m3, e5m2 = FORMATS[:2]
    a_MK, b_NK = operands(e4m3, e4m3)
    row_major = b_NK.t().contiguous()
    scaled_mm(a_MK, row_major, ONE, ONE, row_times_column=False)
    with pytest.raises(AssertionError, match="column-major"):
        scaled_mm(a_MK, row_major, ONE, ONE, row_times_column=True)
    with pytest.raises(AssertionError, match="row-major"):
        scaled_mm(a_MK.t().contiguous().t(), b_NK.t(), ONE, ONE, row_times_column=True)
    with pytest.raises(AssertionError, match="e5m2"):
        scaled_mm(a_MK.to(e5m2), b_NK.to(e5m2).t(), ONE, ONE, row_times_column=True)
    for sizes in ({"inner": 40}, {"columns": 24}):
        a_MK, b_NK = operands(e4m3, e4m3, **sizes)
        with pytest.raises(AssertionError, match="% 16"):
            scaled_mm(a_MK, b_NK.t(), ONE, ONE, row_times_column=True)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_cast_saturates_and_keeps_nan(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([1e5, math.inf, -1e9, -math.inf, math.nan, 0.0, largest])
    found = cast(x, ONE, dtype).float()
    assert found.tolist()[:4] == [largest, largest, -largest, -largest]
    assert found[4].isnan() and found[5] == 0 and found[6] == largest
    assert cast(x.bfloat16(), torch.tensor(0.25), dtype)[6].float() == pytest.approx(largest / 4, rel=0.07)


# Devices


@pytest.mark.parametrize("arch", ["gfx940", "gfx941", "gfx942"])
def test_mi300_has_formats_of_its_own(arch):
    assert arithmetic(arch) == (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, False)


@pytest.mark.parametrize("arch,ruled", [("sm89", True), ("sm90", True), ("sm100", False), ("sm103", False)])
def test_hopper_and_ada_want_row_times_column(arch, ruled):
    assert arithmetic(arch) == (torch.float8_e4m3fn, torch.float8_e5m2, ruled)


@pytest.mark.parametrize("arch,ruled", [("cpu", True), ("sm120", True), ("gfx950", False), ("gfx1201", False)])
def test_all_others_have_the_common_formats(arch, ruled):
    assert arithmetic(arch) == (torch.float8_e4m3fn, torch.float8_e5m2, ruled)


@pytest.mark.parametrize("arch", ["sm80", "sm86", "gfx90a", "gfx1100", "sm75"])
def test_a_device_without_fp8_is_refused(arch):
    with pytest.raises(Refusal, match=f"{arch} does not; set fp8.recipe=off"):
        arithmetic(arch)


@pytest.mark.parametrize(
    "hip,properties,want",
    [
        (None, {"major": 9, "minor": 0}, "sm90"),
        (None, {"major": 10, "minor": 3}, "sm103"),
        ("6.4", {"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-"}, "gfx942"),
    ],
)
def test_an_architecture_is_what_the_device_says(hip, properties, want, monkeypatch):
    module = SimpleNamespace(get_device_properties=lambda device: SimpleNamespace(**properties))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert fp8.architecture(SimpleNamespace(type="an accelerator")) == want
    assert fp8.architecture(CPU) == "cpu"


# Which linears


def converted(cfg: Config) -> nn.Module:
    with torch.device("meta"):
        net = Flux(cfg.model)
        fp8.convert(net, cfg, CPU)
    return net


def test_the_228_token_linears_of_schnell_and_nothing_else():
    net = converted(Config(fp8=Fp8Config(recipe="dynamic")))
    want = {f"single_blocks.{i}.linear{k}" for i in range(38) for k in (1, 2)}
    for stream in ("img", "txt"):
        for part in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2"):
            want |= {f"double_blocks.{i}.{stream}_{part}" for i in range(19)}
    assert {name for name, module in net.named_modules() if isinstance(module, Fp8Linear)} == want and len(want) == 228
    found = [(name, tuple(parameter.shape)) for name, parameter in net.named_parameters()]
    assert found == list(parameter_table(net.cfg).items())  # names, shapes and order are BFL's


def test_off_converts_nothing_and_a_net_of_other_names_is_noticed():
    assert not any(isinstance(module, Fp8Linear) for module in converted(fp8_config(fp8__recipe="off")).modules())
    with pytest.raises(AssertionError, match="0 linears, want 22"):
        fp8.convert(nn.Linear(3, 4), fp8_config(), CPU)


# Delayed scaling


class Model:
    """One tensor's delayed scale, in plain Python."""

    def __init__(self, cfg: Fp8Config, largest: float):
        self.cfg, self.largest, self.past, self.scale = cfg, largest, [], 1.0

    def update(self, amax: float) -> None:
        if not (math.isfinite(amax) and amax > 0):
            return
        self.past = [amax, *self.past][: self.cfg.history]
        basis = max(self.past) if self.cfg.algorithm == "max" else amax
        self.scale = min(self.largest / basis / 2**self.cfg.margin, 2.0**self.cfg.max_scale_exponent)


def two_linears(cfg: Fp8Config, arch: str = "cpu") -> Fp8State:
    net = nn.ModuleList(Fp8Linear(nn.Linear(16, 16), cfg, arithmetic(arch)) for _ in range(2))
    return Fp8State(net, cfg, CPU)


@pytest.mark.parametrize("arch", ["cpu", "gfx942"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"history": 1},
        {"history": 3},
        {"history": 4, "algorithm": "most_recent"},
        {"history": 3, "margin": 2, "max_scale_exponent": 20},
    ],
    ids=str,
)
def test_history_and_scales_follow_the_model(values, arch, world):
    cfg = Fp8Config(recipe="delayed", **values)
    state, rng = two_linears(cfg, arch), random.Random(0)
    models = [
        Model(cfg, largest) for _ in range(2) for largest in map(lambda d: torch.finfo(d).max, arithmetic(arch)[:2])
    ]
    special = (0.0, math.nan, math.inf, 1e-30, 3e38)
    for step in range(40):
        for amax, model in zip(state.amaxes, models):
            value = 0.0 if step < 2 else rng.choice(special) if rng.random() < 0.3 else 10 ** rng.uniform(-12, 4)
            amax.fill_(value)
            model.update(float(torch.tensor(value)))
        is_sound = all(amax.isfinite() for amax in state.amaxes)
        assert state.update().isfinite() == is_sound
        assert [float(scale) for scale in state.scales] == pytest.approx([model.scale for model in models], rel=1e-6)
        assert not any(amax.any() for amax in state.amaxes)
        assert [row[row > 0].tolist() for row in state.history] == [model.past for model in models]


def test_an_update_waits_for_nothing_and_allocates_no_state(world):
    """So that a captured graph may hold it."""

    class NoReads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert "_local_scalar_dense" not in str(func) and "nonzero" not in str(func), func
            return func(*args, **(kwargs or {}))

    state = two_linears(Fp8Config(recipe="delayed"))
    places = [tensor.data_ptr() for tensor in (*state.amaxes, *state.scales, state.history)]
    assert len(set(places)) == 9
    with NoReads():
        state.update()
        state.begin(5)
    assert [tensor.data_ptr() for tensor in (*state.amaxes, *state.scales, state.history)] == places


def test_infinity_that_a_remembered_scale_hides_stops_the_step(world):
    """A cast turns it into the largest value, and loss and gradients stay finite."""
    cfg = fp8_config()
    state, health = lively_state(cfg, world), Health(CPU)
    batch = synthetic(cfg.model, 12)
    state.opt.lr.fill_(1e-3)
    norms, weights = [], []
    for step in range(4):
        if step == 2:
            linear = next(module for module in state.net.modules() if isinstance(module, Fp8Linear))
            linear.register_forward_pre_hook(lambda _, args: (args[0].index_fill(-1, torch.tensor([0]), math.inf),))
        state.fp8.begin(step)
        norms.append(float(train_step(state, batch, health, cfg)[1]))
        weights.append([parameter.detach().to_local().clone() for parameter in state.net.parameters()])
    assert [math.isfinite(norm) for norm in norms] == [True, True, False, False]
    assert all(torch.equal(one, other) for one, other in zip(weights[1], weights[3]))
    assert health.flags[2] == 2


def test_the_first_steps_of_delayed_scaling_are_dynamic():
    state = two_linears(Fp8Config(recipe="delayed", dynamic_steps=3))
    assert state.phases == (0, 3)
    found = []
    for step in range(5):
        state.begin(step)
        found.append({linear.scaling for linear in state.linears})
    assert found == [{"dynamic"}] * 3 + [{"delayed"}] * 2
    assert two_linears(Fp8Config(recipe="delayed", dynamic_steps=0)).phases == (0,)
    dynamic = two_linears(Fp8Config(recipe="dynamic"))
    dynamic.begin(100)
    assert dynamic.phases == (0,) and {linear.scaling for linear in dynamic.linears} == {"dynamic"}


# A whole net


def converted_net(cfg: Config) -> Flux:
    """An unsharded net in bf16 with lively weights, in delayed scaling."""
    net = plain_net(cfg).bfloat16()
    net.rope = net.make_rope()
    fp8.convert(net, cfg, CPU)
    net.fp8 = Fp8State(net, cfg.fp8, CPU)
    net.fp8.begin(0)
    return net


def inputs_of(cfg: Config) -> tuple[torch.Tensor, ...]:
    batch, generator = synthetic(cfg.model, 2), torch.Generator().manual_seed(2)
    img = torch.randn(2, cfg.model.image_tokens, cfg.model.packed_channels, generator=generator)
    return img.bfloat16(), batch["t5"].bfloat16(), batch["clip"].bfloat16(), batch["t"]


def everything(net: Flux, call, inputs: tuple) -> dict[str, torch.Tensor]:
    """Output, gradients and noted magnitudes of a forward and a backward."""
    out = call(*inputs)
    out.float().square().mean().backward()
    found = {name: parameter.grad for name, parameter in net.named_parameters()}
    return {"out": out.detach(), "amax": torch.stack(net.fp8.amaxes).clone(), **found}


SHALLOW = {"model__double_blocks": 1, "model__single_blocks": 1}


def test_one_graph_gives_the_bits_of_eager():
    cfg = fp8_config(**SHALLOW)
    eager, traced = converted_net(cfg), converted_net(cfg)
    torch._dynamo.reset()
    block = traced.single_blocks[0]
    block.forward = torch.compile(block.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    want = everything(eager, eager, inputs_of(cfg))
    require_identical(everything(traced, traced, inputs_of(cfg)), want)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0 and want["amax"].all()
    torch._dynamo.reset()


def test_recomputing_a_block_changes_nothing():
    cfg = fp8_config(**SHALLOW)
    plain, saving = converted_net(cfg), converted_net(cfg)
    for block in (*saving.double_blocks, *saving.single_blocks):
        own = block.forward
        block.forward = lambda *args, own=own: recompute(own, *args, use_reentrant=False)
    want = everything(plain, plain, inputs_of(cfg))
    assert want["amax"].all()
    require_identical(everything(saving, saving, inputs_of(cfg)), want)


def test_without_gradients_nothing_moves_and_scales_are_dynamic():
    cfg = fp8_config()
    net = converted_net(cfg)
    net.fp8.scales[0].fill_(1e-3)  # would flush everything
    with torch.no_grad():
        found = net(*inputs_of(cfg))
    assert not torch.stack(net.fp8.amaxes).any()
    dynamic = converted_net(fp8_config(fp8__recipe="dynamic"))
    assert torch.equal(found, dynamic(*inputs_of(cfg)).detach())


def test_validation_may_stay_in_bf16():
    cfg = fp8_config(fp8__eval=False)
    bf16 = converted_net(fp8_config(fp8__recipe="off"))
    net = converted_net(cfg)
    with torch.no_grad():
        want = bf16(*inputs_of(cfg))
        assert torch.equal(net(*inputs_of(cfg)), want)
        assert not torch.equal(converted_net(fp8_config())(*inputs_of(cfg)), want)
    assert not torch.equal(net(*inputs_of(cfg)).detach(), want)  # training is in FP8


# Training


@pytest.mark.parametrize("micro_batch", [0, 3])
def test_a_step_notes_the_largest_of_its_micro_batches(micro_batch, world):
    cfg = fp8_config(train__micro_batch=micro_batch)
    state = lively_state(cfg, world)
    steps(state, cfg, world, count=1)
    inputs = state.fp8.history[0::2, 0]
    assert inputs.all()
    reference = lively_state(fp8_config(), world)
    steps(reference, fp8_config(), world, count=1)
    torch.testing.assert_close(inputs, reference.fp8.history[0::2, 0], rtol=0.02, atol=0)


def test_after_a_warm_up_training_is_as_if_there_had_been_none(world):
    cfg = fp8_config(fp8__dynamic_steps=1, train__synthetic_steps=1)
    warm, cold = lively_state(cfg, world), lively_state(cfg, world)
    batches = allocate(cfg.model, 12, world.device), allocate(cfg.model, 5, world.device)
    seen = []
    warm.fp8.begin = lambda step, own=warm.fp8.begin: (seen.append(step), own(step))
    warm_up(warm, *batches, cfg)
    assert seen[:2] == [0, 1]  # both ways of scaling have been compiled
    assert not warm.fp8.history.any() and {float(scale) for scale in warm.fp8.scales} == {1.0}
    assert {linear.scaling for linear in warm.fp8.linears} == {"dynamic"}
    assert steps(warm, cfg, world) == steps(cold, cfg, world)
    assert torch.equal(warm.fp8.history, cold.fp8.history)
    require_identical(whole(warm.net), whole(cold.net))


def test_validation_between_steps_changes_nothing(world):
    cfg = fp8_config()
    found = []
    for validates in (False, True):
        state = lively_state(cfg, world)
        losses = steps(state, cfg, world, count=2)
        if validates:
            sums = torch.zeros(3, schedule.TIMESTEPS, dtype=torch.float64)
            validation_step(state.net, synthetic(cfg.model, 5), sums, cfg)
            sharding.reshard(state.net)
            assert sums[1].any()
        found.append((losses + steps(state, cfg, world, count=2), state.fp8.history.tolist()))
    assert found[0] == found[1]


def test_a_saved_state_goes_on_bit_for_bit(world, tmp_path):
    cfg = fp8_config(run__dir=str(tmp_path), fp8__dynamic_steps=1)
    state = lively_state(cfg, world)
    steps(state, cfg, world, count=2)
    saver = checkpoint.Saver(cfg, world, FACTS, lambda line: None)
    saver.save(state, {})
    saver.finish()
    other = lively_state(cfg, world)
    steps(other, cfg, world, count=1)
    saved = checkpoint.resume(checkpoint_files.found(tmp_path)[0], other, FACTS)
    checkpoint.load_progress(saved, other)
    assert [float(scale) for scale in other.fp8.scales] == [float(scale) for scale in state.fp8.scales]
    assert steps(other, cfg, world, count=2) == steps(state, cfg, world, count=2)
    assert torch.equal(other.fp8.history, state.fp8.history)
    require_identical(whole(other.net), whole(state.net))
    off = config_file.replace(cfg, fp8__recipe="dynamic")
    with pytest.raises(Refusal, match=r"1 unexpected: fp8\.history"):
        checkpoint.open_for(checkpoint_files.found(tmp_path)[0], lively_state(off, world), FACTS)


@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_share_one_state_and_any_number_of_them_reads_it(size, tmp_path, world):
    process = script("tests/helpers/precision_ranks.py", tmp_path, ranks=size, timeout=100)
    assert process.returncode == 0, process.stderr[-4000:]
    found = torch.load(tmp_path / "found.pt")
    base, kept = found["base"], found["kept gathered"]
    assert base["losses"] == kept["losses"]
    for name in ("histories", "scales"):
        assert all(torch.equal(own, base[name][0]) for own in (*base[name], *kept[name]))
    assert found["one NaN"] == [True] * size
    assert base["buffers"] == {(torch.Tensor, torch.float32, torch.Size())}
    cfg = fp8_config()
    state = lively_state(cfg, world)
    losses = steps(state, cfg, world, count=1)
    assert losses[0] == pytest.approx(base["losses"][0], rel=1e-6)
    assert torch.equal(state.fp8.history[0::2], base["first history"][0::2])  # of inputs
    losses += steps(state, cfg, world, count=STEPS - 1)
    assert losses == pytest.approx(base["losses"], rel=1e-2)  # each rank rounds gradients of its own scale
    saved = checkpoint.open_for(checkpoint_files.found(tmp_path)[0], state, FACTS)
    state.fp8.reset()
    checkpoint.load_progress(saved, state)
    assert torch.equal(state.fp8.history, base["histories"][0])
    assert torch.equal(torch.stack(state.fp8.scales), base["scales"][0])
    assert saved.tensors["fp8.history"].shape == [2 * 22, 3]
    assert len(saved.tensors["fp8.history"].chunks) == 1, "written once"


# A run


def fp8_overrides(folder, data) -> list[str]:
    sizes = ["--model.hidden=48", "--model.rope_axes=[8, 4, 4]", "--parallel.dtype=bf16", "--train.global_batch=16"]
    recipe = ["--fp8.recipe=delayed", "--fp8.dynamic_steps=1", "--fp8.history=2", "--train.synthetic_steps=1"]
    ends = ["--train.max_samples=48", "--eval.every_samples=48", f"--run.dir={folder}"]
    return [*sizes, *recipe, *ends, f"--data.train={data}/train", f"--data.val={data}/val"]


def called(main, *args: str) -> None:
    try:
        assert main([str(arg) for arg in args]) == 0
    finally:
        ranks.stop()


def test_a_run_says_what_it_computes_in_and_eval_finds_its_number(shapes_dir, tmp_path, capsys, monkeypatch):
    begin, begun = Fp8State.begin, []
    monkeypatch.setattr(Fp8State, "begin", lambda state, step: (begun.append(step), begin(state, step)))
    called(train.main, "tests/micro.toml", *fp8_overrides(tmp_path / "run", shapes_dir))
    said = capsys.readouterr().out
    assert begun[-3:] == [0, 1, 2]
    line = "compute bf16, 22 linears in FP8 with delayed scales (max of 2, the first 1 steps dynamic);"
    assert said.count(line) == 1 and said.count("validation FP8 with dynamic scales") == 1
    (logged,) = map(json.loads, (tmp_path / "run" / "eval.jsonl").read_text().splitlines())
    called(eval_script.main, tmp_path / "run", "--json")
    assert json.loads(capsys.readouterr().out)["val_loss"] == logged["val_loss"]
    history = trained(tmp_path / "run", "fp8.")["history"]
    assert history.shape == (44, 2) and history.isfinite().all() and history[0].all()


@pytest.mark.parametrize(
    "values,want",
    [
        ({"fp8__recipe": "off"}, "bf16 in training and validation"),
        ({"fp8__recipe": "off", "parallel__dtype": "fp32"}, "fp32 in training and validation"),
        (
            {"fp8__recipe": "dynamic", "fp8__eval": False},
            "bf16, 22 linears in FP8 with dynamic scales; validation bf16",
        ),
    ],
)
def test_the_precision_in_words(values, want):
    assert fp8.describe(fp8_config(**values)) == want


@pytest.mark.parametrize(
    "values,message",
    [
        ({"parallel__dtype": "fp32"}, "fp8.recipe=delayed needs parallel.dtype=bf16, not fp32"),
        ({"model__hidden": 24, "model__rope_axes": (4, 2, 2)}, "model.hidden=24 is not divisible by 16"),
        ({"fp8__history": 0}, "fp8.history=0 must be greater than 0"),
        ({"fp8__recipe": "current"}, "fp8.recipe='current' is not one of off, dynamic, delayed"),
        ({"fp8__algorithm": "mean"}, "fp8.algorithm='mean' is not one of max, most_recent"),
        ({"fp8__margin": 9}, "fp8.margin=9 leaves"),
        ({"fp8__max_scale_exponent": 127}, "fp8.max_scale_exponent=127 is beyond fp32"),
    ],
)
def test_a_request_that_cannot_be_honoured_is_refused_in_one_line(values, message):
    with pytest.raises(Refusal) as refused:
        fp8_config(**values)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


def test_tokens_of_a_micro_batch_are_counted():
    cfg = fp8_config(model__text_tokens=10, model__latent_width=4, train__global_batch=16)
    config_rules.validate_world(cfg, 2)
    with pytest.raises(Refusal, match=r"a micro-batch of 4 has 40 and 16; set train.micro_batch to another"):
        config_rules.validate_world(cfg, 4)


# Compiled, and over many steps


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@torch._inductor.config.patch(emulate_precision_casts=True)
def test_a_compiled_linear_gives_the_bits_of_eager_when_it_rounds_like_it(arch):
    """Also for devices that take every layout, of which Inductor knows one."""
    torch._dynamo.reset()
    found = []
    for compiles in (False, True):
        torch.manual_seed(1)
        linear = Fp8Linear(nn.Linear(96, 64).bfloat16(), Fp8Config(recipe="delayed"), arithmetic(arch))
        linear.scaling = "delayed"
        linear.scale_x.fill_(100.0)
        linear.scale_g.fill_(9000.0)
        call = torch.compile(linear, fullgraph=True, dynamic=False) if compiles else linear
        x, grad = torch.randn(2, 16, 96).bfloat16().requires_grad_(), torch.randn(2, 16, 64).bfloat16()
        out = call(x)
        out.backward(grad)
        found.append((out, x.grad, linear.weight.grad, linear.bias.grad, linear.amax_x, linear.amax_g))
    assert all(map(torch.equal, *found))
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_regions_train_as_eager_ones(world):
    """And there is one graph per kind of block, mode and way of scaling at any depth."""
    cfg = fp8_config(fp8__dynamic_steps=2)
    eager = steps(lively_state(cfg, world), cfg, world)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = config_file.replace(cfg, parallel__compile=True)
    state = lively_state(compiled, world)
    assert steps(state, compiled, world) == pytest.approx(eager, rel=1e-2)
    assert state.fp8.history.all()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 4
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
@pytest.mark.parametrize("recipe", ["dynamic", "delayed"])
def test_a_device_trains_as_the_cpu_does(recipe, monkeypatch):
    """Its kernels take every product of the net; bf16 rounds otherwise on the way."""
    cfg = fp8_config(fp8__recipe=recipe)
    found = []
    for is_available in (True, False):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda is_available=is_available: is_available)
        world = ranks.start(cfg.parallel)
        try:
            found.append(steps(lively_state(cfg, world), cfg, world))
        finally:
            ranks.stop()
    assert found[0] == pytest.approx(found[1], rel=2e-2)


def last_losses(cfg: Config, world, count: int = 250) -> float:
    """The mean loss of the last 50 of many steps on drawings, from the initial weights."""
    net = sharding.build(cfg, world, seed=cfg.train.seed)
    state = State.of(net, cfg, world)
    data = TrainSet(cfg, 0, 1, False)
    data.open()
    feed, batch, health, losses = data.feed(0), allocate(cfg.model, cfg.train.global_batch), Health(CPU), []
    for _ in range(count):
        feed.copy_into(batch)
        state.opt.lr.fill_(schedule.lr(state.step, cfg.optim.lr, 20))
        net.fp8.begin(state.step)
        losses.append(float(train_step(state, batch, health, cfg)[0]))
        state.advance(cfg.train.global_batch)
    feed.close()
    return sum(losses[-50:]) / 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_250_steps_reach_the_loss_of_bf16(seed, shapes_dir, world):
    """Finds bugs; the spread between seeds is larger than what FP8 does here, so it certifies no convergence."""
    data = {"data__train": f"{shapes_dir}/train", "data__val": f"{shapes_dir}/val", "model__text_tokens": 9}
    cfg = fp8_config(
        **data,
        model__latent_width=6,
        train__global_batch=16,
        train__seed=seed,
        fp8__history=1024,
        fp8__dynamic_steps=16,
    )
    want = last_losses(config_file.replace(cfg, fp8__recipe="off"), world)
    ways = ({"recipe": "dynamic"}, {}, {"dynamic_steps": 0}, {"algorithm": "most_recent", "history": 4})
    for way in ways:
        found = last_losses(config_file.replace(cfg, **{f"fp8__{key}": value for key, value in way.items()}), world)
        assert found == pytest.approx(want, rel=0.03), way
