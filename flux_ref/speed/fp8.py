"""FP8 in the linears of the blocks: which linears, how their tensors are scaled, and how they are multiplied.

An `Fp8Linear` computes its three products in FP8: the output, the gradient of the input, the gradient of the weight.
Inputs and weights are e4m3, gradients are e5m2. Each tensor has one scale. Sums are fp32, results are bf16.
Modulation, embedders, head and attention stay in parallel.dtype.

    dynamic   a tensor's scale comes from its own largest magnitude; nothing is remembered
    delayed   the scale comes from the largest magnitudes of earlier steps, so a cast need not wait for a reduction

Weights are scaled dynamically under both recipes. Every rank holds the same gathered weight, so the scale is exact and
needs neither state nor communication. It costs one more read of the weight per pass.
Without gradients (validation, pictures) all scales are dynamic. The loss then depends on weights and data alone, and
the history does not change.

Another precision, such as MXFP8, changes this file, the recipes and widths in config_rules.py, its name in
benchmark/mllog.py, and its cost in plan/.

port: a scale is the largest FP8 value / largest magnitude. A cast multiplies by the scale; a product divides by it.
Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; delayed scaling as NVIDIA's Transformer
Engine documents it.
"""

import math
import re
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flux_ref.config import FP8_LINEAR, Config, Fp8Config, ModelConfig
from flux_ref.errors import Refusal

# Shapes: M tokens of a micro-batch, K inputs and N outputs of a linear.
MULTIPLE = 16  # kernels need K and N divisible by this number; M is free
E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)


class Arithmetic(NamedTuple):
    """What a kind of device computes with."""

    forward: torch.dtype  # of inputs and weights
    gradient: torch.dtype
    row_times_column: bool  # whether a product needs its left side row-major and its right side column-major


def architecture(device: torch.device) -> str:
    """The name of a device's kind: "cpu", "sm90", "gfx942", ..."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.get_device_module(device).get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def arithmetic(arch: str) -> Arithmetic:
    """The arithmetic of an architecture. Raises: Refusal if it has no FP8.

    Source: the layouts that PyTorch's ScaledBlas.cpp accepts. MI300X and MI325X (gfx94x) have formats of their own,
    without infinities and negative zero.
    """
    if re.fullmatch(r"gfx94\d", arch):
        return Arithmetic(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, row_times_column=False)
    if not re.fullmatch(r"cpu|sm89|sm9\d|sm1\d\d|gfx950|gfx12\d\d", arch):
        raise Refusal(f"fp8.recipe needs a device that computes in FP8, {arch} does not; set fp8.recipe=off")
    # Datacenter Blackwell and AMD take every layout. A CPU could, too, but shows here what Hopper would refuse.
    any_layout = re.fullmatch(r"sm10\d|gfx\d+", arch)
    return Arithmetic(torch.float8_e4m3fn, torch.float8_e5m2, row_times_column=not any_layout)


def has_kernel(device: torch.device) -> bool:
    """Whether torch's own FP8 product is used on a device. Not on a CPU: there it depends on the CPU's maker."""
    return device.type != "cpu"


def scale_of_magnitude(amax: Tensor, largest: float | Tensor, max_exponent: int) -> Tensor:
    """The scale that maps a magnitude to the largest value of a format, at most 2**max_exponent; fp32.

    amax: fp32. For 0 the scale is the cap. For infinity it is 0, which turns the product into NaN. NaN stays NaN.
    """
    # numerics: an uncapped scale of a nearly vanished gradient overflows in some kernels.
    return (largest / amax).clamp(max=2.0**max_exponent)


def largest_magnitude(x: Tensor) -> Tensor:
    """max |x| as an fp32 scalar."""
    return x.abs().amax(-1).amax().float()  # in two stages, which compilers fuse better


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in an FP8 format. A value beyond the format's range becomes its largest value; NaN stays NaN."""
    # numerics: without the clamp, some formats and versions of torch overflow to NaN or infinity.
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def scaled_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    row_times_column: bool,
    bias_N: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> Tensor:
    """a @ b + bias of FP8 tensors that were cast with these scales: (M, N).

    fast: sum with less than fp32's precision where the device can (Hopper). Asserts what a GPU would refuse.
    """
    assert not {a_MK.dtype, b_KN.dtype} <= set(E5M2), "no device multiplies e5m2 by e5m2"
    assert b_KN.shape[0] % MULTIPLE == 0 and b_KN.shape[1] % MULTIPLE == 0, f"{tuple(b_KN.shape)} % {MULTIPLE}"
    assert a_MK.stride(1) == 1 or not row_times_column, "the left side is not row-major"
    assert b_KN.stride(0) == 1 or not row_times_column, "the right side is not column-major"
    scale_a, scale_b = scale_a.reciprocal(), scale_b.reciprocal()
    if has_kernel(a_MK.device):
        return torch._scaled_mm(
            a_MK, b_KN, scale_a=scale_a, scale_b=scale_b, bias=bias_N, out_dtype=out_dtype, use_fast_accum=fast
        )
    # numerics: decoding is exact, as is the product of two decoded values. Only the sum's order depends on the CPU.
    out_MN = torch.mm(a_MK.float(), b_KN.float()) * scale_a * scale_b
    return (out_MN if bias_N is None else out_MN + bias_N.float()).to(out_dtype)


class _Fp8Matmul(torch.autograd.Function):
    """x @ w.T + b with all three products in FP8.

    codes: the weight in FP8 with its scale, as fp8_gather.py gathers it; the weight then only receives its gradient.
    Without codes the weight is cast here, and backward casts the weight again. A copy in FP8 would be kept for every
    layer at once, and FSDP would not know that it may free the copy.
    """

    @staticmethod
    def forward(ctx, x_MK, weight_NK, bias_N, codes_NK, weight_scale, arith, max_exponent, *scaling):
        """scaling: input_amax, input_scale, grad_amax, grad_scale of Fp8Linear.

        *_amax: where to note the largest magnitudes, or None. *_scale: delayed scales, or None for dynamic ones.
        """
        input_amax, input_scale, grad_amax, grad_scale = scaling
        input_scale = _tensor_scale(x_MK, arith.forward, max_exponent, input_amax, input_scale)
        x8_MK, w8_NK = cast(x_MK, input_scale, arith.forward), codes_NK
        if codes_NK is None:
            weight_scale = _tensor_scale(weight_NK, arith.forward, max_exponent)
            w8_NK = cast(weight_NK, weight_scale, arith.forward)
        kept_NK = weight_NK if codes_NK is None else codes_NK
        ctx.save_for_backward(x8_MK, kept_NK, input_scale, weight_scale, grad_scale)
        # grad_amax changes, so ctx cannot save it.
        ctx.grad_amax, ctx.arith, ctx.max_exponent = grad_amax, arith, max_exponent
        rule = arith.row_times_column
        return scaled_mm(x8_MK, w8_NK.t(), input_scale, weight_scale, rule, bias_N, x_MK.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad_MN):
        x8_MK, kept_NK, input_scale, weight_scale, grad_scale = ctx.saved_tensors
        # Inductor knows no other layout, whatever the device would take (torch 2.11 to 2.15).
        rule = ctx.arith.row_times_column or torch.compiler.is_compiling()
        grad_MN = grad_MN.contiguous()
        grad_scale = _tensor_scale(grad_MN, ctx.arith.gradient, ctx.max_exponent, ctx.grad_amax, grad_scale)
        g8_MN = cast(grad_MN, grad_scale, ctx.arith.gradient)
        if kept_NK.itemsize == 1:
            w8_NK = kept_NK if not torch.compiler.is_compiling() else _in_backward(kept_NK, grad_scale)
        else:
            w8_NK = cast(kept_NK, weight_scale, ctx.arith.forward)
        if rule:  # right sides column-major: transposed copies
            w8_NK, x8_MK = w8_NK.t().contiguous().t(), x8_MK.t().contiguous().t()
        g8_NM = g8_MN.t().contiguous() if rule else g8_MN.t()
        grad_x_MK = scaled_mm(g8_MN, w8_NK, grad_scale, weight_scale, rule, out_dtype=grad_MN.dtype)
        grad_w_NK = scaled_mm(g8_NM, x8_MK, grad_scale, input_scale, rule, out_dtype=grad_MN.dtype)
        grad_b_N = grad_MN.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x_MK, grad_w_NK, grad_b_N, *(None,) * 8


def _in_backward(codes: Tensor, grad_scale: Tensor) -> Tensor:
    """The same codes, tied to the gradient. Else a compiler may transpose the codes in forward and keep the copy."""
    zero = (grad_scale < 0).to(torch.uint8)
    return (codes.view(torch.uint8) + zero).view(codes.dtype)


def _tensor_scale(
    x: Tensor, dtype: torch.dtype, max_exponent: int, amax: Tensor | None = None, delayed: Tensor | None = None
) -> Tensor:
    """The scale to cast a tensor with: the delayed scale if given, else the scale of the tensor's own magnitude.

    amax: fp32 scalar that is raised to the tensor's largest magnitude, over the micro-batches of a step; or None.
    """
    if amax is None and delayed is not None:
        return delayed
    magnitude = largest_magnitude(x)
    if amax is not None:
        amax.copy_(torch.maximum(amax, magnitude))
    return scale_of_magnitude(magnitude, torch.finfo(dtype).max, max_exponent) if delayed is None else delayed


class Fp8Linear(nn.Linear):
    """A linear whose parameters keep their names, shapes and dtype, and whose products are FP8.

    is_delayed: whether training takes the delayed scales; set by `Fp8State.begin`.
    input_amax, input_scale, grad_amax, grad_scale: fp32 scalars of the input and of the output's gradient; None under
    the dynamic recipe.
    codes, weight_scale: the gathered weight in FP8, (N, K), and its scale; None where the weight itself is gathered.
    """

    def __init__(self, linear: nn.Linear, cfg: Fp8Config, arith: Arithmetic):
        """Takes over the parameters of a linear."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.arith, self.max_exponent = arith, cfg.max_scale_exponent
        self.is_delayed, self.in_validation = False, cfg.eval
        self.codes = self.weight_scale = None
        for name in ("input_amax", "input_scale", "grad_amax", "grad_scale"):
            # One tensor each: views of one tensor would share a version counter, which compiled backwards refuse.
            buffer = torch.zeros((), device=linear.weight.device) if cfg.recipe == "delayed" else None
            self.register_buffer(name, buffer, persistent=False)

    @torch.no_grad()
    def encode(self) -> None:
        """Make the codes of the weight as it is now, as a gather would. For nets that are not sharded."""
        self.weight_scale = _tensor_scale(self.weight, self.arith.forward, self.max_exponent)
        self.codes = cast(self.weight, self.weight_scale, self.arith.forward)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., K) bf16 -> (..., N) bf16."""
        is_training = torch.is_grad_enabled()
        if not is_training and not self.in_validation:
            return F.linear(x, self.weight, self.bias)
        input_amax, grad_amax = (self.input_amax, self.grad_amax) if is_training else (None, None)
        use_history = is_training and self.is_delayed
        input_scale, grad_scale = (self.input_scale, self.grad_scale) if use_history else (None, None)
        weight = (self.weight, self.bias, self.codes, self.weight_scale)
        scaling = (input_amax, input_scale, grad_amax, grad_scale)
        out_MN = _Fp8Matmul.apply(x.flatten(0, -2), *weight, self.arith, self.max_exponent, *scaling)
        return out_MN.unflatten(0, x.shape[:-1])


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
        amax = torch.stack(self.amaxes).nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum may overlook NaN
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
        torch._foreach_copy_(self.scales, list(torch.where(amax > 0, scale, 1.0).unbind()))

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
