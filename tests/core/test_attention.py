"""Which kernel computes attention on which device."""

import torch
from conftest import MICRO

from flux_ref import config, config_file, sharding
from flux_ref.sharding import KERNELS, allow_attention, attention_kernel

BASE = {"hip": None, "cuda": "13.0", "capability": (9, 0), "cudnn": 91600, "deterministic": False}


def test_the_kernel_suits_device_dtype_and_sizes(monkeypatch):
    """Each case: the kernel, what torch sees that differs from BASE, values of the config."""
    for kernel, seen, values in (
        ("cudnn", {}, {}),
        ("cudnn", {"capability": (10, 0), "cudnn": 91501}, {}),
        ("flash", {"cudnn": 91500}, {}),
        ("cudnn", {"cuda": "12.9"}, {}),
        ("flash", {"cuda": "12.8"}, {}),
        ("flash", {"capability": (8, 0)}, {}),
        ("flash", {"capability": (12, 0)}, {}),
        ("flash", {"hip": "7.0", "cuda": None, "capability": (9, 4), "cudnn": None}, {}),
        ("math", {}, {"compute__dtype": "fp32"}),
        ("cudnn", {}, {"model__text_tokens": 512}),
        ("flash", {"deterministic": True}, {}),
        ("flash", {}, {"model__text_tokens": 320}),
        ("flash", {}, {"model__heads": 96, "model__rope_axes": (8, 12, 12)}),
        ("efficient", {}, {"compute__attention": "efficient"}),
    ):
        kind = BASE | seen
        monkeypatch.setattr(torch.version, "hip", kind["hip"])
        monkeypatch.setattr(torch.version, "cuda", kind["cuda"])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, kind=kind: kind["capability"])
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda kind=kind: kind["cudnn"])
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda kind=kind: kind["deterministic"])
        cfg = config_file.replace(config.Config(), **({"compute__dtype": "bf16"} | values))
        assert attention_kernel(cfg, torch.device("cuda", 0)) == kernel, (seen, values)
        assert attention_kernel(cfg, torch.device("cpu")) == "chosen by torch"


def allowed():
    """Whether torch may use each kernel, in the order of KERNELS."""
    cuda = torch.backends.cuda
    states = (cuda.cudnn_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    return [state() for state in states]


def test_a_net_on_the_cpu_may_use_every_kernel_again(world):
    """A net on a GPU in the same process may have allowed a kernel only that the CPU lacks."""
    for number, kernel in enumerate(KERNELS):
        cfg = config_file.replace(config.Config(), compute__attention=kernel)
        allow_attention(cfg, torch.device("cuda", 0))
        assert allowed() == [i == number for i in range(4)]
    sharding.build(config_file.load(MICRO), world, seed=1)
    assert all(allowed())
