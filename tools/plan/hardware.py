"""Figures of GPUs and links, from hardware.toml."""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flux_ref.errors import Refusal

TABLE = Path(__file__).with_name("hardware.toml")


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
