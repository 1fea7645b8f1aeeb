"""Which kernel computes attention on which device."""

import torch
from conftest import MICRO

from flux_ref import config, config_file, sharding
from flux_ref.attention import KERNELS, allow_attention, attention_kernel

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def device(patch, hip=None, capability=(9, 0), cudnn: int | None = 91600, is_deterministic=False) -> None:
    """Let torch see a device of this kind."""
    patch.setattr(torch.version, "hip", hip)
    patch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    patch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: is_deterministic)


def test_the_kernel_suits_device_dtype_and_sizes(monkeypatch):
    """Each case: the kernel, the device, values of the config."""
    schnell, small = config_file.replace(config.Config(), parallel__dtype="bf16"), config_file.load(MICRO)
    for kernel, kind, cfg in (
        ("cudnn", {}, schnell),
        ("cudnn", {"capability": (10, 0), "cudnn": 91501}, schnell),
        ("flash", {"cudnn": 91500}, schnell),
        ("flash", {"capability": (8, 0)}, schnell),
        ("flash", {"hip": "7.0", "capability": (9, 4), "cudnn": None}, schnell),
        ("math", {}, config_file.replace(schnell, parallel__dtype="fp32")),
        ("cudnn", {}, config_file.replace(schnell, model__text_tokens=512)),
        ("flash", {"is_deterministic": True}, schnell),
        ("flash", {}, config_file.replace(schnell, model__text_tokens=320)),
        ("flash", {}, config_file.replace(small, parallel__dtype="bf16")),
        ("efficient", {}, config_file.replace(schnell, parallel__attention="efficient")),
    ):
        device(monkeypatch, **kind)
        assert attention_kernel(cfg, CUDA) == kernel, (kernel, kind)
        assert attention_kernel(cfg, CPU) == "chosen by torch"


def allowed() -> list[bool]:
    """Whether torch may use each kernel, in the order of KERNELS."""
    cuda = torch.backends.cuda
    states = (cuda.cudnn_sdp_enabled, cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    return [state() for state in states]


def test_a_net_on_the_cpu_may_use_every_kernel_again(world):
    """A net on a GPU in the same process may have allowed a kernel only that the CPU lacks."""
    for number, kernel in enumerate(KERNELS):
        allow_attention(kernel)
        assert allowed() == [i == number for i in range(4)]
    sharding.build(config_file.load(MICRO), world, seed=1)
    assert all(allowed())
