"""A small net of FP8 linears, with one part and with several."""

import torch
from torch import Tensor, nn

from flux_ref.config import Fp8Config
from flux_ref.model import JoinLinear, SplitLinear
from flux_ref.speed import fp8_product
from flux_ref.speed.fp8 import Fp8Linear


class Net(nn.Module):
    """(M, 64) -> (M, 48), always with the same weights. Two linears get the codes of their weights, one casts."""

    def __init__(self, arch: str, recipe: str, device: str | torch.device = "cpu"):
        super().__init__()
        torch.manual_seed(0)
        linears = (nn.Linear(64, 96), SplitLinear(96, (32, 32, 32, 64)), JoinLinear(96, 48))
        arith, cfg = fp8_product.arithmetic(arch), Fp8Config(recipe=recipe)
        self.one, self.split, self.join = (Fp8Linear(linear.bfloat16().to(device), cfg, arith) for linear in linears)
        for linear in (self.one, self.join):
            linear.encode()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, inner = self.split(self.one(x).relu())
        return self.join(torch.maximum(q, k).minimum(v.abs()), inner.relu())  # exact, so compilers give the same bits
