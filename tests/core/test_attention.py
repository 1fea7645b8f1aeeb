"""Which kernel computes attention on which device."""

import torch

from flux_ref import config, config_file
from flux_ref.sharding import attention_kernel

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
