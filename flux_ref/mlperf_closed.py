"""What MLPerf's closed division fixes for FLUX.1, where a config or a log departs from it, and public runs' losses.

`Key.closed` in config.py names what fixes a key's default. The rules leave the rest to you: batch, learning rate,
warm-up, seed, layout on devices, checkpoints, pictures, and an evaluation before the first step.
Sources of the constants: training_rules.adoc of MLCommons training_policies; mlcommons/training, text_to_image.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flux_ref import schedule
from flux_ref.cli import one_line, shown
from flux_ref.config import CHECKER, KEYS, Config, EvalConfig, ModelConfig, Values, flat, micro_batch
from flux_ref.precision import policy
from flux_ref.precision.policy import DTYPE_NAMES

TRAIN_SAMPLES = 1_099_776  # of CC12M, as preprocessed by MLCommons
VAL_SAMPLES = 29_696  # of COCO 2014, each with a stored timestep
VAL_PRECISION = "lowest_numerical_precision_in_eval"  # of the linears in validation; a key of the log alone
# {key: the values that it may have}
FIXED: dict[str, tuple[Any, ...]] = {key: (known.default,) for key, known in KEYS.items() if known.closed}
FIXED |= {
    VAL_PRECISION: ("fp32", "bfloat16", "fp8"),  # rules, "Numerical formats": FP8 may validate, too
    "train_samples": (TRAIN_SAMPLES,),  # reference, "Data preprocessing"; here of the data set
    "val_samples": (VAL_SAMPLES,),  # reference, "Evaluation thoroughness"
}
# The official names of values that every log has and that no official checker judges.
OFFICIAL = {
    "eval.target": "target_accuracy",
    "train_samples": "train_samples",
    "val_samples": "eval_samples",
}
# Keys that have no official log entry: the log has them under our own names, and no official checker sees them.
OWN = [key for key in FIXED if key not in OFFICIAL and not (key in KEYS and KEYS[key].closed == CHECKER)]
REHEARSED = "rehearsal"  # a key of the log
REHEARSAL = "rehearsal: no benchmark result"
HEAD = {  # the official names of a run's values in their order; spec: the batch before evaluation_frequency
    "submission_benchmark": "benchmark",
    "submission_org": "mllog.submission_org",
    "submission_division": "mllog.submission_division",
    "submission_status": "mllog.submission_status",
    "submission_platform": "mllog.submission_platform",
    "seed": "train.seed",
    "target_accuracy": "eval.target",
    "global_batch_size": "train.global_batch",
    "gradient_accumulation_steps": "accumulation",
    "train_samples": "train_samples",
    "eval_samples": "val_samples",
    "evaluation_frequency": "interval",
    "opt_name": "optimizer",
    "opt_base_learning_rate": "optim.lr",
    "opt_learning_rate_warmup_steps": "optim.warmup_steps",
    "opt_adamw_beta_1": "optim.beta1",
    "opt_adamw_beta_2": "optim.beta2",
    "opt_adamw_epsilon": "optim.eps",
    "opt_adamw_weight_decay": "optim.weight_decay",
    "opt_gradient_clip_norm": "optim.clip_norm",
}


def find_departures(found: Values, rehearsal: bool) -> list[str]:
    """The departures among values of all keys in FIXED, in words; None is an unknown value.

    A rehearsal may have a smaller model and smaller data.
    """
    departures = []
    for key, allowed in FIXED.items():
        value = tuple(found[key]) if isinstance(found[key], list) else found[key]  # JSON has no tuples
        is_smaller = key.startswith("model.") or key in (
            "data.kind",
            "train_samples",
            "val_samples",
        )
        if value is not None and value not in allowed and not (rehearsal and is_smaller):
            departures.append(f"{key}={shown(value)}, MLPerf fixes {' or '.join(map(repr, allowed))}")
    return departures


def values(cfg: Config, sizes: Values) -> Values:
    """A config's values of all keys in FIXED, and others. sizes: {"train_samples", "val_samples"} of the data."""
    precision = policy.narrowest_format(cfg, "forward") if cfg.precision.eval else DTYPE_NAMES[cfg.compute.dtype]
    return flat(cfg) | sizes | {VAL_PRECISION: precision}


def departures(cfg: Config, sizes: Values) -> list[str]:
    """What disqualifies runs of a config before they start. sizes: {"train_samples", "val_samples"} of the data.

    In the open division only given weights do (rules, "Weight and Bias Initialization").
    """
    found = find_departures(values(cfg, sizes), cfg.mllog.rehearsal)
    is_closed = cfg.mllog.submission_division == "closed"
    return [text for text in found if is_closed or text.startswith("init.weights")]


def verdict(cfg: Config, sizes: Values) -> str:
    """Why a run is no benchmark result, in one line for the terminal; empty if it may be one.

    sizes: {"train_samples", "val_samples"} of the data.
    """
    found = departures(cfg, sizes)
    if found and cfg.data.kind == "toy":
        return "no benchmark result: the data set is a toy"
    if found:
        return f"no benchmark result: {one_line('; '.join(found), 300)}"  # the log has all
    return REHEARSAL if cfg.mllog.rehearsal else ""


def log_entries(cfg: Config, world_size: int, sizes: Values) -> dict[str, object]:
    """What the benchmark's log tells of a run before the clock starts, by key, in its order.

    sizes: {"train_samples", "val_samples"} of the data.
    """
    batch = cfg.train.global_batch
    micro = micro_batch(cfg, world_size)
    interval = cfg.eval.every_samples
    if cfg.mllog.ruleset == "6.1.0":  # spec: from 6.1.0 on, rounded up to whole steps
        interval = schedule.steps_for(interval, batch) * batch
    found = values(cfg, sizes) | {
        "benchmark": "flux1",
        "optimizer": "adamw",
        "interval": interval,
        "accumulation": batch // (world_size * micro),
    }
    entries = {name: found[key] for name, key in HEAD.items()}
    parallel = cfg.parallel
    # Precision and parallelism. Rules 5.1.0 and 6.0.0 do not need these lines; 6.1.0 does.
    entries |= {
        "lowest_numerical_precision_in_linear": policy.narrowest_format(cfg),
        "lowest_numerical_precision_in_attn": DTYPE_NAMES[cfg.compute.dtype],
        "lowest_numerical_precision_in_comm": "bfloat16"
        if "bf16" in (cfg.compute.dtype, parallel.reduce_dtype)
        else "fp32",
        **{f"{kind}_parallelism": 1 for kind in ("tensor", "pipeline", "context", "expert")},
        "micro_batch_size": micro,
        "config_filename": f"{cfg.name}.toml",
    }
    entries |= {key: found[key] for key in OWN}
    if cfg.mllog.rehearsal:
        entries[REHEARSED] = True
    return entries


# Published runs: the lowest, median and highest loss of the 160 result files of MLPerf Training v5.1
# (github.com/mlcommons/training_results_v5.1, Apache-2.0). Those runs validated with captions dropped, which raises a
# loss by about 0.001.

PUBLIC = Path(__file__).with_name("public_curves.csv")
# A run is above the band if two losses in a row exceed the highest by more than this share. One of 150 public runs is
# above the band of the other systems' runs.
MARGIN = 0.01


class Point(NamedTuple):
    """Validation losses of runs that converged, after so many training samples."""

    samples: float
    low: float
    median: float
    high: float


def load_public_curve(global_batch: int) -> list[Point]:
    """The public runs of a batch by ascending samples; empty for a batch that no system has submitted."""
    with PUBLIC.open() as file:
        rows = [row for row in csv.DictReader(file) if row["global_batch"] == str(global_batch)]
    return [Point(*(float(row[name]) for name in Point._fields)) for row in rows]


def is_benchmark(cfg: Config) -> bool:
    """Whether a config trains the model of the public runs to their target."""
    return cfg.model == ModelConfig() and cfg.eval.target == EvalConfig.target


def convergence_warning(cfg: Config, curve: Sequence[tuple[float, float]]) -> str:
    """One line if the last two of a run's (training samples, loss) lie above the band, else ""."""
    band = load_public_curve(cfg.train.global_batch) if cfg.eval.warn_above_public_runs and is_benchmark(cfg) else []
    if len(curve) < 2 or not band:
        return ""
    grid, _, _, high = zip(*band)
    for samples, loss in curve[-2:]:
        most = np.interp(samples, grid, high, left=np.inf)
        if loss <= (1 + MARGIN) * most:
            return ""
    return (
        f"warning: validation loss {loss:.4f}; public v5.1 runs of this batch had at most {most:.4f} here:"
        " check learning rate, warm-up, data and their scale"
    )
