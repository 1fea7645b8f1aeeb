"""Figures of GPUs and links: from hardware.toml, and from a file of your own."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from flux_ref import config_file
from flux_ref.errors import Refusal

TABLE = Path(__file__).with_name("hardware.toml")
OWN_RANGE = 0.1  # of shares of your own without a range
LIMITS = {"gemm_share": (0.001, 1), "memory_share": (0.001, 1), "link_share": (0.001, 1)}
LIMITS |= dict.fromkeys(("range", "fp8_tflops", "margin", "outside_gb", "hop_us"), (0, 1e12))


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


def load(name: str, file: Path | None = None, precision: str = "bf16") -> tuple[Gpu, Assumed]:
    """A card of the table, and what is assumed of it in a precision: bf16 or fp8. Raises: Refusal.

    file: figures of your own, which take the place of the table's. Its shares in `assumed` go before those in `share`.
    """
    known = dict(config_file.read(TABLE, "hardware file"))
    own = dict(config_file.read(file, "hardware file")) if file else {}
    for key in own:
        table, _, figure = key.rpartition(".")
        kind = {"gpu": Gpu, "assumed": Assumed}.get(key.split(".")[0])
        if key not in known and (kind is None or table == "gpu" or figure not in kind.__annotations__):
            raise config_file.unknown("key", key, known, f"a hardware file holds tables like those of {TABLE.name}")
    names = dict.fromkeys(key.split(".")[1] for key in known | own if key.startswith("gpu."))
    if name not in names:
        raise config_file.unknown("GPU", name, names, f"known are {', '.join(names)}")
    gpu = _build(Gpu, f"gpu.{name}", _table(known | own, f"gpu.{name}"))
    if precision == "fp8" and not gpu.fp8_tflops:
        raise Refusal(f"FP8 needs FP8 matrix units, {name} has none; set precision.preset=bf16")
    share = f"share.{gpu.arch}_{precision}"
    mine = _table(own, share) | _table(own, "assumed")
    if "gemm_share" in mine or "memory_share" in mine:
        mine = {"range": OWN_RANGE, "source": f"yours, {file.name}"} | mine
    return gpu, _build(Assumed, "assumed", _table(known, "assumed") | _table(known, share) | mine)


def _table(flat: dict[str, object], table: str) -> dict[str, object]:
    """The figures of one table."""
    return {key.rpartition(".")[2]: value for key, value in flat.items() if key.rpartition(".")[0] == table}


def _build(kind: type, table: str, figures: dict[str, object]) -> object:
    values = {}
    for field in dataclasses.fields(kind):
        if field.name not in figures:
            raise Refusal(f"{table}.{field.name} is missing; a new GPU needs every key of {TABLE.name}")
        value = config_file.typed(f"{table}.{field.name}", figures[field.name], field.type)
        least, most = LIMITS.get(field.name, (1e-6, 1e12))
        if field.type is not str and not least <= value <= most:
            raise Refusal(f"{table}.{field.name}={value!r} is not a number from {least:g} to {most:g}")
        values[field.name] = value
    return kind(**values)
