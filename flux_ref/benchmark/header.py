"""The head of the benchmark's log: what runs, before the clock starts."""

from flux_ref import folders, schedule
from flux_ref.benchmark import closed
from flux_ref.config import Config, micro_batch


def entries(cfg: Config, world_size: int, train_count: int, val_count: int) -> dict[str, object]:
    """The entries by key, in their order. train_count, val_count: samples in the data sets."""
    micro = micro_batch(cfg, world_size)
    interval = cfg.eval.every_samples
    if cfg.mllog.ruleset == "6.1.0":  # spec: from 6.1.0 on, rounded up to whole steps
        interval = schedule.steps_for(interval, cfg.train.global_batch) * cfg.train.global_batch
    official = {
        "submission_benchmark": "flux1",
        "submission_org": cfg.mllog.submission_org,
        "submission_division": cfg.mllog.submission_division,
        "submission_status": cfg.mllog.submission_status,
        "submission_platform": cfg.mllog.submission_platform,
        "seed": cfg.train.seed,
        "target_accuracy": cfg.eval.target,
        "global_batch_size": cfg.train.global_batch,  # spec: before evaluation_frequency
        "gradient_accumulation_steps": cfg.train.global_batch // (world_size * micro),
        "train_samples": train_count,
        "eval_samples": val_count,
        "evaluation_frequency": interval,
        "opt_name": "adamw",
        "opt_base_learning_rate": cfg.optim.lr,
        "opt_learning_rate_warmup_steps": cfg.optim.warmup_steps,
        "opt_adamw_beta_1": cfg.optim.beta1,
        "opt_adamw_beta_2": cfg.optim.beta2,
        "opt_adamw_epsilon": cfg.optim.eps,
        "opt_adamw_weight_decay": cfg.optim.weight_decay,
        "opt_gradient_clip_norm": cfg.optim.clip_norm,
    }
    if cfg.mllog.ruleset != "5.1.0":  # precision and parallelism: optional in 6.0.0, required from 6.1.0 on
        compute = closed.DTYPE_NAMES[cfg.parallel.dtype]
        reduce = closed.DTYPE_NAMES[cfg.parallel.reduce_dtype]
        official |= {
            "lowest_numerical_precision_in_linear": folders.narrowest(cfg) or compute,
            "lowest_numerical_precision_in_attn": compute,
            "lowest_numerical_precision_in_comm": "bfloat16" if "bfloat16" in (compute, reduce) else "fp32",
            **{f"{kind}_parallelism": 1 for kind in ("tensor", "pipeline", "context", "expert")},
            "micro_batch_size": micro,
            "config_filename": f"{cfg.name}.toml",
        }
    values = closed.values(cfg, train_count, val_count)
    own = {key: values[key] for key in closed.OWN}
    return official | own | ({closed.REHEARSED: True} if cfg.mllog.rehearsal else {})
