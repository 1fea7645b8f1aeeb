"""One linear's three products in FP8: formats, scales, casts and layouts.

The products are the output, the gradient of the input and the gradient of the weight. Inputs and weights are e4m3,
gradients are e5m2. Each tensor has one scale, from its own magnitude or remembered by recipe.py. Sums are fp32,
results are bf16.

port: a scale is the largest FP8 value / largest magnitude. A cast multiplies by the scale; a product divides by it.
Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from flux_ref.cli import Refusal
from flux_ref.precision.casts import scale_of_magnitude

# Shapes: M tokens of a micro-batch, K inputs and N outputs of a linear.


class Support(NamedTuple):
    """The FP8 that a kind of device computes with."""

    forward: torch.dtype  # of inputs and weights
    gradient: torch.dtype
    row_times_column: bool  # whether a product needs its left side row-major and its right side column-major


Scales = tuple[Tensor, Tensor]  # that a cast multiplies by, and 1 / scale; fp32


class DelayedScaling(NamedTuple):
    """What training keeps of an input or of a gradient, fp32.

    One tensor each: views of one tensor would share a version counter, which compiled backwards refuse.
    """

    amax: Tensor | None = None  # (), receives the largest magnitude; None: it is not noted
    scales: Scales | None = None  # delayed; None: those of the tensor's own magnitude


NOTHING = DelayedScaling()


class Codes(NamedTuple):
    """A weight in FP8, as linear.py gathers it."""

    codes: Tensor  # (N, K)
    scales: Scales


def architecture(device: torch.device) -> str:
    """The name of a device's kind: "cpu", "sm90", "gfx942", ..."""
    if device.type == "cpu":
        return "cpu"
    properties = torch.get_device_module(device).get_device_properties(device)
    if torch.version.hip:
        return properties.gcnArchName.split(":")[0]
    return f"sm{properties.major}{properties.minor}"


def support(arch: str) -> Support:
    """The formats and layouts of an architecture. Raises: Refusal if it has no FP8.

    Source: the layouts that PyTorch's ScaledBlas.cpp accepts. MI300X and MI325X (gfx94x) have formats of their own,
    without infinities and negative zero. On AMD torch refuses what Hopper cannot do: PyTorch's pull request 196884 of
    September 2026 lifts this for one scale per tensor, and no version that we know has it.
    """
    if re.fullmatch(r"gfx94\d", arch):
        return Support(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, row_times_column=True)
    if not re.fullmatch(r"cpu|sm89|sm9\d|sm1\d\d|gfx950|gfx12\d\d", arch):
        raise Refusal(f"e4m3 sides need a device that computes in FP8, {arch} does not; set precision.preset=bf16")
    # Datacenter Blackwell takes every layout. A CPU could, too, but shows here what Hopper would refuse.
    any_layout = re.fullmatch(r"sm10\d", arch)
    return Support(torch.float8_e4m3fn, torch.float8_e5m2, row_times_column=not any_layout)


def has_kernel(device: torch.device) -> bool:
    """Whether torch's own FP8 product is used on a device. Not on a CPU: there it depends on the CPU's maker."""
    return device.type != "cpu"


def magnitudes(x: Tensor, dim: int = -1) -> Tensor:
    """max |x| along one dimension. The caller takes the maximum of these: compilers fuse two reductions better."""
    return x.abs().amax(dim)


def agreed_magnitudes(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> Tensor:
    """max |x| of each tensor over the ranks of a group, infinity for one that is not finite. Collective."""
    # A maximum over ranks may overlook NaN.
    amax = torch.stack(torch._foreach_norm(tensors, math.inf)).nan_to_num(nan=math.inf, posinf=math.inf)
    dist.all_reduce(amax, op=dist.ReduceOp.MAX, group=group)
    return amax


def keep_scales(scale: Tensor, places: list[Scales]) -> None:
    """Write each element of `scale`, and 1 / scale, to one place, on the device alone."""
    scales, inverses = zip(*places)
    torch._foreach_copy_([*scales, *inverses], list(torch.cat((scale, scale.reciprocal())).unbind()))


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in an FP8 format. A value beyond the format's range becomes its largest value; NaN stays NaN."""
    # numerics: without the clamp, some formats and versions of torch overflow to NaN or infinity.
    largest = torch.finfo(dtype).max
    return (x.float() * scale).clamp(-largest, largest).to(dtype)


def scaled_mm(
    a_MK: Tensor,
    b_KN: Tensor,
    inverse_a: Tensor,
    inverse_b: Tensor,
    bias_N: Tensor | None = None,
    fast: bool = False,
) -> Tensor:
    """a @ b + bias of FP8 tensors: (M, N) bf16.

    inverse_*: 1 / the scale that a side was cast with.
    fast: sum with less than fp32's precision where the device can (Hopper).
    """
    if has_kernel(a_MK.device):
        return _device_mm(a_MK, b_KN, inverse_a, inverse_b, bias_N, fast)
    # numerics: decoding is exact, as is the product of two decoded values. Only the sum's order depends on the CPU.
    out_MN = torch.mm(a_MK.float(), b_KN.float()) * inverse_a * inverse_b
    return (out_MN if bias_N is None else out_MN + bias_N.float()).bfloat16()


@torch.library.custom_op("flux_ref::scaled_mm", mutates_args=())
def _device_mm(
    a_MK: Tensor, b_KN: Tensor, inverse_a: Tensor, inverse_b: Tensor, bias_N: Tensor | None, fast: bool
) -> Tensor:
    """torch's own product, hidden from Inductor, which (torch 2.11 to 2.15) makes Hopper's layouts on every device."""
    return torch._scaled_mm(
        a_MK, b_KN, inverse_a, inverse_b, bias=bias_N, out_dtype=torch.bfloat16, use_fast_accum=fast
    )


@_device_mm.register_fake
def product_like(a_MK, b_KN, *_) -> Tensor:
    """A product without values, for compilers."""
    return a_MK.new_empty(len(a_MK), b_KN.shape[1], dtype=torch.bfloat16)


@register_flop_formula(torch.ops.flux_ref.scaled_mm)  # compute.activation_memory_budget weighs what it recomputes
def product_flop(a_shape, b_shape, *_, **__) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


class Fp8Matmul(torch.autograd.Function):
    """x @ w.T + b in FP8. The gradient of the weight may be left in bf16.

    Parts of x join along K, and the result is split along N. Each part is cast by itself. So a compiler can cast a part
    where the part is computed.
    gathered: the weight in FP8; the weight itself then only receives its gradient.
    Without it the weight is cast here, and backward casts the weight again. A copy in FP8 would be kept for every
    layer at once, and FSDP would not know that it may free the copy.
    """

    @staticmethod
    def forward(
        ctx,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        gathered: Codes | None,
        support: Support,
        grad_in_fp8: bool,
        widths: list[int],
        of_input: DelayedScaling,
        of_grad: DelayedScaling,
        part: Tensor,
        other: Tensor | None = None,
    ):
        """grad_in_fp8: whether the gradient of the weight is in FP8. widths: N of the result's parts.

        part, other: of x. torch 2.14's compiler would take *parts of two for a forward without ctx if there is no
        gradient (torch/_dynamo/variables/misc.py, call_apply).
        """
        parts = [part] if other is None else [part, other]
        rule = support.row_times_column
        amax_M = torch.cat([magnitudes(part) for part in parts])
        input_scale, input_inverse = scales_of(amax_M, support.forward, of_input)
        x8_MK, x8_KM = _codes(parts, input_scale, support.forward, rule)
        if gathered:
            codes_NK, (weight_scale, weight_inverse) = gathered
        else:
            weight_scale, weight_inverse = scales_of(magnitudes(weight_NK), support.forward)
            codes_NK = cast(weight_NK, weight_scale, support.forward)
        kept = (x8_KM,) if grad_in_fp8 else parts
        kept_NK = codes_NK if gathered else weight_NK
        ctx.save_for_backward(kept_NK, input_inverse, weight_scale, weight_inverse, *kept)
        ctx.of_grad = of_grad  # its amax changes, so ctx cannot save it
        ctx.support = support
        ctx.grad_in_fp8 = grad_in_fp8
        ctx.widths = [part.shape[1] for part in parts]
        out_MN = scaled_mm(x8_MK, codes_NK.t(), input_inverse, weight_inverse, bias_N, fast=True)
        return out_MN.split(widths, dim=1)

    @staticmethod
    def backward(ctx, *grads):
        kept_NK, input_inverse, weight_scale, weight_inverse, *kept = ctx.saved_tensors
        rule = ctx.support.row_times_column
        kind = ctx.support.gradient
        amax_N = torch.cat([magnitudes(grad, dim=0) for grad in grads])  # in one pass with the bias' gradient
        grad_scale, grad_inverse = scales_of(amax_N, kind, ctx.of_grad)
        g8_MN, g8_NM = _codes(grads, grad_scale, kind, rule)
        w8_NK = kept_NK if kept_NK.dtype == ctx.support.forward else cast(kept_NK, weight_scale, ctx.support.forward)
        if rule:
            w8_NK = w8_NK.t().contiguous().t()
        grad_x_MK = scaled_mm(g8_MN, w8_NK, grad_inverse, weight_inverse)
        if ctx.grad_in_fp8:
            grad_w_NK = scaled_mm(g8_NM, kept[0].t(), grad_inverse, input_inverse)
        else:
            grad_w_NK = torch.cat(grads, dim=1).t() @ torch.cat(kept, dim=1)
        grad_b_N = torch.cat([grad.sum(0) for grad in grads]) if ctx.needs_input_grad[1] else None
        return grad_w_NK, grad_b_N, *(None,) * 6, *grad_x_MK.split(ctx.widths, dim=1)


def _codes(parts: Sequence[Tensor], scale: Tensor, dtype: torch.dtype, row_times_column: bool) -> tuple[Tensor, Tensor]:
    """Parts of (M, N) in FP8, joined, and their transpose (N, M): a copy where a product needs one row-major."""
    casts = [cast(part, scale, dtype) for part in parts]
    if len(casts) == 1:  # a compiler takes a cat of one part for a clone, and keeps the strides of the part
        codes_MN = casts[0].contiguous()
        return codes_MN, codes_MN.t().contiguous() if row_times_column else codes_MN.t()
    codes_MN = torch.cat(casts, dim=1)
    return codes_MN, torch.cat([part.t() for part in casts]) if row_times_column else codes_MN.t()


def scales_of(found: Tensor, dtype: torch.dtype, remembered: DelayedScaling = NOTHING) -> Scales:
    """The scales to cast a tensor with: those remembered, else those of the tensor's own magnitude.

    found: the tensor's `magnitudes`. remembered.amax is raised to the largest of them.
    """
    largest = found.amax()
    if remembered.amax is not None:
        remembered.amax.copy_(torch.maximum(remembered.amax, largest))
    if remembered.scales:
        return remembered.scales
    scale = scale_of_magnitude(largest.float(), torch.finfo(dtype).max)
    return scale, scale.reciprocal()
