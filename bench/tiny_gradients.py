"""Do tiny gradients make FP8 weight gradients non-finite? Emulated at full width, on a CPU.

    python -m bench.tiny_gradients
    python -m bench.tiny_gradients --write

Public reports say that weight gradients of FLUX.1's QKV linears went non-finite in FP8, with gradients near 1e-12. This
study computes the weight gradient of one image QKV linear (768 tokens, 3,072 inputs, 9,216 outputs) for gradients of
many magnitudes, in each format, and finishes the FP8 product in each order that a kernel may choose. Casts and scales
cover the whole tensors. Products cover all inputs and 96 of the outputs, each of which is a sum of its own.
Then it runs one real double block, forward and backward. --write puts the tables into bench/results/tiny_gradients.md.
Exit codes: 0 done, 2 refused.
"""

import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from bench.common import head
from flux_ref import latents, model
from flux_ref.config import Config, ModelConfig, ParallelConfig, PrecisionConfig
from flux_ref.run.attempt import attempt
from flux_ref.run.options import Options
from flux_ref.speed import fp8_product
from flux_ref.speed.block_product import decoded
from flux_ref.speed.casts import encode
from flux_ref.speed.linear import PolicyLinear, convert
from flux_ref.speed.number_formats import E4M3, E5M2
from flux_ref.speed.policy import SIDES

RESULT = Path(__file__).with_name("results") / "tiny_gradients.md"
TOKENS, INPUTS, OUTPUTS, TAKEN = 768, 3072, 9216, 96
EXPONENTS = (-4, -8, -10, -12, -16, -18, -20, -28, -32, -34, -36, -38)  # of ten: the largest |gradient|
SPREAD = 4.0  # deviation of the log of a token's magnitude, in the second distribution
MAX_EXPONENT, UNCAPPED = PrecisionConfig().max_scale_exponent, math.inf
PART = 32  # products that an accumulator in fp16 adds before its result goes into fp32
LEAST = torch.finfo(torch.float32).tiny
TARGETS = (1e-4, 1e-12, 1e-18, 1e-35)  # of the block's QKV gradient
TEXT = """
Public reports say that FP8 weight gradients of the 38 QKV linears of FLUX.1 went non-finite, with gradients near 1e-12.
**This emulation refutes that the formats cause it.** At 1e-12 no code, scale, sum or result in E5M2 x E4M3 is
non-finite, with our cap of the scale (`precision.max_scale_exponent` 44) and without, in any order of fp32 or bf16
arithmetic. Three things gave non-finite values:

- **the kernel**: sums in fp16 overflow without a cap at every magnitude, because codes always fill the format's range.
  With the cap they are finite from 1e-12 downwards, because the codes shrink. So the cap can hide such a kernel.
- **the cast**: a delayed scale, if the gradient has grown since and the cast does not clamp.
- **the scale**: without a cap it is infinite for a tensor of zeros, and below 1.7e-34. Zero times infinity is NaN.
  Gates that start at zero make such tensors, so a recipe without a cap must treat zero apart.

A public report agrees: [one hipBLASLt solution](https://github.com/ROCm/rocm-libraries/issues/9450) returned NaN in 20
of 20 trials of this product on MI355X, and the default solution in 0 of 20. So a kernel is to blame there. QKV weight
gradients in bf16 avoid this kernel. Nothing here ran on a GPU: a wrong kernel itself is not shown.

The cap costs little down to 1e-16. Around 1e-18 and below it loses the gradient. MXFP8 and bf16 need no cap. The scale
of a tensor in NVFP4 is 2**-120 at least. So NVFP4 overflows nowhere, and loses the gradient around 1e-38 only.

## Relative error against fp64, all tokens alike

Columns: the largest |gradient| of the tensor. `p`, `q`: inverse scales of gradient and input; `s`, `t`: the scales.
**NF**: the share of the results that is not finite. 0: all results are zero. Results are rounded to bf16.

{alike}

## Relative error against fp64, magnitudes of tokens lognormal (deviation of the logarithm 4)

{spread}

## Casts with an old scale, as delayed scaling may have

{stale}

## One double block, forward and backward, random weights, eight FP8 linears

The error contains that of the casts of this product alone: the reference takes the block's own inputs and gradients.

{block}
"""
FP8 = Config(
    name="block",
    model=ModelConfig(double_blocks=1, single_blocks=0),
    parallel=ParallelConfig(dtype="bf16"),
    precision=PrecisionConfig(preset="fp8"),
)
Table = tuple[list[str], list[list[str]]]

# How a kernel may finish: from the sum of the codes' products, the scales s and t, and their inverses p and q.
Order = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
ORDERS: dict[str, Order] = {
    "sum * p * q (flux_ref)": lambda sums, s, t, p, q: sums * p * q,
    "sum * (p * q)": lambda sums, s, t, p, q: sums * (p * q),
    "sum / (s * t)": lambda sums, s, t, p, q: sums / (s * t),
    "sum * (1 / (s * t))": lambda sums, s, t, p, q: sums * (1 / (s * t)),
    "sum * (p * q), subnormals flushed": lambda sums, s, t, p, q: flushed(sums * flushed(flushed(p) * q)),
    "(sum, p, q in bf16)": lambda sums, s, t, p, q: (sums.bfloat16() * p.bfloat16() * q.bfloat16()).float(),
    "(p, q in fp16)": lambda sums, s, t, p, q: sums * p.half().float() * q.half().float(),
    "(sum / s * 1/t, s and t in fp16)": lambda sums, s, t, p, q: sums / s.half().float() / t.half().float(),
    "(sum in fp16) * p * q": lambda sums, s, t, p, q: sums.half().float() * p * q,
    "sum * p * q in fp16": lambda sums, s, t, p, q: (sums * p * q).half().float(),
}
MX = ("mxfp8", "nvfp4")


def flushed(x: Tensor) -> Tensor:
    """Subnormal numbers as zero, as some devices compute."""
    return x.where(~(x.abs() < LEAST), 0.0)


def said(result: Tensor, want: Tensor) -> str:
    """The share that is not finite, or the relative error; 0: all of the result is zero."""
    bad = (~result.isfinite()).double().mean().item()
    if bad:
        return f"**NF {bad:.0%}**" if bad >= 0.005 else "**NF <1%**"
    if not result.any():
        return "0"
    return f"{((result.double() - want).norm() / want.norm()).item():.2g}"


def casts(grad: Tensor, x: Tensor, cap: float) -> tuple[Tensor, ...]:
    """Codes of gradient and input as fp8_product casts them, both scales, both inverses."""
    scale, inverse = fp8_product.scales_of(fp8_product.magnitudes(grad), torch.float8_e5m2, cap)
    other, other_inverse = fp8_product.scales_of(fp8_product.magnitudes(x), torch.float8_e4m3fn, cap)
    codes = fp8_product.cast(grad, scale, torch.float8_e5m2), fp8_product.cast(x, other, torch.float8_e4m3fn)
    return *codes, scale, other, inverse, other_inverse


def fp16_sums(left: Tensor, right: Tensor) -> Tensor:
    """left (N, M) @ right (M, K), each run of PART products added in fp16, the runs in fp32."""
    pairs = zip(left.split(PART, 1), right.split(PART))
    return sum((a @ b).half().float() for a, b in pairs)


def sweep(spread: float) -> Table:
    """(heads, rows): one row for each magnitude. spread: of the tokens' magnitudes; 0: all alike."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(TOKENS, INPUTS, generator=generator).bfloat16()
    raw = torch.randn(TOKENS, OUTPUTS, generator=generator)
    raw *= (spread * torch.randn(TOKENS, 1, generator=generator)).exp()
    raw /= raw.abs().max()
    names = [f"{order}, {cap}" for order in ORDERS for cap in ("capped", "no cap")]
    names += [f"runs of {PART} in fp16, {cap}" for cap in ("capped", "no cap")] + [*MX, "bf16"]
    rows, right = [], {name: decoded(x.t(), SIDES[name]).t() for name in MX}
    for exponent in (*EXPONENTS, None):
        grad = (raw.double() * (0.0 if exponent is None else 10.0**exponent)).bfloat16()
        taken = grad[:, :TAKEN].double()
        want, found = taken.t() @ x.double(), {}
        for name, cap in (("capped", MAX_EXPONENT), ("no cap", UNCAPPED)):
            codes, other, *scales = casts(grad, x, cap)
            left, both = codes[:, :TAKEN].float().t(), other.float()
            sums = left @ both
            for order, finish in ORDERS.items():
                found[f"{order}, {name}"] = finish(sums, *scales).bfloat16()
            found[f"runs of {PART} in fp16, {name}"] = (fp16_sums(left, both) * scales[2] * scales[3]).bfloat16()
        for name in MX:
            found[name] = (decoded(grad.t(), SIDES[name])[:TAKEN] @ right[name]).bfloat16()
        found["bf16"] = (taken.float().t() @ x.float()).bfloat16()
        head = "all 0" if exponent is None else f"1e{exponent}"
        rows.append([head, *(said(found[name], want) for name in names)])
    return ["arithmetic", *(row[0] for row in rows)], [[name, *(r[i] for r in rows)] for i, name in enumerate(names, 1)]


def stale() -> Table:
    """Casts with a scale that belongs to a smaller magnitude, as delayed scaling may have, with and without a clamp."""
    x = torch.randn(2**16, generator=torch.Generator().manual_seed(0))
    rows = []
    for form, dtype in ((E5M2, torch.float8_e5m2), (E4M3, torch.float8_e4m3fn)):
        for growth in (1, 1.05, 1.25, 4):
            scaled = x * form.largest / x.abs().max() * growth
            clamped = scaled.clamp(-form.largest, form.largest).to(dtype).float()
            # By the format's definition, whatever torch does: what rounds beyond the largest value is no number.
            gap = form.largest - form.value(encode(form, torch.tensor(form.largest)).item() - 1)
            bare = scaled.where(scaled.abs() < form.largest + gap / 2, math.inf if form.infinity else math.nan)
            share = [f"{(~cast.isfinite()).double().mean():.2%}" for cast in (clamped, bare)]
            rows.append([form.name, str(growth), *share])
    return ["format", "growth since the scale was set", "non-finite with the clamp", "non-finite without"], rows


def block() -> Table:
    """A double block of FLUX.1-schnell with random weights in bf16, its eight linears in FP8: two samples."""
    cfg, noted, rows, text, factor = FP8.model, {}, [], 32, None
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    net = nn.Module()
    net.double_blocks = nn.ModuleList([model.DoubleBlock(cfg)])
    torch.set_default_dtype(torch.float32)
    convert(net, FP8, "cpu")
    net, linears = net.double_blocks[0], [module for module in net.modules() if isinstance(module, PolicyLinear)]

    def note(module: nn.Module, args: tuple[Tensor], out: Tensor) -> None:
        noted["input"] = args[0].detach().flatten(0, 1)
        out.register_hook(lambda grad: noted.update(grad=grad.detach().flatten(0, 1)))

    net.img_attn.qkv.register_forward_hook(note)
    img, txt, vec = (
        torch.randn(2, *size).bfloat16() for size in ((256, cfg.hidden), (text, cfg.hidden), (cfg.hidden,))
    )
    positions = torch.cat((torch.zeros(text, 3, dtype=torch.float64), latents.image_positions(32, 32)))
    rope = model.rope_table(positions, cfg.rope_axes, cfg.rope_theta)
    ends = [torch.randn(2, tokens, cfg.hidden).bfloat16() for tokens in (256, text)]  # the gradients of both outputs
    for name, cap in (("2^44", MAX_EXPONENT), ("none", UNCAPPED)):
        for linear in linears:
            linear.max_exponent = cap
        out = net((img, txt), vec, rope)
        for target in (None, *TARGETS) if factor is None else TARGETS:
            net.zero_grad()
            torch.autograd.backward(out, [end * (factor * target if target else 1) for end in ends], retain_graph=True)
            amax = noted["grad"].abs().max().item()
            if target is None:  # this pass only tells which factor gives a target
                factor = 1 / amax
                continue
            weights = [linear.weight.grad for linear in linears]
            finite = sum(bool(weight.isfinite().all()) for weight in weights)
            error = said(net.img_attn.qkv.weight.grad, noted["grad"].double().t() @ noted["input"].double())
            rows.append([f"{target:.0e}", name, f"{amax:.1e}", error, f"{finite} of {len(weights)}"])
    heads = ["wanted", "cap", "largest gradient of img.qkv", "error of its weight gradient", "finite weight gradients"]
    return heads, rows


def written(table: Table) -> str:
    heads, rows = table
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, ["---"] * len(heads), *rows))


def report(command: str) -> str:
    about = {name: head("bench.tiny_gradients", [])[name] for name in ("commit", "torch", "python", "device", "cores")}
    begin = time.monotonic()
    text = TEXT.format(
        alike=written(sweep(0.0)), spread=written(sweep(SPREAD)), stale=written(stale()), block=written(block())
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    about |= {
        "threads": torch.get_num_threads(),
        "seconds": round(time.monotonic() - begin),
        "memory GB": f"{peak:.1f}",
    }
    return f"`{command}`: " + ", ".join(f"{name} {value}" for name, value in about.items()) + f"\n{text}"


def main(argv: list[str]) -> int:
    parser = Options("python -m bench.tiny_gradients", __doc__)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    text = report(" ".join(["python -m bench.tiny_gradients", *argv]))
    print(text)
    if args.write:
        RESULT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(attempt("bench.tiny_gradients", lambda: main(sys.argv[1:])))
