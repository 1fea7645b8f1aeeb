"""Compute times that bench.whole has measured, in place of shares of peak figures."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

from flux_ref import config
from flux_ref.config import Config
from flux_ref.errors import Refusal

ALIKE = ("parallel.compile", "parallel.activation_budget", "parallel.recompute", "parallel.dtype", "fp8.recipe")


@dataclass(frozen=True)
class Calibration:
    """Compute times of one micro-batch, measured on a card."""

    source: str
    device: str
    micro_batch: int
    forward_s: float  # of a micro-batch, all blocks
    backward_s: float
    config: dict[str, object]  # flat, as the benchmark ran


def load(file: Path) -> list[Calibration]:
    """The finished runs of bench.whole in its report, or in bench.sweep's. Raises: Refusal if there are none."""
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        parts = [run["report"] for run in report["runs"] if run.get("module") == "bench.whole" and "report" in run]
        runs = [_measured(file.name, part, run) for part in parts or [report] for run in part["runs"] if _done(run)]
    except OSError as error:
        raise Refusal(f"--calibrate {file}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise Refusal(f"--calibrate {file} is no report of bench.whole or bench.sweep ({reason})") from None
    if not runs:
        raise Refusal(f"--calibrate {file} holds no finished run of bench.whole; python -m bench.whole measures one")
    return runs


def nearest(cfg: Config, measured: list[Calibration], rows: int) -> Calibration:
    """The run of a like config with the nearest micro-batch. Raises: Refusal if no run is like the config."""
    values = json.loads(json.dumps(config.flat(cfg)))
    keys = (*ALIKE, *(key for key in values if key.startswith("model.")))
    alike = [run for run in measured if all(values[key] == run.config.get(key) for key in keys)]
    if not alike:
        first = measured[0]
        differ = [f"{key}={first.config.get(key)}" for key in keys if values[key] != first.config.get(key)]
        raise Refusal(
            f"no run in {first.source} is like this config: it has {', '.join(differ[:3])};"
            " measure it with python -m bench.whole --config CONFIG"
        )
    return min(alike, key=lambda run: abs(math.log(run.micro_batch / rows)))


def _done(run: dict) -> bool:
    return "forward" in run and "failed" not in run


def _measured(name: str, report: dict, run: dict) -> Calibration:
    """Raises: ValueError for figures that cannot have been measured; KeyError; TypeError."""
    rows, values = run["micro_batch"], report["config"]
    forward, backward = (float(run[part]) / 1e3 for part in ("forward", "backward"))
    if type(rows) is not int or rows < 1 or not isinstance(values, dict):
        raise ValueError(f"micro_batch={rows!r}, config={values!r:.20}")
    if not (0 < forward < math.inf and 0 < backward < math.inf):
        raise ValueError(f"forward and backward take {forward:g} and {backward:g} s")
    source = f"{name}, commit {(report['commit'] or 'unknown')[:12]}"
    return Calibration(source, report["device"], rows, forward, backward, values)
