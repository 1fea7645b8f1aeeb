"""Figures of GPUs and links: from hardware.toml, and from a file of your own."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.formats import toml_file

TABLE = Path(__file__).with_name("hardware.toml")
KINDS = ("assumed", "gpu", "share")
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
    known = _tables(TABLE)
    own = _tables(file) if file else {}
    for table in own:
        if table.startswith("share.") and table not in known:
            raise toml_file.unknown("table", table, known, "put the shares of a new architecture into assumed")
    tables = {table: known.get(table, {}) | own.get(table, {}) for table in known | own}
    names = _names(tables)
    if name not in names:
        raise toml_file.unknown("GPU", name, names, f"known are {', '.join(names)}")
    gpu = _build(Gpu, f"gpu.{name}", tables[f"gpu.{name}"])
    if precision == "fp8" and not gpu.fp8_tflops:
        raise Refusal(f"FP8 needs FP8 matrix units, {name} has none; set precision.preset=bf16")
    share = f"share.{gpu.arch}_{precision}"
    mine = own.get(share, {}) | own.get("assumed", {})
    if "gemm_share" in mine or "memory_share" in mine:
        mine = {"range": OWN_RANGE, "source": f"yours, {file.name}"} | mine
    return gpu, _build(Assumed, "assumed", tables["assumed"] | tables.get(share, {}) | mine)


def _names(tables: dict[str, dict]) -> list[str]:
    return [table.removeprefix("gpu.") for table in tables if table.startswith("gpu.")]


def _tables(path: Path) -> dict[str, dict[str, object]]:
    """{"assumed", "gpu.NAME" and "share.ARCH_PRECISION": their figures} of a hardware file. Raises: Refusal."""
    tables = {}
    for name, content in toml_file.read(path, "hardware file").items():
        if name not in KINDS:
            raise toml_file.unknown("table", name, KINDS, f"known are {', '.join(KINDS)}")
        if name == "assumed" or not isinstance(content, dict):
            tables[name] = content
        else:
            tables |= {f"{name}.{one}": figures for one, figures in content.items()}
    for table, figures in tables.items():
        if not isinstance(figures, dict):
            raise Refusal(f"{table} in {path} is not a table of figures; see {TABLE.name}")
    return tables


def _build(kind: type, table: str, figures: dict[str, object]) -> object:
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    for key in figures:
        if key not in types:
            raise toml_file.unknown(f"key in {table}:", key, types, f"known are {', '.join(types)}")
    values = {}
    for key, key_type in types.items():
        if key not in figures:
            raise Refusal(f"{table}.{key} is missing; a new GPU needs every key of {TABLE.name}")
        value = toml_file.typed(f"{table}.{key}", figures[key], key_type)
        least, most = LIMITS.get(key, (1e-6, 1e12))
        if key_type is not str and not least <= value <= most:
            raise Refusal(f"{table}.{key}={value!r} is not a number from {least:g} to {most:g}")
        values[key] = value
    return kind(**values)
