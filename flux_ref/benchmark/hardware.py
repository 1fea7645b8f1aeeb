"""What is known of GPUs and links: hardware.toml, a file of own figures over it, and what a benchmark measured."""

import dataclasses
import difflib
import json
import math
import tomllib
from dataclasses import dataclass
from pathlib import Path

from flux_ref.errors import Refusal

TABLE = Path(__file__).with_name("hardware.toml")


@dataclass(frozen=True)
class Gpu:
    """One kind of card and how it is connected; hardware.toml explains the figures."""

    arch: str
    memory_gb: float
    memory_tb_s: float
    bf16_tflops: float
    fp8_tflops: float
    node: int
    domain: int
    scale_up_gb_s: float
    scale_out_gb_s: float
    host_gb_s: float


@dataclass(frozen=True)
class Assumed:
    """What no datasheet says."""

    gemm_share: float  # of the peak arithmetic
    memory_share: float  # of the memory's bandwidth
    link_share: float  # of a link's bandwidth
    hop_us: float
    margin: float
    outside_gb: float
    draws_per_s: float
    storage_gb_s: float


@dataclass(frozen=True)
class Calibration:
    """Compute times that were measured on the card, at one micro-batch."""

    source: str
    device: str
    micro_batch: int
    forward_s: float  # of a micro-batch, all blocks
    backward_s: float
    config: dict[str, object]  # flat, as the benchmark ran


def load(name: str, file: Path | None = None) -> tuple[Gpu, Assumed]:
    """A card of the table, overlaid with a file of own figures. Raises: Refusal."""
    tree = _read(TABLE)
    if file:
        own = _read(file)
        _refuse_unknown(own, ("assumed", "gpu"), file, "table")
        tree["assumed"] |= own.get("assumed", {})
        for gpu, figures in own.get("gpu", {}).items():
            if not isinstance(figures, dict):
                raise Refusal(f"gpu.{gpu} in {file} is not a table of figures; see {TABLE.name}")
            tree["gpu"][gpu] = tree["gpu"].get(gpu, {}) | figures
    _refuse_unknown([name], tree["gpu"], file or TABLE, "GPU")
    return _build(Gpu, tree["gpu"][name], f"gpu.{name}"), _build(Assumed, tree["assumed"], "assumed")


def of_device(device: str) -> Gpu | None:
    """The card of the table that a device names itself after, as "NVIDIA H200" does; None for any other."""
    known = [name for name in _read(TABLE)["gpu"] if name in device.lower()]
    return load(max(known, key=len))[0] if known else None


def _refuse_unknown(names, known, file: Path, what: str) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise Refusal(f"unknown {what} {name!r}; {hint}{file.name} knows {', '.join(known)}")


def _read(path: Path) -> dict:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(f"hardware file {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Refusal(f"hardware file {path} is not valid TOML: {error}") from None
    wrong = [name for name in ("assumed", "gpu") if not isinstance(tree.get(name, {}), dict)]
    if wrong:
        raise Refusal(f"{wrong[0]} in {path} is not a table; see {TABLE.name}")
    return tree


def _build(kind: type, figures: dict, where: str) -> object:
    types = {field.name: field.type for field in dataclasses.fields(kind)}
    _refuse_unknown(figures, types, Path(where), "key")
    for name, want in types.items():
        if name not in figures:
            raise Refusal(f"{where}.{name} is missing; a new GPU needs every key of {TABLE.name}")
        value = figures[name]
        if want is str:
            fits = isinstance(value, str)
        else:
            fits = type(value) in ((int, float) if want is float else (int,)) and 0 <= value < math.inf
            fits = fits and (value > 0 or name in ("fp8_tflops", "margin", "outside_gb", "hop_us"))
        if name.endswith("_share") and not (fits and 0.001 <= value <= 1):
            raise Refusal(f"{where}.{name}={value!r} is a share; give a number from 0.001 to 1")
        if not fits:
            raise Refusal(f"{where}.{name}={value!r} is not a positive {'text' if want is str else 'number'}")
    return kind(**figures)


def calibration(file: Path) -> list[Calibration]:
    """The runs of a report of bench.whole, alone or in one of bench.sweep. Raises: Refusal if there are none."""
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        reports = [run["report"] for run in report["runs"] if run.get("module") == "bench.whole" and "report" in run]
        reports = reports or [report]
        found = [
            _measured(f"{file.name}, commit {(part['commit'] or 'unknown')[:12]}", part["device"], part["config"], run)
            for part in reports
            for run in part["runs"]
            if "forward" in run and "failed" not in run
        ]
    except OSError as error:
        raise Refusal(f"--calibrate {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(
            f"--calibrate {file} is no report of bench.whole or bench.sweep ({type(error).__name__}: {error})"
        ) from None
    if not found:
        raise Refusal(f"--calibrate {file} holds no finished run of bench.whole; python -m bench.whole measures one")
    return found


def _measured(source: str, device: str, config: dict[str, object], run: dict) -> Calibration:
    """Raises: ValueError for figures that cannot have been measured; KeyError; TypeError."""
    rows, times = run["micro_batch"], (float(run["forward"]) / 1e3, float(run["backward"]) / 1e3)
    if type(rows) is not int or rows < 1 or not isinstance(config, dict):
        raise ValueError(f"micro_batch={rows!r}, config={config!r:.20}")
    if not all(0 < time < math.inf for time in times):
        raise ValueError(f"forward and backward take {times[0]:g} and {times[1]:g} s")
    return Calibration(source, device, rows, *times, config)
