"""Benchmarks: reports are whole and plausible, products are the net's, a race is fair. Times are not judged."""

import json
from dataclasses import replace

import pytest
import torch
from bench_report import report_of
from conftest import MICRO, data_overrides

from bench import ceiling, common, race, step
from flux_ref import config_file
from flux_ref.cli import Fault
from tools import flops_and_bytes

SMALL = config_file.load(MICRO)


def test_report_of_a_step_is_whole_and_plausible(tmp_path, shapes_dir):
    trace = tmp_path / "trace.json"
    report = report_of(step, tmp_path, "--steps=2", "--warmup=1", f"--profile={trace}", *data_overrides(shapes_dir))
    assert report["command"].startswith("python -m bench.step --config")
    assert {"commit", "torch", "device", "ranks", "load_average", "steps_run"} <= report.keys()
    assert report["config"]["train.global_batch"] == 12
    ms = report["step_ms"]
    assert 0 < ms["min"] <= ms["median"] <= ms["max"]
    assert 12e3 / ms["max"] * 0.999 <= report["samples_per_s"] <= 12e3 / ms["min"] * 1.001
    assert report["split_ms"]["backward"] > 0 and 0 < report["data_share"] < 1
    tflop = report["tflop"]
    assert tflop["per_sample"] == pytest.approx(flops_and_bytes.per_sample(SMALL.model) / 1e12)
    assert 0 < tflop["share_of_ceiling"] < 1 and 0 < report["last_loss"] < 10
    assert len(report["kernels"]) == step.TOP and any("aten::" in kernel["name"] for kernel in report["kernels"])
    top, all_parts = sum(kernel["ms"] for kernel in report["kernels"]), sum(report["parts_ms"].values())
    assert ms["min"] / 100 < top <= all_parts < 10 * ms["max"]
    assert json.loads(trace.read_text())["traceEvents"]


def test_kernels_are_told_apart_by_their_names():
    """Names that torch's profiler gives on NVIDIA, on AMD, of Triton's kernels and of a CPU's operations."""
    names = {
        "products": (
            "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_bias_TNN sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n cutlass::Kernel2"
            " Cijk_Ailk_Bljk_BBS_BH_MT256x256x64 flash_fwd_kernel cudnn_generated_fort_native_sdpa_sm90_flash_bprop"
            " attn_fwd bwd_kernel_dk_dv ck_tile::FmhaBwdDQDKDVKernel aten::addmm triton_tem_fused_mm_0"
            " aten::_scaled_dot_product_flash_attention_for_cpu_backward flux_ref::scaled_mm"
        ),
        "elementwise": (
            "triton_poi_fused__to_copy_mul_0 triton_red_fused_addmm_native_layer_norm_3 aten::mul"
            " vectorized_elementwise_kernel<4,gelu>"
        ),
        "links": "ncclDevKernel_AllGather_RING_LL c10d::_allgather_base_ ncclDevKernel_Generic_1",
        "copies": (
            "split_with_sizes_copy_out_contiguous_no_cast_kernel chunk_cat_cuda_kernel aten::copy_ FSDP::copy_in"
            " multi_tensor_apply_kernel<CopyFunctor> Memcpy&DtoD"
        ),
        "optimizer": "multi_tensor_apply_kernel<FusedAdamMathFunctor> aten::_fused_adamw_ aten::_foreach_norm",
    }
    assert {part: [name for name in found.split() if step.part_of(name) != part] for part, found in names.items()} == {
        part: [] for part in names
    }


@pytest.mark.slow
def test_one_process_as_a_rank_of_eight_sends_what_is_planned(tmp_path):
    for own in (
        ["--parallel.kept_regions=0"],
        ["--parallel.kept_regions=-1", "--train.micro_batch=1"],
        ["--parallel.region_blocks=2", "--parallel.replicate=2", "--parallel.reduce_dtype=bf16"],
    ):
        own += ["--fake-ranks=8", "--steps=1", "--warmup=0", "--train.global_batch=16", "--model.single_blocks=3"]
        report = report_of(step, tmp_path, *own)
        assert report["ranks"] == 8 and report["synthetic"] and 0 < report["last_loss"] < 10
        assert report["sent_gb"] == pytest.approx(report["planned_sent_gb"]), own


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


def test_the_rate_of_products_weighs_them_by_their_use(tmp_path, monkeypatch):
    """On a device that takes 1 ms for every product; a CPU has no FP8 products and says so."""
    (one,) = report_of(ceiling, tmp_path, "--micro-batches", "1")["ceilings"]
    assert one["micro_batch"] == 1 and all(row["ms"] > 0 for row in one["plain"]["products"])
    assert one["fp8"] == "a CPU decodes FP8 and multiplies in fp32"
    monkeypatch.setattr(ceiling, "has_kernel", lambda device: True)
    monkeypatch.setattr(ceiling, "architecture", lambda device: "sm90")
    monkeypatch.setattr(ceiling, "time_ms", lambda call, clock: 1.0)
    clock = common.Clock(torch.device("cpu"))
    assert "a multiple of 16" in ceiling.ceiling(SMALL, 1, clock)["fp8"]
    monkeypatch.setattr(ceiling, "MULTIPLE", 1)  # the micro model is smaller
    found = ceiling.ceiling(SMALL, 2, clock)
    calls = 3 * (8 * SMALL.model.double_blocks + 2 * SMALL.model.single_blocks)
    model = SMALL.model
    per_token = 2 * 12 * model.hidden**2 * (model.double_blocks + model.single_blocks)
    flop = 3 * per_token * (model.text_tokens + model.image_tokens)
    assert found["tflop"] == pytest.approx(2 * flop / 1e12), "all products of blocks that see tokens"
    for kind in ("plain", "fp8"):
        assert found[kind]["ms"] == calls
        assert found[kind]["tflop_per_s"] == pytest.approx(found["tflop"] / calls * 1e3)
    assert 0.5 < found["share_of_step"] < 1


def test_a_race_gives_ratios_of_neighbouring_steps_of_the_same_model(tmp_path, monkeypatch):
    """First both sides' own steps, then a peer that takes twice our time in every step."""
    short = ("--warmup=0", "--train.global_batch=2", "--steps=1")
    report = report_of(race, tmp_path, *short)
    assert report["batch"] == 2 and min(report["ms"].values()) > 0
    monkeypatch.setattr(race, "timed_step", lambda net, *_: 3.0 if isinstance(net, race.OurFlux) else 6.0)
    report = report_of(race, tmp_path, *short, "--steps=3")
    assert (report["ratio"], report["ratio_quartiles"], report["ms"]) == (2, [2, 2], {"ours": 3, "diffusers": 6})
    monkeypatch.setattr(race, "DiffusersFlux", lambda model: race.OurFlux(replace(model, double_blocks=3)))
    with pytest.raises(Fault, match="not the same model"):
        report_of(race, tmp_path, *short)
