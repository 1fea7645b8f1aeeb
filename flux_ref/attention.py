"""Which of torch's kernels computes attention on a GPU. On a CPU torch chooses."""

import torch

from flux_ref.config import Config

KERNELS = ("cudnn", "flash", "efficient", "math")
FAST_CUDNN = 91501  # cuDNN 9.15.1
# Before this version cuDNN's backward accessed illegal memory: github.com/pytorch/pytorch, pull request 171627.
SOUND_CUDA = (12, 9)


def attention_kernel(cfg: Config, device: torch.device) -> str:
    """The kernel that the net's attention uses on a device.

    parallel.attention=auto is cuDNN's kernel on Hopper and datacenter Blackwell from cuDNN 9.15.1 and CUDA 12.9 on,
    where it is the fastest and where torch itself trusts it. Elsewhere, and on AMD, it is flash attention. Neither
    kernel takes fp32; fp32 takes plain products.
    """
    if device.type == "cpu":
        return "chosen by torch"
    if cfg.parallel.attention != "auto":
        return cfg.parallel.attention
    if cfg.parallel.dtype == "fp32":
        return "math"
    major, _ = torch.cuda.get_device_capability(device)
    is_datacenter = torch.version.hip is None and major in (9, 10)  # on sm120 cuDNN was slower: transformers 48163
    is_sound = tuple(map(int, (torch.version.cuda or "0").split("."))) >= SOUND_CUDA
    is_fast = is_datacenter and is_sound and (torch.backends.cudnn.version() or 0) >= FAST_CUDNN
    # torch refuses cuDNN in deterministic mode. From torch 2.15 on it also refuses tokens % 128 == 64, whose gradients
    # may be NaN. Heads smaller than the benchmark's are left to flash attention, which is known to take them.
    tokens = cfg.model.text_tokens + cfg.model.image_tokens
    is_taken = cfg.model.head_dim >= 64 and tokens % 128 != 64 and not torch.are_deterministic_algorithms_enabled()
    return "cudnn" if is_fast and is_taken else "flash"


def allow_attention(cfg: Config, device: torch.device) -> None:
    """Let scaled_dot_product_attention use a config's kernel only, in the whole process from now on.

    So torch cannot take another one unnoticed. On a CPU it may use all kernels.
    """
    kernels = KERNELS if device.type == "cpu" else [attention_kernel(cfg, device)]
    switches = torch.backends.cuda  # for ROCm too
    switches.enable_cudnn_sdp("cudnn" in kernels)
    switches.enable_flash_sdp("flash" in kernels)
    switches.enable_mem_efficient_sdp("efficient" in kernels)
    switches.enable_math_sdp("math" in kernels)
