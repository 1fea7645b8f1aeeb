"""Regions: recomputing changes no number and keeps less; what a version of torch lacks is refused."""

import pytest
import torch
from conftest import MICRO

from flux_ref import config, config_file, ranks, sharding
from flux_ref.data import synthetic
from flux_ref.errors import Refusal
from flux_ref.speed import attention, regions
from flux_ref.step import Health, State, train_step

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def world():
    yield ranks.start(config.ParallelConfig())
    ranks.stop()


def steps(world, **overrides) -> list[float]:
    """Losses of three steps."""
    cfg = config_file.replace(config_file.load(MICRO), **overrides)
    net = sharding.build(cfg, world, seed=3)
    state = State.of(net, cfg, world)
    state.opt.lr.fill_(1e-2)
    batch, health = synthetic(cfg.model, cfg.train.global_batch), Health(world.device)
    return [float(train_step(state, batch, health, cfg)[0]) for _ in range(3)]


@pytest.mark.parametrize("region_blocks", [1, 2])
@pytest.mark.parametrize("recompute", ["block", "region"])
def test_recomputing_changes_no_bit(world, recompute, region_blocks):
    whole = steps(world)
    again = steps(world, parallel__recompute=recompute, parallel__region_blocks=region_blocks)
    assert again == whole and whole[0] != whole[-1]


def test_recomputing_calls_every_block_once_more(world):
    calls = []

    def called(**overrides) -> int:
        calls.clear()
        cfg = config_file.replace(config_file.load(MICRO), **overrides)
        net = sharding.build(cfg, world, seed=3)
        for region in (*net.double_blocks, *net.single_blocks):
            for block in region.blocks:
                block.forward = (lambda forward: lambda *a: calls.append(0) or forward(*a))(block.forward)
        state = State.of(net, cfg, world)
        train_step(state, synthetic(cfg.model, cfg.train.global_batch), Health(world.device), cfg)
        return len(calls)

    plain = called()
    assert called(parallel__recompute="block") == called(parallel__recompute="region") == 2 * plain


def test_what_this_torch_lacks_is_refused(world, monkeypatch):
    values = {"parallel__separate_reduce_scatter": True}
    cfg = config_file.replace(config_file.load(MICRO), **values)
    if hasattr(torch.distributed.fsdp.FSDPModule, "set_separate_reduce_scatter_group"):
        assert steps(world, **values) == steps(world)
        monkeypatch.delattr(torch.distributed.fsdp.FSDPModule, "set_separate_reduce_scatter_group")
    with pytest.raises(Refusal, match=r"parallel\.separate_reduce_scatter=true needs torch 2.13, this is .*; set"):
        sharding.build(cfg, world, seed=0)


def test_prefetching_changes_no_bit(world):
    assert steps(world, parallel__forward_prefetch=2) == steps(world)


@pytest.mark.parametrize(
    "overrides, words",
    [
        ({"parallel__recompute": "block", "parallel__compile": True}, "parallel.recompute=block .*activation_budget"),
        ({"parallel__activation_budget": 0.5}, "parallel.activation_budget=0.5 needs parallel.compile=true"),
        ({"parallel__activation_budget": 1.5, "parallel__compile": True}, "activation_budget=1.5 is a share"),
    ],
)
def test_ways_to_save_memory_that_exclude_each_other_are_refused(overrides, words):
    with pytest.raises(Refusal, match=words):
        config_file.replace(config_file.load(MICRO), **overrides)


def test_pictures_are_drawn_without_the_compiler():
    with regions.uncompiled(config.ParallelConfig(compile=True)):
        assert not torch.compile(lambda x: torch.compiler.is_compiling())(torch.ones(1))


# Attention


@pytest.mark.parametrize(
    "hip, capability, cudnn, dtype, want",
    [
        (None, (9, 0), 91600, "bf16", "cudnn"),
        (None, (10, 0), 91501, "bf16", "cudnn"),
        (None, (9, 0), 91500, "bf16", "flash"),
        (None, (8, 0), 91600, "bf16", "flash"),
        ("7.0", (9, 4), None, "bf16", "flash"),
        (None, (9, 0), 91600, "fp32", "math"),
    ],
)
def test_the_kernel_of_attention_suits_device_and_dtype(monkeypatch, hip, capability, cudnn, dtype, want):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    cfg = config_file.replace(config.Config(), parallel__dtype=dtype)
    assert attention.attention_kernel(cfg, CUDA) == want
    assert attention.attention_kernel(cfg, CPU) == "torch's choice"
    own = config_file.replace(cfg, parallel__attention="efficient")
    assert attention.attention_kernel(own, CUDA) == "efficient"


@pytest.mark.parametrize(
    "base, tokens, is_deterministic, want",
    [
        (config.Config(), 512, False, "cudnn"),
        (config.Config(), 512, True, "flash"),
        (config.Config(), 320, False, "flash"),
        (config_file.load(MICRO), 6, False, "flash"),
    ],
    ids=["schnell", "deterministic", "rows", "small heads"],
)
def test_cudnn_is_kept_from_what_it_or_torch_refuses(monkeypatch, base, tokens, is_deterministic, want):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91600)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)
    cfg = config_file.replace(base, parallel__dtype="bf16", model__text_tokens=tokens)
    assert attention.attention_kernel(cfg, CUDA) == want


def test_a_net_on_the_cpu_may_use_every_kernel_again():
    """One on a GPU in the same process may have left only its own, which the CPU lacks."""
    cfg = config_file.load(MICRO)
    attention.allow_attention("cudnn")
    world = ranks.start(cfg.parallel)
    try:
        sharding.build(cfg, world, seed=1)
        switches = torch.backends.cuda
        assert switches.cudnn_sdp_enabled() and switches.flash_sdp_enabled() and switches.math_sdp_enabled()
    finally:
        ranks.stop()
        attention.allow_attention(*attention.KERNELS)


def test_one_kernel_is_allowed_and_no_other_in_its_place():
    switches = torch.backends.cuda
    states = (
        switches.cudnn_sdp_enabled,
        switches.flash_sdp_enabled,
        switches.mem_efficient_sdp_enabled,
        switches.math_sdp_enabled,
    )
    try:
        for number, kernel in enumerate(attention.KERNELS):
            attention.allow_attention(kernel)
            assert [state() for state in states] == [i == number for i in range(4)]
    finally:
        attention.allow_attention(*attention.KERNELS)
    assert all(state() for state in states)


@pytest.mark.parametrize("kernel", ["cudnn", "flash"])
def test_a_kernel_without_fp32_is_refused_for_it(kernel):
    with pytest.raises(Refusal, match=f"parallel.attention={kernel} knows no fp32; set parallel.dtype=bf16 or"):
        config_file.replace(config_file.load(MICRO), parallel__attention=kernel)
