"""Figures of GPUs and links, from hardware.toml."""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import get_type_hints

from flux_ref import files
from flux_ref.cli import Refusal

TABLE = Path(__file__).with_name("hardware.toml")
SPREAD = 0.1  # of a step whose rates were measured: kernels of other shapes, overlap; assumed


@dataclass(frozen=True)
class Gpu:
    """One kind of card and its links; hardware.toml explains the figures."""

    arch: str
    memory_gb: float
    memory_tb_s: float
    bf16_tflops: float
    fp8_tflops: float
    node: int
    domain: int
    scale_up_gb_s: float
    scale_out_gb_s: float


@dataclass(frozen=True)
class Assumed:
    """Figures that no datasheet gives: the first four of an architecture and a precision, the others of all."""

    gemm_share: float  # of the peak arithmetic
    memory_share: float  # of the memory's bandwidth
    range: float  # times may be off by a factor of 1 + range
    source: str
    link_share: float  # of a link's bandwidth
    hop_us: float
    margin: float
    outside_gb: float
    graph_node_kb: float
    host_ms_per_region: float
    host_us_per_kernel: float


@cache
def load(name: str, precision: str = "bf16") -> tuple[Gpu, Assumed]:
    """A card of the table, and what is assumed of it in a precision: bf16 or fp8. Raises: Refusal."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    gpus = table["gpu"]
    if name not in gpus:
        raise Refusal(f"unknown GPU {name}; known are {', '.join(gpus)}")
    gpu = Gpu(**gpus[name])
    if precision == "fp8" and not gpu.fp8_tflops:
        raise Refusal(f"FP8 needs FP8 matrix units, {name} has none; set precision.preset=bf16")
    share = table["share"][f"{gpu.arch}_{precision}"]
    return gpu, Assumed(**share, **table["assumed"])


def measured(path: Path, gpus: int) -> tuple[Gpu, Assumed]:
    """The card of a file by `tools.preflight --json`, and what is still assumed. gpus: of the plan. Raises: Refusal."""
    rates = files.read_json(path, "measured rates")
    try:
        gpu = Gpu(*map(rates.__getitem__, get_type_hints(Gpu)))
    except KeyError as error:
        raise Refusal(f"{path} lacks the rate {error}; write it with tools.preflight --json") from None
    if (gpus > 1 and not gpu.scale_up_gb_s) or (gpus > gpu.node and not gpu.scale_out_gb_s):
        raise Refusal(f"{path} has no rate of the links that {gpus} GPUs use; run tools.preflight on more of them")
    _, assumed = load("h200")  # of all cards
    known = replace(assumed, gemm_share=1.0, memory_share=1.0, link_share=1.0, range=SPREAD, source=f"measured, {path}")
    return gpu, known
