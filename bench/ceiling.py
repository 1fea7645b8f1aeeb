"""What the device makes of FLUX's own matrix products: the ceiling of a step; bench/README.md explains every figure.

    python -m bench.ceiling --config configs/schnell_gbs512.toml --micro-batches 8,32 --json bench/results/NAME.json

Every linear layer of a block gives three products: forward, grad_input and grad_weight. Each is timed alone in the
compute dtype and, where the device has it, in FP8; the mean weighs each by its use in a step.
Exit codes: 0 done, 2 refused, 3 a fault stopped it.
"""

import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from math import gcd
from statistics import median

import torch
from torch import Tensor

from bench import common
from bench.common import END, Clock
from flux_ref import cli
from flux_ref.cli import Refusal
from flux_ref.config import Config, ModelConfig
from flux_ref.precision.fp8 import architecture, has_kernel, support
from flux_ref.precision.policy import MULTIPLE, layers
from flux_ref.precision.recipe import DTYPES
from flux_ref.ranks import World
from tools import flops_and_bytes
from tools.figures import between

WARMUP = 5
REPEATS = {"cpu": 5, "cuda": 20}
SQUARES = {"cpu": (512, 1024), "cuda": (4096, 8192)}


@dataclass(frozen=True)
class Product:
    """(m, k) times (k, n), and how often a step's forward and backward of one micro-batch has it."""

    layer: str
    kind: str  # forward, grad_input, grad_weight, square
    m: int
    n: int
    k: int
    per_step: int = 1

    @property
    def tflop(self) -> float:
        """1e12 operations of one."""
        return 2 * self.m * self.n * self.k / 1e12


Call = Callable[[], Tensor]  # computes a product
Make = Callable[[Product], Call]
Kinds = tuple[torch.dtype, torch.dtype]  # for forward, for gradients


def products(model: ModelConfig, micro_batch: int) -> list[Product]:
    """The products of every linear layer of the blocks that sees tokens; modulation sees one vector and is left out."""
    counts = Counter[tuple]()
    for name, layer in layers(model).items():
        in_block = name.split(".", 2)[2]
        counts.update((in_block, kind, *sizes) for kind, sizes in layer.sizes(micro_batch).items())
    return [Product(*found, count) for found, count in counts.items()]


def fp8_kinds(device: torch.device, wanted: list[Product]) -> Kinds:
    """(kind for forward, kind for gradients) of a device. Raises: Refusal where it cannot multiply these in FP8."""
    if not has_kernel(device):
        raise Refusal("a CPU decodes FP8 and multiplies in fp32")
    for product in wanted:
        if gcd(product.m, product.n, product.k, MULTIPLE) < MULTIPLE:
            size = f"a size that is not a multiple of {MULTIPLE}"
            raise Refusal(f"{product.layer} {product.kind} has {size}")
    return support(architecture(device))[:2]


def plain(product: Product, device: torch.device, dtype: torch.dtype) -> Call:
    """A call of the product in the layout in which nn.Linear and its backward have it; allocates nothing."""
    m = product.m
    n = product.n
    k = product.k
    out = torch.empty(m, n, device=device, dtype=dtype)
    left = random(k, m, device, dtype).t() if product.kind == "grad_weight" else random(m, k, device, dtype)
    right = random(n, k, device, dtype).t() if product.kind == "forward" else random(k, n, device, dtype)
    return lambda: torch.mm(left, right, out=out)


def fp8(product: Product, device: torch.device, kinds: Kinds) -> Call:
    """The same in FP8 with one scale per tensor: rows of the left and columns of the right lie in memory (TN).

    Gradients are the left operand of grad_input and grad_weight; only forward sums fast, as training does.
    """
    m = product.m
    n = product.n
    k = product.k
    forward = product.kind in ("forward", "square")
    left = random(m, k, device, kinds[0] if forward else kinds[1])
    right = random(n, k, device, kinds[0]).t()
    scale = torch.ones((), device=device)
    out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
    return lambda: torch._scaled_mm(
        left, right, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=forward, out=out
    )


def random(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Normal values; zeros would cost less power and so seem faster."""
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16).to(dtype)


def time_ms(call: Call, clock: Clock) -> float:
    """Median milliseconds of a call after warming up. The device may overlap calls."""
    for i in range(WARMUP + REPEATS[clock.device.type]):
        if i == WARMUP:
            clock.start()
        clock.mark("call")
        call()
        clock.mark(END)
    return median(step["call"] for step in clock.steps())


def ceiling(cfg: Config, micro_batch: int, clock: Clock) -> dict:
    """Times and rates of all products: "plain" in the compute dtype, and "fp8", or the reason why there is none.

    Rates in 1e12 FLOP/s.
    """
    wanted = products(cfg.model, micro_batch)
    tflop = total_tflop(wanted)
    report: dict = {
        "micro_batch": micro_batch,
        "dtype": cfg.compute.dtype,
        "tflop": tflop,
        "share_of_step": tflop / (flops_and_bytes.per_sample(cfg.model) / 1e12 * micro_batch),
        "plain": timed(wanted, maker(cfg, clock), clock),
    }
    try:
        kinds = fp8_kinds(clock.device, wanted)
        report["fp8"] = timed(wanted, partial(fp8, device=clock.device, kinds=kinds), clock)
    except Refusal as error:
        report["fp8"] = str(error)
    return report


def total_tflop(wanted: list[Product]) -> float:
    return sum(product.tflop * product.per_step for product in wanted)


def maker(cfg: Config, clock: Clock) -> Make:
    """What makes the calls of products in the compute dtype."""
    return partial(plain, device=clock.device, dtype=DTYPES[cfg.compute.dtype])


def timed(wanted: list[Product], make: Make, clock: Clock) -> dict:
    """Milliseconds and rates of products alone and of all together. Layers of equal sizes are timed once."""
    times: dict[Product, float] = {}
    rows = []
    for product in wanted:
        key = replace(product, layer="", per_step=1)
        if key not in times:
            times[key] = time_ms(make(product), clock)
        rows.append(asdict(product) | {"ms": times[key], "tflop_per_s": product.tflop / times[key] * 1e3})
    ms = sum(row["ms"] * row["per_step"] for row in rows)
    return {
        "ms": ms,
        "tflop_per_s": total_tflop(wanted) / ms * 1e3,
        "square_tflop_per_s": best_square(make, clock),
        "products": rows,
    }


def achieved(cfg: Config, samples_per_s: float, clock: Clock) -> dict[str, float]:
    """What a rank's rate is worth in 1e12 FLOP/s, beside that of the best square product in the compute dtype."""
    per_sample = flops_and_bytes.per_sample(cfg.model) / 1e12
    rate = per_sample * samples_per_s
    roof = best_square(maker(cfg, clock), clock)
    return {"per_sample": per_sample, "per_s_per_rank": rate, "ceiling_per_s": roof, "share_of_ceiling": rate / roof}


def best_square(make: Make, clock: Clock) -> float:
    """1e12 FLOP/s of the best square product."""
    squares = [Product("square", "square", size, size, size) for size in SQUARES[clock.device.type]]
    return max(square.tflop / time_ms(make(square), clock) * 1e3 for square in squares)


def measure(cfg: Config, world: World, args: Namespace) -> dict:
    clock = Clock(world.device)
    return {"ceilings": [ceiling(cfg, rows, clock) for rows in args.micro_batches]}


def main(argv: list[str]) -> int:
    parser = common.options("bench.ceiling", __doc__)
    parser.add_argument("--micro-batches", type=between(1, common.MOST), nargs="+", default=[8])
    return common.run(parser, argv, measure)


if __name__ == "__main__":
    cli.exit_now(cli.run("bench.ceiling", main, sys.argv[1:]))
