"""The values and combinations of keys that are refused.

Each refusal names the key, the value, the rule and the remedy.
"""

from flux_ref.config import DTYPE_NAMES, Config, ParallelConfig, flat, micro_batch
from flux_ref.errors import Refusal
from flux_ref.formats import toml_file
from flux_ref.formats.outside import shown
from flux_ref.speed import policy

CHOICES = {
    "run.resume": ("auto", "must", "never"),
    "train.timestep": ("uniform", "logit_normal"),
    "eval.noise": ("fresh", "fixed"),
    "data.kind": ("embeddings", "shapes"),
    "parallel.dtype": tuple(DTYPE_NAMES),
    "parallel.reduce_dtype": tuple(DTYPE_NAMES),
    "parallel.recompute": ("none", "block", "region"),
    "graph.enabled": ("auto", "on", "off"),
    "precision.algorithm": ("max", "most_recent"),
    "parallel.attention": ("auto", "cudnn", "flash", "efficient", "math"),
    "mllog.ruleset": ("5.1.0", "6.0.0", "6.1.0"),
    "mllog.submission_division": ("closed", "open"),
}
POSITIVE = (
    "model.hidden",
    "model.heads",
    "model.double_blocks",
    "model.single_blocks",
    "model.mlp_ratio",
    "model.rope_theta",
    "model.text_tokens",
    "model.t5_dim",
    "model.clip_dim",
    "model.latent_channels",
    "model.latent_height",
    "model.latent_width",
    "train.max_samples",
    "train.global_batch",
    "train.timestep_width",
    "train.timestep_shift",
    "train.log_every_samples",
    "optim.eps",
    "optim.clip_norm",
    "eval.every_samples",
    "eval.batch",
    "checkpoint.keep",
    "data.workers",
    "data.prefetch",
    "parallel.region_blocks",
    "precision.history",
    "sample.steps",
)
SIGNED = ("train.timestep_mean",)  # may be negative
# The most that a key, or a key of a section, may be: sizes are refused before anything is allocated or looped over.
MOST = {
    "run.hang_s": 10**6,
    "model": 2**24,
    "model.double_blocks": 256,
    "model.single_blocks": 256,
    "train.global_batch": 2**20,
    "train.micro_batch": 2**20,
    "train.caption_drop": 1,  # a probability
    "train.synthetic_steps": 10**6,
    "train.timestep_mean": 16,  # beyond, t is 0 or 1 up to rounding
    "train.timestep_width": 16,
    "train.timestep_shift": 1000,
    "eval.batch": 2**24,
    "data.workers": 256,
    "data.prefetch": 256,
    "parallel": 2**24,
    "parallel.activation_budget": 1,  # a share
    "precision": 2**24,
    "sample.count": 10**6,
    "sample.steps": 10**6,
    "sample.guidance": 10**6,
}
LEAST_EPS = 1e-30
MOST_ELEMENTS = 2**50  # of a step's largest tensor


def validate(cfg: Config) -> None:
    """Rules that need no knowledge of the machine. Raises: Refusal."""
    values = flat(cfg)
    for key, choices in CHOICES.items():
        if values[key] not in choices:
            raise Refusal(f"{key}={values[key]!r} is not one of {', '.join(choices)}")
    for key in POSITIVE:
        if values[key] <= 0:
            raise Refusal(f"{key}={values[key]} must be greater than 0")
    for key, value in values.items():
        most = MOST.get(key, MOST.get(key.split(".")[0], 2**63 - 1))
        least = -most if key in SIGNED else 0
        if isinstance(value, (int, float)) and not least <= value <= most:
            raise Refusal(f"{key}={value} must be a finite number from {least} to {most:,}")
        texts = "".join(leaf for leaf in toml_file.leaves(value) if isinstance(leaf, str))
        if any(c == "\0" or "\ud800" <= c <= "\udfff" for c in texts):
            raise Refusal(f"{key}={value!r} holds a null byte or is not UTF-8")
        if texts.startswith("~"):
            raise Refusal(f"{key}={value!r} begins with ~, which only a shell replaces; write the whole path")
    if cfg.optim.eps < LEAST_EPS:
        raise Refusal(f"optim.eps={cfg.optim.eps} vanishes in fp32, where AdamW divides by it; use {LEAST_EPS} or more")
    if max(cfg.optim.beta1, cfg.optim.beta2) >= 1:
        raise Refusal("optim.beta1 and optim.beta2 must be below 1")
    for key in ("train.timestep_mean", "train.timestep_width"):
        if cfg.train.timestep == "uniform" and values[key] != flat(Config())[key]:
            rule = "is of use only with train.timestep=logit_normal"
            raise Refusal(f"{key}={values[key]} {rule}; set that, or leave {key} out")
    _validate_model(cfg)
    _validate_parallel(cfg.parallel)
    _validate_precision(cfg)
    if cfg.checkpoint.keep_every and not cfg.checkpoint.every_samples:
        raise Refusal("checkpoint.keep_every counts the checkpoints of checkpoint.every_samples; set that above 0")
    if cfg.data.kind == "shapes" and not (cfg.data.train_count and cfg.data.val_count):
        raise Refusal("data.kind=shapes makes the data set: set data.train_count and data.val_count above 0")
    for key in ("eval.target", "eval.at_start", "eval.permuted_captions"):
        if values[key] and not cfg.data.val:
            value = str(values[key]).lower()
            raise Refusal(f"{key}={value} needs a validation set: set data.val, or {key} to 0 or false")
    if cfg.sample.every_samples and not cfg.sample.count:
        raise Refusal(f"sample.every_samples={cfg.sample.every_samples} draws no picture; set sample.count above 0")
    if cfg.data.kind == "shapes" and cfg.sample.vae:
        raise Refusal(f"sample.vae={cfg.sample.vae} decodes FLUX's latents; data.kind=shapes has its own codec")


def _validate_model(cfg: Config) -> None:
    model = cfg.model
    if model.hidden % model.heads:
        raise Refusal(f"model.hidden={model.hidden} is not divisible by model.heads={model.heads}")
    if len(model.rope_axes) != 3 or any(axis % 2 or axis < 0 for axis in model.rope_axes):
        raise Refusal(f"model.rope_axes={shown(list(model.rope_axes))} must be three even numbers")
    if sum(model.rope_axes) != model.head_dim:
        raise Refusal(f"model.rope_axes={list(model.rope_axes)} must add up to hidden / heads = {model.head_dim}")
    if model.latent_height % 2 or model.latent_width % 2:
        raise Refusal("model.latent_height and model.latent_width must be even: tokens are 2 x 2 patches")
    tokens = model.text_tokens + model.image_tokens
    wide = max(model.hidden * (3 + 2 * model.mlp_ratio), model.t5_dim, model.packed_channels, model.heads * tokens)
    rows = max(micro_batch(cfg, world_size=1), cfg.eval.batch)
    elements = max(rows * tokens, model.hidden, model.clip_dim) * wide
    if elements > MOST_ELEMENTS:
        raise Refusal(f"model.* and the batches give a tensor of {elements:.1e} elements; make them smaller")


def _validate_parallel(parallel: ParallelConfig) -> None:
    if parallel.activation_budget < 1 and not parallel.compile:
        budget = parallel.activation_budget
        raise Refusal(f"parallel.activation_budget={budget} needs parallel.compile=true, or set parallel.recompute")
    if parallel.attention in ("cudnn", "flash") and parallel.dtype == "fp32":
        raise Refusal(
            f"parallel.attention={parallel.attention} knows no fp32; set parallel.dtype=bf16 or attention=auto"
        )
    if parallel.recompute != "none" and parallel.compile:
        raise Refusal(f"parallel.recompute={parallel.recompute} needs parallel.compile=false, or set activation_budget")
    if parallel.kept_regions and not parallel.reshard_after_forward:
        raise Refusal(f"parallel.kept_regions={parallel.kept_regions} needs reshard_after_forward=true, or set it to 0")


def _validate_precision(cfg: Config) -> None:
    own = cfg.precision
    if own.margin > 8:
        raise Refusal(f"precision.margin={own.margin} leaves e4m3 too few binades; use 0 to 8")
    if policy.layers_gathered_in_fp8(cfg) and not own.eval:
        rule = "validates in bf16, but precision.gather=true gathers in FP8"
        raise Refusal(f"precision.eval=false {rule}; set precision.gather=false")


def validate_world(cfg: Config, world_size: int) -> None:
    """Rules that tie the config to the number of ranks. Raises: Refusal."""
    train = cfg.train
    chunk = world_size * max(1, train.micro_batch)
    if train.global_batch % chunk:
        low = train.global_batch // chunk * chunk
        usable = f"{low} or {low + chunk}" if low else f"{chunk}"
        micro = f" x train.micro_batch={train.micro_batch}" if train.micro_batch else ""
        raise Refusal(
            f"train.global_batch={train.global_batch} is not divisible by {world_size} ranks{micro}; use {usable}"
            f"{', or another micro_batch' if micro else ''}"
        )
    replicate = cfg.parallel.replicate
    if replicate and world_size % replicate:
        raise Refusal(f"parallel.replicate={replicate} does not divide the {world_size} ranks")
    policy.require_rows(cfg, micro_batch(cfg, world_size))
