import torch

from flux_ref.config import Config

KERNELS = ("cudnn", "flash", "efficient", "math")  # of attention
FAST_CUDNN = 91501  # 9.15.1


def attention_kernel(cfg: Config, device: torch.device) -> str:
    """The one kernel that the net's attention may use on a GPU; on the CPU torch chooses.

    auto: cuDNN's on Hopper and later, the fastest there from 9.15.1 on; else, and on AMD, flash attention. In fp32,
    which neither knows, plain products.
    """
    if device.type == "cpu":
        return "torch's choice"
    if cfg.parallel.attention != "auto":
        return cfg.parallel.attention
    if cfg.parallel.dtype == "fp32":
        return "math"
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    is_fast = is_hopper and (torch.backends.cudnn.version() or 0) >= FAST_CUDNN
    return "cudnn" if is_fast and _suits_cudnn(cfg) else "flash"


def _suits_cudnn(cfg: Config) -> bool:
    """torch refuses it in deterministic mode, and from 2.15 on where rows % 128 == 64, whose gradients may be NaN.

    Smaller heads than the benchmark's are left to flash attention, which is known to take them.
    """
    rows = cfg.model.text_tokens + cfg.model.image_tokens
    return cfg.model.head_dim >= 64 and rows % 128 != 64 and not torch.are_deterministic_algorithms_enabled()


def allow_attention(*kernels: str) -> None:
    """Let scaled_dot_product_attention use these kernels alone, in the whole process from here on."""
    switches = torch.backends.cuda  # for ROCm too
    switches.enable_cudnn_sdp("cudnn" in kernels)
    switches.enable_flash_sdp("flash" in kernels)
    switches.enable_mem_efficient_sdp("efficient" in kernels)
    switches.enable_math_sdp("math" in kernels)


def allow_attention_of(cfg: Config, device: torch.device) -> None:
    """Let a config's own kernel be used alone, so that none takes its place unnoticed; on the CPU all."""
    allow_attention(*(KERNELS if device.type == "cpu" else [attention_kernel(cfg, device)]))
