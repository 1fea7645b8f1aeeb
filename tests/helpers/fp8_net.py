"""A small net of FP8 linears, with one part and with several."""

import torch
from torch import Tensor, nn

from flux_ref.config import Config, PrecisionConfig
from flux_ref.precision.formats import Format
from flux_ref.precision.linear import PolicyLinear


def config(preset: str, **keys: object) -> Config:
    """A config with a preset and other keys of precision."""
    return Config(precision=PrecisionConfig(preset=preset, **keys))


def low(linear: nn.Linear, preset: str = "fp8", arch: str = "cpu") -> PolicyLinear:
    """A linear under a preset."""
    return PolicyLinear(linear, "single.0.linear1", config(preset), arch)


def decode(form: Format, codes: Tensor) -> Tensor:
    """What codes mean, fp32."""
    return torch.tensor(form.table())[codes.int()]


class Net(nn.Module):
    """(M, 64) -> (M, 48), always with the same weights. Two linears get the codes of their weights, one casts."""

    def __init__(self, arch: str, preset: str, device: str | torch.device = "cpu"):
        super().__init__()
        torch.manual_seed(0)
        linears = (nn.Linear(64, 96), nn.Linear(96, 160), nn.Linear(96, 48))
        self.one, self.split, self.join = (low(linear.bfloat16().to(device), preset, arch) for linear in linears)
        for linear in (self.one, self.join):
            linear.encode()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, inner = self.split.in_parts([self.one(x).relu()], (32, 32, 32, 64))
        return self.join(torch.maximum(q, k).minimum(v.abs()), inner.relu())  # exact, so compilers give the same bits
