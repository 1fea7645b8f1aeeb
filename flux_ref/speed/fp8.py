"""FP8 in the linears of the blocks: which linears, and how their tensors are scaled. fp8_product.py multiplies.

Modulation, embedders, head and attention stay in parallel.dtype.

    dynamic   a tensor's scale comes from its own largest magnitude; nothing is remembered
    delayed   the scale comes from the largest magnitudes of earlier steps, so a cast need not wait for a reduction

Weights are scaled dynamically under both recipes. Every rank holds the same gathered weight, so the scale is exact and
needs neither state nor communication.
Without gradients (validation, pictures) all scales are dynamic. The loss then depends on weights and data alone, and
the history does not change.

Another precision, such as MXFP8, changes this file and fp8_product.py, the recipes and widths in config_rules.py, its
name in benchmark/mllog.py, and its cost in plan/.

Source: delayed scaling as NVIDIA's Transformer Engine documents it.
"""

import itertools
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flux_ref.config import FP8_LINEAR, Config, Fp8Config, ModelConfig
from flux_ref.model import SplitLinear
from flux_ref.speed.fp8_product import (
    Arithmetic,
    Fp8Matmul,
    arithmetic,
    cast,
    magnitudes,
    scale_of_magnitude,
    scales_of,
)

SLICES = 16  # of an input's rows; divides their number, as config_rules.py demands for training


class Fp8Linear(nn.Linear):
    """A linear whose parameters keep their names, shapes and dtype, and whose products are FP8.

    is_delayed: whether training takes the delayed scales; set by `Fp8State.begin`.
    input_* and grad_*: fp32, of the input and of the output's gradient; None under the dynamic recipe. They are the
    largest magnitudes over the micro-batches of a step (amax), the delayed scale and its inverse, 1 / scale.
    input_amax: (16,), of 16 slices of the rows of all parts; one long reduction would need two kernels.
    grad_amax: (N,), of the columns.
    codes, weight_scale, weight_inverse: the gathered weight in FP8, (N, K), its scale and 1 / scale; None where the
    weight itself is gathered.
    """

    def __init__(self, linear: nn.Linear, cfg: Fp8Config, arith: Arithmetic):
        """Takes over the parameters of a linear."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.arith, self.max_exponent = arith, cfg.max_scale_exponent
        self.is_delayed, self.in_validation = False, cfg.eval
        self.widths = linear.widths if isinstance(linear, SplitLinear) else None
        self.codes = self.weight_scale = self.weight_inverse = None
        for side, length in (("input", SLICES), ("grad", linear.out_features)):
            for name, shape in (("amax", length), ("scale", ()), ("inverse", ())):
                # One tensor each: views of one tensor would share a version counter, which compiled backwards refuse.
                buffer = torch.zeros(shape, device=linear.weight.device) if cfg.recipe == "delayed" else None
                self.register_buffer(f"{side}_{name}", buffer, persistent=False)

    @torch.no_grad()
    def encode(self) -> None:
        """Make the codes of the weight as it is now, as a gather would. For nets that are not sharded."""
        self.weight_scale, self.weight_inverse = scales_of(
            magnitudes(self.weight), self.arith.forward, self.max_exponent
        )
        self.codes = cast(self.weight, self.weight_scale, self.arith.forward)

    def forward(self, *parts: Tensor) -> Tensor | tuple[Tensor, ...]:
        """(..., K) bf16 -> (..., N) bf16, from parts and in parts as the linear that was taken over."""
        widths = self.widths or (self.out_features,)
        if torch.is_grad_enabled() or self.in_validation:
            results = self._multiplied(parts, widths)
        else:
            joined = torch.cat(parts, dim=-1) if len(parts) > 1 else parts[0]
            results = F.linear(joined, self.weight, self.bias).split(widths, dim=-1)
        return results if self.widths else results[0]

    def _multiplied(self, parts: tuple[Tensor, ...], widths: tuple[int, ...]) -> list[Tensor]:
        weight = (self.weight, self.bias, self.codes, self.weight_inverse, self.arith, self.max_exponent)
        # Equal neighbours are one part for the product: queries, keys and values. Kernels for each would be small.
        groups = [list(group) for _, group in itertools.groupby(widths)]
        sums, flat = [sum(group) for group in groups], [part.flatten(0, -2) for part in parts]
        results = Fp8Matmul.apply(*weight, sums, *self._scaling(), *flat)
        results = [result.unflatten(0, parts[0].shape[:-1]) for result in results]
        return [piece for result, group in zip(results, groups) for piece in result.chunk(len(group), dim=-1)]

    def _scaling(self) -> tuple[Tensor | None, ...]:
        """Where training notes magnitudes, and what it remembers; of the input, then of the gradient."""
        if not torch.is_grad_enabled():
            return (None,) * 6
        inputs = (self.input_scale, self.input_inverse) if self.is_delayed else (None, None)
        grads = (self.grad_scale, self.grad_inverse) if self.is_delayed else (None, None)
        return self.input_amax, *inputs, self.grad_amax, *grads


def count(cfg: ModelConfig) -> int:
    """How many linears compute in FP8: 228 in FLUX.1-schnell."""
    return 8 * cfg.double_blocks + 2 * cfg.single_blocks


def convert(net: nn.Module, cfg: Config, arch: str) -> None:
    """Make the linears of a net's blocks compute as fp8.recipe says on an architecture, before the net is sharded.

    Raises: Refusal if the architecture has no FP8.
    """
    if cfg.fp8.recipe == "off":
        return
    arith = arithmetic(arch)
    linears = {name: module for name, module in net.named_modules() if FP8_LINEAR.fullmatch(name)}
    assert len(linears) == count(cfg.model), f"{len(linears)} linears, want {count(cfg.model)}"
    for name, linear in linears.items():
        net.set_submodule(name, Fp8Linear(linear, cfg.fp8, arith))


class Fp8State:
    """What delayed scaling remembers of a converted net, the same on all ranks. Other recipes remember nothing.

    history: (2 * linears, fp8.history) fp32, the largest magnitudes of past steps, newest first, 0 where there is none.
    Its rows are in the order of the model; each linear has one row for its input, then one for the output's gradient.
    A checkpoint needs nothing else: scales follow from the history.
    """

    def __init__(self, net: nn.Module, cfg: Fp8Config, device: torch.device):
        self.cfg = cfg
        self.linears = [module for module in net.modules() if isinstance(module, Fp8Linear)]
        delayed = self.linears if cfg.recipe == "delayed" else []
        self.amaxes = [amax for linear in delayed for amax in (linear.input_amax, linear.grad_amax)]
        self.scales = [scale for linear in delayed for scale in (linear.input_scale, linear.grad_scale)]
        self.inverses = [inverse for linear in delayed for inverse in (linear.input_inverse, linear.grad_inverse)]
        largest = [torch.finfo(dtype).max for linear in delayed for dtype in linear.arith[:2]]
        self.largest = torch.tensor(largest, device=device) / 2**cfg.margin
        self.history = torch.zeros(len(largest), cfg.history, device=device)
        self.reset()

    @property
    def phases(self) -> tuple[int, ...]:
        """The first step of each way of scaling. Each way compiles and captures graphs of its own."""
        return (0, self.cfg.dynamic_steps) if self.amaxes and self.cfg.dynamic_steps else (0,)

    def phase(self, step: int) -> int:
        """The phase that a training step belongs to."""
        return max(first for first in self.phases if first <= step)

    def begin(self, step: int) -> None:
        """Choose the way of scaling for the next training step. step: its number, from 0. Works on the host only.

        The first steps of delayed scaling take dynamic scales and fill the history. Their gradients grow by orders of
        magnitude from one step to the next, while every gate is nearly zero.
        """
        for linear in self.linears:
            linear.is_delayed = bool(self.amaxes) and step >= self.cfg.dynamic_steps

    def update(self) -> Tensor | None:
        """Add a step's magnitudes to the history and set the next step's scales; after the step's last backward.

        Returns norm_factor: 1.0, or NaN if any rank saw a non-finite magnitude; None if nothing is remembered.
        NaN is needed because a cast with a remembered scale clamps infinity, which hides it from the loss.

        Collective. Works on the device alone and in place, so a captured graph may hold it. A tensor keeps its history
        and scale if its magnitude was 0 on all ranks, or not finite on any rank.
        """
        if not self.amaxes:
            return None
        amax = torch.stack(torch._foreach_norm(self.amaxes, math.inf))
        amax = amax.nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum over ranks may overlook NaN
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        usable = ((amax > 0) & amax.isfinite())[:, None]
        rolled = torch.cat((amax[:, None], self.history[:, :-1]), dim=1)
        self.history.copy_(torch.where(usable, rolled, self.history))
        torch._foreach_zero_(self.amaxes)
        self.set_scales()
        return torch.where(amax.isfinite().all(), 1.0, torch.nan)

    def set_scales(self) -> None:
        """Set the delayed scales from the history; 1 for a tensor without history."""
        if not self.amaxes:
            return
        amax = self.history.amax(1) if self.cfg.algorithm == "max" else self.history[:, 0]
        scale = scale_of_magnitude(amax, self.largest, self.cfg.max_scale_exponent)
        scale = torch.where(amax > 0, scale, 1.0)
        torch._foreach_copy_(self.scales + self.inverses, list(torch.cat((scale, scale.reciprocal())).unbind()))

    def reset(self) -> None:
        """Forget all steps."""
        self.history.zero_()
        for amax in self.amaxes:
            amax.zero_()
        self.set_scales()
        self.begin(0)


def describe(cfg: Config) -> str:
    """One line about the precision of training and validation."""
    fp8, plain = cfg.fp8, cfg.parallel.dtype
    if fp8.recipe == "off":
        return f"{plain} in training and validation"
    scaling = "dynamic scales"
    if fp8.recipe == "delayed":
        scaling = f"delayed scales ({fp8.algorithm} of {fp8.history}, the first {fp8.dynamic_steps} steps dynamic)"
    validation = "FP8 with dynamic scales" if fp8.eval else plain
    return f"{plain}, {count(cfg.model)} linears in FP8 with {scaling}; validation {validation}"
