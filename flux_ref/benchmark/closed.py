"""What MLPerf's closed division fixes for FLUX.1, and where a config or a log departs from it.

`Key.closed` in config.py names what fixes a key's default. The rules leave the rest to you: batch, learning rate,
warm-up, seed, layout on devices, checkpoints, pictures, and an evaluation before the first step.
"""

from typing import Any

from flux_ref import folders
from flux_ref.benchmark.facts import TRAIN_SAMPLES, VAL_SAMPLES
from flux_ref.config import CHECKER, KEYS, Config, flat
from flux_ref.errors import shown

DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "fp32"}  # in the log
VAL_PRECISION = "lowest_numerical_precision_in_eval"  # of the linears in validation; a key of the log alone
# {key: the values that it may have}
FIXED: dict[str, tuple[Any, ...]] = {key: (known.default,) for key, known in KEYS.items() if known.closed}
FIXED |= {
    VAL_PRECISION: ("fp32", "bfloat16", "fp8"),  # rules, "Numerical formats": FP8 may validate, too
    "data.train_count": (TRAIN_SAMPLES,),  # reference, "Data preprocessing"; here the number of samples that there are
    "data.val_count": (VAL_SAMPLES,),  # reference, "Evaluation thoroughness"
}
# The official names of values that every log has and that no official checker judges.
OFFICIAL = {"eval.target": "target_accuracy", "data.train_count": "train_samples", "data.val_count": "eval_samples"}
# Keys that have no official log entry: the log has them under our own names, and no official checker sees them.
OWN = [key for key in FIXED if key not in OFFICIAL and not (key in KEYS and KEYS[key].closed == CHECKER)]
REHEARSED, REHEARSAL = "rehearsal", "rehearsal: no benchmark result"  # key of the log; words
FEW = 4  # departures that are warned of one by one


def is_excused(key: str) -> bool:
    """Whether a rehearsal may have another value: its model and its data may be smaller."""
    return key.startswith("model.") or key in ("data.kind", "data.train_count", "data.val_count")


def judge(found: dict[str, Any], rehearsal: bool) -> list[str]:
    """The departures among values of all keys in FIXED, in words; None is an unknown value."""
    departures = []
    for key, allowed in FIXED.items():
        value = tuple(found[key]) if isinstance(found[key], list) else found[key]  # JSON has no tuples
        if value is not None and value not in allowed and not (rehearsal and is_excused(key)):
            departures.append(f"{key}={shown(value)}, the closed division fixes {' or '.join(map(repr, allowed))}")
    return departures


def values(cfg: Config, train_count: int, val_count: int) -> dict[str, Any]:
    """A config's values of all keys in FIXED, and others. train_count, val_count: samples in the data sets."""
    precision = (cfg.precision.eval and folders.narrowest(cfg, "forward")) or DTYPE_NAMES[cfg.parallel.dtype]
    return flat(cfg) | {"data.train_count": train_count, "data.val_count": val_count, VAL_PRECISION: precision}


def departures(cfg: Config, train_count: int, val_count: int) -> list[str]:
    """What disqualifies runs of a config before they start. train_count, val_count: samples in the data sets.

    In the open division only given weights do (rules, "Weight and Bias Initialization").
    """
    found = judge(values(cfg, train_count, val_count), cfg.mllog.rehearsal)
    if cfg.mllog.submission_division == "closed":
        return found
    return [text.replace("the closed", "the open") for text in found if text.startswith("init.weights")]


def warnings(cfg: Config, train_count: int, val_count: int) -> list[str]:
    """Lines for the terminal: a warning for each departure, but one calm line if there are many, as in a toy."""
    found = departures(cfg, train_count, val_count)
    if len(found) > FEW and not cfg.mllog.rehearsal:
        some = ", ".join(text.partition(", the")[0] for text in found[:2])
        words = f"{len(found)} settings differ from MLPerf's closed division ({some}, ...)"
        return [f"  rules   no benchmark result: {words}"]
    lines = [f"  rules   {REHEARSAL}"] if cfg.mllog.rehearsal else []
    return lines + [f"warning: no benchmark result: {one}" for one in found]
