"""What MLPerf's closed division fixes for FLUX.1, where a config or a log departs from it, and the head of the log.

`Key.closed` in config.py names what fixes a key's default. The rules leave the rest to you: batch, learning rate,
warm-up, seed, layout on devices, checkpoints, pictures, and an evaluation before the first step.
Sources of the constants: training_rules.adoc of MLCommons training_policies; mlcommons/training, text_to_image.
"""

from typing import Any

from flux_ref import schedule
from flux_ref.config import CHECKER, KEYS, Config, Values, flat, micro_batch
from flux_ref.errors import one_line, shown

TRAIN_SAMPLES = 1_099_776  # of CC12M, as preprocessed by MLCommons
VAL_SAMPLES = 29_696  # of COCO 2014, each with a stored timestep
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
    "train_samples": "data.train_count",
    "eval_samples": "data.val_count",
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


def judge(found: Values, rehearsal: bool) -> list[str]:
    """The departures among values of all keys in FIXED, in words; None is an unknown value.

    A rehearsal may have a smaller model and smaller data.
    """
    departures = []
    for key, allowed in FIXED.items():
        value = tuple(found[key]) if isinstance(found[key], list) else found[key]  # JSON has no tuples
        is_smaller = key.startswith("model.") or key in ("data.kind", "data.train_count", "data.val_count")
        if value is not None and value not in allowed and not (rehearsal and is_smaller):
            departures.append(f"{key}={shown(value)}, MLPerf fixes {' or '.join(map(repr, allowed))}")
    return departures


def narrowest(cfg: Config, *products: str) -> str:
    """The narrowest format in these products of the blocks' linears, as the log names it. No product: in all."""
    plain = DTYPE_NAMES[cfg.parallel.dtype]
    if cfg.precision.is_plain:
        return plain
    from flux_ref.precision import policy

    return policy.narrowest(cfg, *products) or plain


def values(cfg: Config, train_count: int, val_count: int) -> Values:
    """A config's values of all keys in FIXED, and others. train_count, val_count: samples in the data sets."""
    precision = narrowest(cfg, "forward") if cfg.precision.eval else DTYPE_NAMES[cfg.parallel.dtype]
    return flat(cfg) | {"data.train_count": train_count, "data.val_count": val_count, VAL_PRECISION: precision}


def departures(cfg: Config, train_count: int, val_count: int) -> list[str]:
    """What disqualifies runs of a config before they start. train_count, val_count: samples in the data sets.

    In the open division only given weights do (rules, "Weight and Bias Initialization").
    """
    found = judge(values(cfg, train_count, val_count), cfg.mllog.rehearsal)
    is_closed = cfg.mllog.submission_division == "closed"
    return [text for text in found if is_closed or text.startswith("init.weights")]


def verdict(cfg: Config, train_count: int, val_count: int) -> str:
    """Why a run is no benchmark result, in one line for the terminal; empty if it may be one.

    train_count, val_count: samples in the data sets.
    """
    found = departures(cfg, train_count, val_count)
    if found and cfg.data.kind == "toy":
        return "no benchmark result: the data set is a toy"
    if found:
        return f"no benchmark result: {one_line('; '.join(found), 300)}"  # the log has all
    return REHEARSAL if cfg.mllog.rehearsal else ""


def head(cfg: Config, world_size: int, train_count: int, val_count: int) -> dict[str, object]:
    """What the benchmark's log tells of a run before the clock starts, by key, in its order.

    train_count, val_count: samples in the data sets.
    """
    batch = cfg.train.global_batch
    micro = micro_batch(cfg, world_size)
    interval = cfg.eval.every_samples
    if cfg.mllog.ruleset == "6.1.0":  # spec: from 6.1.0 on, rounded up to whole steps
        interval = schedule.steps_for(interval, batch) * batch
    found = values(cfg, train_count, val_count) | {
        "benchmark": "flux1",
        "optimizer": "adamw",
        "interval": interval,
        "accumulation": batch // (world_size * micro),
    }
    entries = {name: found[key] for name, key in HEAD.items()}
    parallel = cfg.parallel
    # Precision and parallelism. Rules 5.1.0 and 6.0.0 do not need these lines; 6.1.0 does.
    entries |= {
        "lowest_numerical_precision_in_linear": narrowest(cfg),
        "lowest_numerical_precision_in_attn": DTYPE_NAMES[parallel.dtype],
        "lowest_numerical_precision_in_comm": "bfloat16"
        if "bf16" in (parallel.dtype, parallel.reduce_dtype)
        else "fp32",
        **{f"{kind}_parallelism": 1 for kind in ("tensor", "pipeline", "context", "expert")},
        "micro_batch_size": micro,
        "config_filename": f"{cfg.name}.toml",
    }
    entries |= {key: found[key] for key in OWN}
    if cfg.mllog.rehearsal:
        entries[REHEARSED] = True
    return entries
