"""A small net of FP8 linears, with one part and with several."""

import torch
from torch import nn

from flux_ref.config import Config, PrecisionConfig
from flux_ref.precision.fp8 import Codes, cast, magnitudes, scales_of
from flux_ref.precision.linear import PolicyLinear
from flux_ref.precision.recipe import PrecisionRecipe


def config(preset, **keys):
    """A config with a preset and other keys of precision."""
    return Config(precision=PrecisionConfig(preset=preset, **keys))


def low(linear, preset="fp8", arch="cpu", **keys):
    """A linear under a preset, with what training gives it."""
    cfg = config(preset, dynamic_steps=0, **keys)
    found = PolicyLinear(linear.bfloat16(), "single_blocks.0.linear1", cfg, arch)
    PrecisionRecipe(cfg).find(found, linear.weight.device)
    return found


def encode(linear):
    """Give a linear the codes of its weight as it is now, as a gather would."""
    weight = linear.weight.detach()
    scales = scales_of(magnitudes(weight), linear.support.forward)
    linear.gathered = Codes(cast(weight, scales[0], linear.support.forward), scales)


class Net(nn.Module):
    """(M, 64) -> (M, 48), always with the same weights. Two linears get the codes of their weights, one casts."""

    def __init__(self, arch, preset, device="cpu"):
        super().__init__()
        torch.manual_seed(0)
        linears = (nn.Linear(64, 96), nn.Linear(96, 160), nn.Linear(96, 48))
        self.one, self.split, self.join = (low(linear.to(device), preset, arch) for linear in linears)
        for linear in (self.one, self.join):
            encode(linear)

    def forward(self, x):
        qkv, inner = self.split.in_parts([self.one(x).relu()], (96, 64))
        q, k, v = qkv.chunk(3, dim=-1)
        return self.join(torch.maximum(q, k).minimum(v.abs()), inner.relu())  # exact, so compilers give the same bits
