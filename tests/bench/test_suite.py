"""Benchmarks of products, kernel classes, the whole model and the race. Times are not judged."""

from dataclasses import replace

import pytest
import torch
from bench_report import report_of
from conftest import MICRO, refusal

from bench import ceiling, common, kernels, race, sweep, sweep_table, whole
from bench.kernels import Span
from bench.static.predicted import Counts
from flux_ref import config_file, flow, sharding
from flux_ref.config import ModelConfig
from flux_ref.data import synthetic
from flux_ref.errors import Fault, Refusal
from flux_ref.model import Flux, parameter_table
from tools.shared import flops

MODEL = ModelConfig()
SMALL = config_file.load(MICRO)


# Products


def test_products_are_all_of_a_block_that_sees_tokens():
    """Against the weights themselves: 2 operations per weight and token, three times."""
    for model in (MODEL, SMALL.model):
        tokens = {"img": model.image_tokens, "txt": model.text_tokens}
        flop = 0
        for name, shape in parameter_table(model).items():
            if "_blocks" in name and len(shape) == 2 and "mod" not in name:
                flop += 2 * shape[0] * shape[1] * tokens.get(name.split(".")[2][:3], sum(tokens.values()))
        total = sum(product.tflop * product.per_step for product in ceiling.products(model, micro_batch=4))
        assert total == pytest.approx(3 * 4 * flop / 1e12) and total < 4 * flops.per_sample(model) / 1e12


def test_timed_products_have_their_sizes_and_layouts(monkeypatch):
    cpu, kinds, operands = torch.device("cpu"), (torch.float8_e4m3fn, torch.float8_e5m2), []
    monkeypatch.setattr(ceiling, "random", lambda rows, columns, _, dtype: torch.zeros(rows, columns).to(dtype))
    for name in ("mm", "_scaled_mm"):
        monkeypatch.setattr(torch, name, lambda a, b, **options: operands.append((a, b, options)) or options["out"])
    for kind in ("forward", "grad_input", "grad_weight"):
        product = ceiling.Product("layer", kind, m=32, n=48, k=16)
        operands.clear()
        for call in (ceiling.plain(product, cpu, torch.bfloat16), ceiling.fp8(product, cpu, kinds)):
            assert call().shape == (32, 48) and call().data_ptr() == call().data_ptr(), "nothing is allocated"
        assert {(left.shape, right.shape) for left, right, _ in operands} == {((32, 16), (16, 48))}
        (left, right, _), (left8, right8, options) = operands[0], operands[-1]
        assert left.is_contiguous() == (kind != "grad_weight") and right.is_contiguous() == (kind != "forward"), kind
        assert left8.is_contiguous() and right8.t().is_contiguous(), "Hopper takes TN only"
        assert right8.dtype == kinds[0] and left8.dtype == kinds[kind != "forward"]
        assert options["use_fast_accum"] == (kind == "forward") and options["scale_a"].ndim == 0


def test_mean_weighs_products_by_their_use(tmp_path, monkeypatch, capsys):
    """A device that has FP8 products and takes 1 ms for every product; then one that has none, which is told."""
    report = report_of(ceiling, tmp_path, "--micro-batches", "1,2")
    assert [found["micro_batch"] for found in report["ceilings"]] == [1, 2]
    assert all(row["ms"] > 0 for row in report["ceilings"][0]["plain"]["products"])
    assert report["ceilings"][0]["fp8"] == "a CPU decodes FP8 and multiplies in fp32"
    assert report["command"].startswith("python -m bench.ceiling")
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("fp32", "fp8", "linear2", "grad_weight", "square_tflop_per_s"))
    monkeypatch.setattr(ceiling, "has_kernel", lambda device: True)
    monkeypatch.setattr(ceiling, "architecture", lambda device: "sm90")
    monkeypatch.setattr(ceiling, "time_ms", lambda call, clock: 1.0)
    clock = common.Clock(torch.device("cpu"))
    assert "a multiple of 16" in ceiling.ceiling(SMALL, 1, clock)["fp8"]
    monkeypatch.setattr(ceiling, "MULTIPLE", 1)  # the micro model is smaller
    found = ceiling.ceiling(SMALL, 2, clock)
    calls = 3 * (8 * SMALL.model.double_blocks + 2 * SMALL.model.single_blocks)
    for kind in ("plain", "fp8"):
        assert found[kind]["ms"] == calls
        assert found[kind]["tflop_per_s"] == pytest.approx(found["tflop"] / calls * 1e3)
    assert 0.5 < found["share_of_step"] < 1


# Kernel classes

ADAM = "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor"
KERNELS = {
    "gemm": (
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>",
        "Cijk_Alik_Bljk_BBS_BH_MT256x256x64_MI16x16x16x1",
        "triton_tem_fused_addmm_3",
        "aten::addmm",
        "aten::_scaled_mm",
    ),
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x128_4x1x1",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>",
        "bwd_kernel_dk_dv",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "elementwise": (
        "triton_poi_fused__scaled_dot_product_cudnn_attention_cat_mul_7",
        "triton_red_fused_native_layer_norm_mm_2",
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>",
        "aten::native_layer_norm",
        "graph_0_cpp_fused_add_mul_4",
    ),
    "copy": (
        "Memcpy HtoD (Pinned -> Device)",
        "void at::native::CatArrayBatchedCopy_contig<at::native::OpaqueType<2u>, unsigned int, 3, 128, 1>",
        "void split_with_sizes_copy_out_contiguous_no_cast_kernel",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
        "aten::copy_",
    ),
    "communication": (
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL",
        "c10d::allreduce_",
        "FSDP::post_backward_reduce (double_blocks.1)",
    ),
    "optimizer": (ADAM, "multi_tensor_apply_kernel<LpNormFunctor<float>>", "aten::_fused_adamw_"),
    "other": ("some_vendor_thing",),
}


def test_kernels_are_classified_by_name():
    found = {(kind, name): kernels.classify(name) for kind, names in KERNELS.items() for name in names}
    assert {pair: kind for pair, kind in found.items() if pair[0] != kind} == {} and KERNELS.keys() <= set(
        kernels.NAMES
    )


def test_idle_time_is_what_no_stream_fills():
    """Two streams over 100 us: busy 0 to 40 and 60 to 100; communication is alone from 35 to 40 and from 90 on."""
    spans = [
        Span("nvjet_a", 1000.0, 30.0),
        Span("ncclDevKernel_AllGather", 1010.0, 30.0),
        Span("triton_poi_fused_add", 1030.0, 5.0),
        Span("nvjet_a", 1060.0, 30.0),
        Span("ncclDevKernel_ReduceScatter", 1065.0, 35.0),
    ]
    for given in (spans, spans[::-1]):
        found = kernels.analyse(given, steps=2)
        assert found["step_ms"] == pytest.approx(0.05)
        assert found["idle"]["ms"] == pytest.approx(0.01) and found["idle"]["share"] == pytest.approx(0.2)
        assert found["idle"]["gaps"] == 0.5 and found["idle"]["longest_gap_us"] == pytest.approx(20)
        assert found["classes"]["gemm"] == pytest.approx({"ms": 0.03, "share": 0.6})
        assert found["classes"]["communication"]["share"] == pytest.approx(0.65)
        assert found["communication_exposed_ms"] == pytest.approx(0.0075)
        assert found["top"][0] == pytest.approx({"name": "nvjet_a", "class": "gemm", "ms": 0.03, "calls": 1.0})
    with pytest.raises(Refusal, match="the timeline is empty"):
        kernels.analyse([])


def test_a_trace_gives_the_devices_timeline_if_it_has_one():
    def event(cat, name, ts, tid=1):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": 4.0, "pid": 1, "tid": tid}

    host = [event("cpu_op", "aten::mm", 1.0), event("cpu_op", "aten::add", 2.0, tid=2), {"ph": "M", "name": "x"}]
    host.append(event("cpu_op", "aten::linear", 0.0) | {"dur": 6.0})  # calls aten::mm
    device = [event("kernel", "nvjet", 9.0), event("gpu_memcpy", "Memcpy", 14.0), event("gpu_user_annotation", "a", 0)]
    found = kernels.timeline({"traceEvents": host})
    assert [(span.name, span.inside) for span in found] == [("aten::linear", 4.0), ("aten::mm", 0), ("aten::add", 0)]
    assert [span.name for span in kernels.timeline({"traceEvents": host + device})] == ["nvjet", "Memcpy"]


# The whole model


def test_the_whole_models_report_is_whole_and_plausible(tmp_path):
    text = "--micro-batches 1,2 --evaluate 3 --steps 1 --ranks 5 --parallel.region_blocks=2"
    report = report_of(whole, tmp_path, *text.split())
    assert report["optimizer"]["parameters"] == sum(
        -(-shape[0] // 5) * torch.Size(shape[1:]).numel() for shape in parameter_table(SMALL.model).values()
    )
    for rows, run in zip((1, 2), report["runs"]):
        assert run["micro_batch"] == rows
        assert run["ms"] == pytest.approx(run["forward"] + run["backward"] + report["optimizer"]["ms"])
        assert run["samples_per_s"] == pytest.approx(rows * 1e3 / run["ms"])
        tflop = run["tflop"]
        assert tflop["per_s_per_rank"] == pytest.approx(flops.per_sample(SMALL.model) / 1e12 * run["samples_per_s"])
        assert 0 < tflop["share_of_ceiling"] < 1
    rows = sweep_table.whole_rows("whole", report, Counts({"runs": [], "rates": {}}))
    assert [name for name, *_ in rows] == ["whole, batch 1", "whole, batch 2", "whole, validation 3"]
    assert report["evaluation"][0]["whole_set_s"] == pytest.approx(29_696 / report["evaluation"][0]["samples_per_s"])
    assert "communication" in report["left_out"]
    with pytest.raises(Refusal, match="captures no graphs"):
        report_of(whole, tmp_path, "--graph.enabled=on")


def test_the_whole_model_is_trainings(monkeypatch):
    """Regions, dtype and loss: with the weights of a plain net the loss is that net's."""
    cfg = config_file.replace(SMALL, parallel__region_blocks=2, parallel__dtype="bf16")
    net, plain = whole.build(cfg, torch.device("cpu")), Flux(cfg.model).to(torch.bfloat16)
    plain.rope = plain.make_rope()
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16} and net.rope.dtype == torch.float32
    assert len(net.double_blocks) == 1 and len(net.single_blocks) == 2
    for parameter, (name, source) in zip(plain.parameters(), sharding.named_parameters(net).items()):
        assert parameter.shape == source.shape, name
        parameter.data = source.data
    batch = synthetic(cfg.model, 2)
    assert torch.equal(*(flow.losses(one, batch, torch.bfloat16) for one in (net, plain)))


def test_a_micro_batch_that_does_not_fit_is_reported(tmp_path, monkeypatch, capsys):
    real = whole.training

    def training(net, cfg, rows, *others):
        if rows == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.\nmore")
        return real(net, cfg, rows, *others)

    monkeypatch.setattr(whole, "training", training)
    report = report_of(whole, tmp_path, "--micro-batches", "2,1", "--steps", "1")
    assert report["runs"][0] == {"micro_batch": 2, "failed": "CUDA out of memory."} and report["runs"][1]["ms"] > 0
    assert "'failed': 'CUDA out of memory.'" in capsys.readouterr().out


def test_options_that_mean_nothing_are_refused():
    """One line that names the option."""
    for module, option in (
        *((whole, option) for option in ("--micro-batches=0", "--micro-batches=x", "--steps=0", "--ranks=0")),
        *((sweep, option) for option in ("--minutes=0", "--only=nothing", "--json", "--model.heads=1")),
    ):
        assert option.partition("=")[0] in refusal(module.parse, [option])


# The race


def test_a_race_gives_ratios_of_neighbouring_steps_of_the_same_model(tmp_path, monkeypatch):
    """A peer that takes twice our time in every step."""
    monkeypatch.setattr(race, "timed_step", lambda side, *_: 3.0 if isinstance(side.net, race.OurFlux) else 6.0)
    report = report_of(race, tmp_path, "--steps", "3", "--warmup", "0", "--train.global_batch=2")
    assert (report["ratio"], report["ratio_quartiles"], report["ms"]) == (2, [2, 2], {"ours": 3, "diffusers": 6})
    (row,) = sweep_table.rows(
        {"name": "peer", "module": "bench.race", "report": report}, Counts({"runs": [], "rates": {}})
    )
    assert "time by ours 2.000" in row[-1]


def test_both_sides_of_a_race_take_steps(tmp_path):
    report = report_of(race, tmp_path, "--steps", "1", "--warmup", "0", "--train.global_batch=2")
    assert report["batch"] == 2 and min(report["ms"].values()) > 0


def test_another_model_or_a_missing_package_is_no_race(tmp_path, monkeypatch):
    monkeypatch.setattr(race.importlib, "import_module", lambda name: __import__("no_such_package"))
    with pytest.raises(Refusal, match="the race needs no_such_package; pip install diffusers"):
        report_of(race, tmp_path, "--train.global_batch=2")
    monkeypatch.setattr(race, "DiffusersFlux", lambda model: race.OurFlux(replace(model, double_blocks=3)))
    with pytest.raises(Fault, match="not the same model"):
        report_of(race, tmp_path, "--train.global_batch=2")
