"""FP8 in the linears of the blocks: which they are, how they are scaled, and what one matrix product does.

An `Fp8Linear` computes its three products in FP8 with one scale per tensor: e4m3 for inputs and weights, e5m2 for
gradients, sums in fp32, results in bf16. Modulation, embedders, head and attention stay in parallel.dtype.

    dynamic   a tensor's scale comes from its own largest magnitude, so nothing is remembered
    delayed   it comes from the largest magnitudes of earlier steps, so a cast need not wait for a reduction

Weights are scaled dynamically under both recipes: every rank holds the same gathered weight, so their scale is exact,
needs no state and no communication, and its price is one more read of the weights per pass.
Without gradients (validation, pictures) scales are dynamic under both recipes, too: the loss is then a function of
weights and data alone, and nothing that is remembered can move.

Another precision, such as MXFP8, needs a recipe in rules.CHOICES, its casts and products here (`_scale`, `scaled_mm`),
a line in `describe`, its name in the log (mllog.py), and what it costs (footprint.py, plan.py). Scales per block
instead of one per tensor change `Fp8Linear` and its autograd function, and which widths rules.py allows.

port: a quantisation scale is largest FP8 value / largest magnitude; the products take its reciprocal.
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

from flux_ref.config import Config, Fp8Config, ModelConfig
from flux_ref.errors import Refusal

# Shapes: M tokens of a micro-batch, K inputs and N outputs of a linear.
CONVERTED = re.compile(r"double_blocks\.\d+\.(img|txt)_(attn\.(qkv|proj)|mlp\.[02])|single_blocks\.\d+\.linear[12]")
MULTIPLE = 16  # of which the kernels want all but the rows of a result
E5M2 = (torch.float8_e5m2, torch.float8_e5m2fnuz)


class Arithmetic(NamedTuple):
    """What a kind of device computes with."""

    forward: torch.dtype  # of inputs and weights
    gradient: torch.dtype
    row_times_column: bool  # whether a product wants its left side row-major and its right side column-major


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

    Source: the layouts that PyTorch's ScaledBlas.cpp accepts; MI300X and MI325X (gfx94x) have formats of their own,
    without infinities and negative zero.
    """
    if re.fullmatch(r"gfx94\d", arch):
        return Arithmetic(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, row_times_column=False)
    if not re.fullmatch(r"cpu|sm89|sm9\d|sm1\d\d|gfx950|gfx12\d\d", arch):
        raise Refusal(f"fp8.recipe needs a device that computes in FP8, {arch} does not; set fp8.recipe=off")
    # Datacenter Blackwell and AMD take every layout. The CPU does, too, but is to show what Hopper would refuse.
    anything = re.fullmatch(r"sm10\d|gfx\d+", arch)
    return Arithmetic(torch.float8_e4m3fn, torch.float8_e5m2, row_times_column=not anything)


def quantisation_scale(amax: Tensor, largest: float | Tensor, exponent: int) -> Tensor:
    """The scale that maps a magnitude to the largest value of a format, at most 2**exponent; fp32.

    amax: fp32; 0 gives the cap, infinity 0, which turns the product into NaN, and NaN stays NaN.
    """
    # numerics: an uncapped scale of a nearly vanished gradient overflows in some kernels.
    return (largest / amax).clamp(max=2.0**exponent)


def largest_magnitude(x: Tensor) -> Tensor:
    """max |x| as an fp32 scalar."""
    return x.abs().amax(-1).amax().float()  # in two stages, which compilers fuse better


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x * scale in an FP8 format; what lies beyond its range becomes its largest value, NaN stays NaN."""
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

    fast: sum with less than fp32's precision where the device can (Hopper). Asserts what the CPU would let pass.
    """
    assert not {a_MK.dtype, b_KN.dtype} <= set(E5M2), "no device multiplies e5m2 by e5m2"
    assert b_KN.shape[0] % MULTIPLE == 0 and b_KN.shape[1] % MULTIPLE == 0, f"{tuple(b_KN.shape)} % {MULTIPLE}"
    assert a_MK.stride(1) == 1 or not row_times_column, "the left side is not row-major"
    assert b_KN.stride(0) == 1 or not row_times_column, "the right side is not column-major"
    scale_a, scale_b = scale_a.reciprocal(), scale_b.reciprocal()
    if not has_kernel(a_MK.device):
        return decoded_mm(a_MK, b_KN, scale_a, scale_b, bias_N, out_dtype)
    return torch._scaled_mm(
        a_MK, b_KN, scale_a=scale_a, scale_b=scale_b, bias=bias_N, out_dtype=out_dtype, use_fast_accum=fast
    )


def has_kernel(device: torch.device) -> bool:
    """Whether FP8 tensors on a device are multiplied by torch's kernel for them.

    Never on a CPU: torch's kernel there takes other formats and sums in another order on each maker's CPU.
    """
    return device.type != "cpu"


def decoded_mm(
    a_MK: Tensor, b_KN: Tensor, scale_a: Tensor, scale_b: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    """The product of the decoded values in fp32, times both scales, plus the bias, rounded once: (M, N).

    Decoding is exact, and so is each product of two values. The order of the sum alone is the CPU's choice.
    """
    out_MN = torch.mm(a_MK.float(), b_KN.float()) * scale_a * scale_b
    return (out_MN if bias_N is None else out_MN + bias_N.float()).to(out_dtype)


class _Fp8Matmul(torch.autograd.Function):
    """x @ w.T + b with all three products in FP8.

    Saved for backward are the FP8 input and the gathered weight in bf16, which is cast again: a cast copy would be
    kept for every layer at once, and FSDP would not know that it may free it.
    """

    @staticmethod
    def forward(ctx, x_MK, weight_NK, bias_N, amax_x, scale_x, amax_g, scale_g, arith: Arithmetic, exponent: int):
        """amax: where to note the largest magnitudes, or None. scale: the delayed scales, or None for dynamic ones."""
        scale_x = _scale(x_MK, arith.forward, exponent, amax_x, scale_x)
        scale_w = _scale(weight_NK, arith.forward, exponent)
        x8_MK = cast(x_MK, scale_x, arith.forward)
        w8_NK = cast(weight_NK, scale_w, arith.forward)
        ctx.save_for_backward(x8_MK, weight_NK, scale_x, scale_w, scale_g)
        ctx.amax_g, ctx.arith, ctx.exponent = amax_g, arith, exponent  # amax_g changes, so it cannot be saved
        rule = arith.row_times_column
        return scaled_mm(x8_MK, w8_NK.t(), scale_x, scale_w, rule, bias_N, x_MK.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad_MN):
        x8_MK, weight_NK, scale_x, scale_w, scale_g = ctx.saved_tensors
        # Inductor knows no other layout, whatever the device would take (torch 2.11 to 2.15).
        rule = ctx.arith.row_times_column or torch.compiler.is_compiling()
        grad_MN = grad_MN.contiguous()
        scale_g = _scale(grad_MN, ctx.arith.gradient, ctx.exponent, ctx.amax_g, scale_g)
        g8_MN = cast(grad_MN, scale_g, ctx.arith.gradient)
        w8_NK = cast(weight_NK, scale_w, ctx.arith.forward)
        if rule:  # right sides column-major: transposed copies
            w8_NK, x8_MK = w8_NK.t().contiguous().t(), x8_MK.t().contiguous().t()
        g8_NM = g8_MN.t().contiguous() if rule else g8_MN.t()
        grad_x_MK = scaled_mm(g8_MN, w8_NK, scale_g, scale_w, rule, out_dtype=grad_MN.dtype)
        grad_w_NK = scaled_mm(g8_NM, x8_MK, scale_g, scale_x, rule, out_dtype=grad_MN.dtype)
        grad_b_N = grad_MN.sum(0) if ctx.needs_input_grad[2] else None
        return grad_x_MK, grad_w_NK, grad_b_N, *(None,) * 6


def _scale(
    x: Tensor, dtype: torch.dtype, exponent: int, amax: Tensor | None = None, delayed: Tensor | None = None
) -> Tensor:
    """The scale of a tensor: the delayed one if given, else its own. amax: where to note its largest magnitude."""
    if amax is None and delayed is not None:
        return delayed
    own = largest_magnitude(x)
    if amax is not None:
        amax.copy_(torch.maximum(amax, own))  # over the micro-batches of a step
    return quantisation_scale(own, torch.finfo(dtype).max, exponent) if delayed is None else delayed


class Fp8Linear(nn.Linear):
    """A linear whose parameters keep their names, shapes and dtype, and whose products are FP8.

    scaling: of training, "dynamic" or "delayed"; `Fp8State.begin` sets it. amax_* and scale_* are fp32 scalars, of the
    input and of the gradient of the output; None under the dynamic recipe.
    """

    def __init__(self, linear: nn.Linear, cfg: Fp8Config, arith: Arithmetic):
        """Takes over the parameters of a linear."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.arith, self.exponent = arith, cfg.max_scale_exponent
        self.scaling, self.evaluates = "dynamic", cfg.eval
        for name in ("amax_x", "scale_x", "amax_g", "scale_g"):
            # A tensor each: views of one would share a version counter, which compiled backwards refuse.
            own = torch.zeros((), device=linear.weight.device) if cfg.recipe == "delayed" else None
            self.register_buffer(name, own, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: (..., K) bf16 -> (..., N)."""
        trains = torch.is_grad_enabled()
        if not trains and not self.evaluates:
            return F.linear(x, self.weight, self.bias)
        amax_x, amax_g = (self.amax_x, self.amax_g) if trains else (None, None)
        delayed = trains and self.scaling == "delayed"
        scale_x, scale_g = (self.scale_x, self.scale_g) if delayed else (None, None)
        noted = (amax_x, scale_x, amax_g, scale_g)
        out_MN = _Fp8Matmul.apply(x.flatten(0, -2), self.weight, self.bias, *noted, self.arith, self.exponent)
        return out_MN.unflatten(0, x.shape[:-1])


def count(cfg: ModelConfig) -> int:
    """How many linears FP8 concerns: 228 in FLUX.1-schnell."""
    return 8 * cfg.double_blocks + 2 * cfg.single_blocks


def convert(net: nn.Module, cfg: Config, device: torch.device) -> None:
    """Make the linears of a net's blocks compute as fp8.recipe says on a device, before it is sharded.

    Raises: Refusal if the device has no FP8.
    """
    if cfg.fp8.recipe == "off":
        return
    arith = arithmetic(architecture(device))
    linears = {name: module for name, module in net.named_modules() if CONVERTED.fullmatch(name)}
    assert len(linears) == count(cfg.model), f"{len(linears)} linears, want {count(cfg.model)}"
    for name, linear in linears.items():
        net.set_submodule(name, Fp8Linear(linear, cfg.fp8, arith))


class Fp8State:
    """What delayed scaling remembers of a converted net, the same on all ranks. Does nothing for other recipes.

    history: (2 * linears, fp8.history) fp32, the largest magnitudes of past steps, newest first; 0 where there was
    none. Its rows are in the order of the model, of each linear first the input, then the gradient. It is all that has
    to survive a restart: scales are a function of it.
    """

    def __init__(self, net: nn.Module, cfg: Fp8Config, device: torch.device):
        self.cfg = cfg
        self.linears = [module for module in net.modules() if isinstance(module, Fp8Linear)]
        noting = self.linears if cfg.recipe == "delayed" else []
        self.amaxes = [amax for linear in noting for amax in (linear.amax_x, linear.amax_g)]
        self.scales = [scale for linear in noting for scale in (linear.scale_x, linear.scale_g)]
        largest = [torch.finfo(dtype).max for linear in noting for dtype in linear.arith[:2]]
        self.largest = torch.tensor(largest, device=device) / 2**cfg.margin
        self.history = torch.zeros(len(largest), cfg.history, device=device)
        self.reset()

    @property
    def phases(self) -> tuple[int, ...]:
        """The first step of each way of scaling, which compiles and captures graphs of its own."""
        return (0, self.cfg.dynamic_steps) if self.amaxes and self.cfg.dynamic_steps else (0,)

    def phase(self, step: int) -> int:
        """The phase that a training step belongs to."""
        return max(first for first in self.phases if first <= step)

    def begin(self, step: int) -> None:
        """Scale the training step to come as its number, counted from 0, asks. Host only.

        The first steps of delayed scaling take dynamic scales and fill the history: their gradients grow by orders of
        magnitude from one step to the next, while every gate still is nearly zero.
        """
        scaling = "delayed" if self.amaxes and step >= self.cfg.dynamic_steps else "dynamic"
        for linear in self.linears:
            linear.scaling = scaling

    def update(self) -> Tensor | None:
        """Take a step's magnitudes into the history and set the scales of the next; after its last backward.

        Returns 1, or NaN if a magnitude was not finite on any rank: a cast by a remembered scale turns infinity into
        the largest value, so that no loss would tell. None where casts tell by themselves.

        Collective, on the device alone and in place, so a captured graph may hold it. A tensor whose magnitude was 0
        or not finite on any rank keeps its history and scale.
        """
        if not self.amaxes:
            return None
        amax = torch.stack(self.amaxes).nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum may overlook NaN
        dist.all_reduce(amax, op=dist.ReduceOp.MAX)
        usable = ((amax > 0) & amax.isfinite())[:, None]
        rolled = torch.cat((amax[:, None], self.history[:, :-1]), dim=1)
        self.history.copy_(torch.where(usable, rolled, self.history))
        torch._foreach_zero_(self.amaxes)
        self.rescale()
        return torch.where(amax.isfinite().all(), 1.0, torch.nan)

    def rescale(self) -> None:
        """Set the scales from the history; 1 for what has none."""
        if not self.amaxes:
            return
        amax = self.history.amax(1) if self.cfg.algorithm == "max" else self.history[:, 0]
        scale = quantisation_scale(amax, self.largest, self.cfg.max_scale_exponent)
        torch._foreach_copy_(self.scales, list(torch.where(amax > 0, scale, 1.0).unbind()))

    def reset(self) -> None:
        """As if no step had been taken."""
        self.history.zero_()
        for amax in self.amaxes:
            amax.zero_()
        self.rescale()
        self.begin(0)


def describe(cfg: Config) -> str:
    """One line about what training and validation compute in."""
    fp8, plain = cfg.fp8, cfg.parallel.dtype
    if fp8.recipe == "off":
        return f"{plain} in training and validation"
    scaling = {
        "dynamic": "dynamic scales",
        "delayed": f"delayed scales ({fp8.algorithm} of {fp8.history}, the first {fp8.dynamic_steps} steps dynamic)",
    }[fp8.recipe]
    validation = "FP8 with dynamic scales" if fp8.eval else plain
    return f"{plain}, {count(cfg.model)} linears in FP8 with {scaling}; validation {validation}"
