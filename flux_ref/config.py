"""Every key of a run, declared once with all that is known of it.

The checks of config_file.py, `--help`, resuming, the guard of the closed division, docs/tables.md and the tests loop
over `KEYS`. A config is frozen; a copy with other values is checked like a new one.
"""

from dataclasses import dataclass, field, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

# What fixes a value in MLPerf's closed division for FLUX.1. RULES: mlcommons/training_policies, training_rules.adoc.
# REFERENCE: mlcommons/training, text_to_image, with torchtitan 9603aa83; what its code does is fixed even if it has no
# setting for it. CHECKER: mlperf-logging, closed_flux1.yaml, which reads this value in the log.
RULES = "rules"
REFERENCE = "reference"
CHECKER = "checker"
# Bounds of what would take minutes without a sign of life, and has no use
MOST_ROWS = 10**6  # of a batch; a data set holds about as many samples
MOST_STEPS = 1000  # that nobody sees
Shape = tuple[int, ...]
Shapes = dict[str, Shape]  # of tensors, by name
Values = dict[str, Any]  # by key


@dataclass(frozen=True, kw_only=True)
class Key:
    """What is known of a key. Numbers lie between `least` and `most`, both included, and are finite."""

    type: Any
    default: Any
    meaning: str  # with its unit, and what a special value means
    least: float = 0
    most: float = 1e18
    choices: tuple[str, ...] = ()
    resume: bool = False  # a run may go on with another value
    closed: str = ""  # what fixes the default in the closed division

    @property
    def allowed(self) -> str:
        """The values that are allowed, in words; "" for all of the type."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        return f"from {self.least} to {self.most}" if self.type in (int, float) else ""

    def allows(self, value: Any) -> bool:
        """Whether a value of the type is allowed."""
        if self.choices:
            return value in self.choices
        return not self.allowed or self.least <= value <= self.most


def key(default: Any, meaning: str, **facts: Any) -> Any:
    """A field of a section. facts: fields of `Key`."""
    return field(default=default, metadata={"meaning": meaning} | facts)


def free(default: Any, meaning: str, **facts: Any) -> Any:
    """A key that may have another value when a run goes on: no step that was trained would differ but by rounding."""
    return key(default, meaning, resume=True, **facts)


def size(default: int, meaning: str) -> Any:
    """A size of the model. A greater one than `most` fits no machine, and making it would take minutes."""
    return key(default, meaning, least=1, most=10_000_000, closed=REFERENCE)


@dataclass(frozen=True)
class RunConfig:
    dir: str = free("", "the run's folder; empty: runs/<config name>")
    start_fresh: bool = free(False, "begin anew: the run that the folder NAME holds is renamed to NAME.1 (.2, ...)")
    watchdog_s: float = free(600.0, "end the job after so many seconds without progress; 0: never")


@dataclass(frozen=True)
class ModelConfig:
    """The defaults are FLUX.1-schnell at 256 x 256 pixels (Black Forest Labs flux, util.configs)."""

    hidden: int = size(3072, "features of a token in the blocks")
    heads: int = size(24, "attention heads")
    double_blocks: int = size(19, "blocks with weights of their own for text and image")
    single_blocks: int = size(38, "blocks with the same weights for text and image")
    mlp_ratio: int = size(4, "width of a block's MLP in units of hidden")
    rope_axes: tuple[int, ...] = key(
        (16, 56, 56), "features of a head that RoPE turns by (0, row, column)", closed=REFERENCE
    )
    rope_theta: int = size(10_000, "base of RoPE's frequencies")
    text_tokens: int = size(256, "tokens of a caption, padding included")
    t5_dim: int = size(4096, "features of a token of T5")
    clip_dim: int = size(768, "features of CLIP's pooled vector")
    latent_channels: int = size(16, "channels of the latent")
    latent_height: int = size(32, "rows of the latent, an eighth of the image's rows")
    latent_width: int = size(32, "columns of the latent")

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        return (self.latent_channels, self.latent_height, self.latent_width)

    @property
    def image_tokens(self) -> int:
        return self.latent_height * self.latent_width // 4

    @property
    def packed_channels(self) -> int:
        return self.latent_channels * 4

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class InitConfig:
    weights: str = key(
        "",
        "a run, a checkpoint, BFL's safetensors or diffusers' folder to start from; empty: weights are drawn",
        closed=RULES,
    )


@dataclass(frozen=True)
class TrainConfig:
    seed: int = key(0, "seed of every random number in training and validation")
    max_samples: int = free(25_165_824, "stop here if the target is not reached; 96 evaluation intervals", least=1)
    global_batch: int = key(512, "samples per optimizer step over all ranks", least=1, most=MOST_ROWS)
    micro_batch: int = free(
        0, "most samples per forward on one rank, the rest is gradient accumulation; 0: no accumulation"
    )
    caption_drop: float = key(0.1, "probability that a training sample has the empty caption", most=1, closed=REFERENCE)
    timestep_sampling: str = key(
        "uniform", "distribution of the time t in training", choices=("uniform", "logit_normal"), closed=REFERENCE
    )
    logit_mean: float = key(
        0.0, "logit_normal: mean of the logit of t; below 0: more times near the data, t = 0", least=-16
    )
    logit_std: float = key(1.0, "logit_normal: standard deviation of the logit of t")
    timestep_shift: float = key(
        1.0,
        "then t becomes shift t / (1 + (shift - 1) t); above 1: more times near the noise",
        closed=REFERENCE,
    )
    log_every_samples: int = free(10_240, "samples from one record of the training loss to the next", least=1)
    synthetic_steps: int = free(2, "warm-up steps on synthetic batches, before the clock; 0: none", most=MOST_STEPS)


@dataclass(frozen=True)
class CheckpointConfig:
    save: bool = free(True, "save at the end, at the target and when a signal ends the run; false: never")
    every_samples: int = free(
        0, "save also every so many samples, rounded up to whole steps; 0: before each evaluation"
    )
    keep: int = free(2, "keep the last so many checkpoints", least=1)


@dataclass(frozen=True)
class OptimConfig:
    """AdamW. lr and warmup_steps belong to the global batch."""

    lr: float = key(2e-4, "learning rate after the warm-up")
    warmup_steps: int = key(1600, "steps of the linear warm-up")
    decay_end_step: int = key(0, "step at which lr has fallen linearly to a tenth; 0: it stays", closed=REFERENCE)
    beta1: float = key(0.9, "decay of the first moment", most=0.999999999, closed=CHECKER)
    beta2: float = key(0.95, "decay of the second moment", most=0.999999999, closed=CHECKER)
    eps: float = key(1e-8, "added to the root of the second moment, in fp32", least=1e-30, closed=CHECKER)
    weight_decay: float = key(0.1, "decay of every parameter per step, times lr", closed=CHECKER)
    clip_norm: float = key(1.0, "most that the norm of all gradients may be", least=1e-6, closed=CHECKER)
    ema_half_life: int = key(0, "half-life in samples of an average of the weights (eval.py --ema); 0: none")


@dataclass(frozen=True)
class EvalConfig:
    every_samples: int = key(
        262_144, "training samples from one evaluation to the next, rounded up to whole steps", least=1, closed=CHECKER
    )
    at_start: bool = key(False, "evaluate also before the first step")
    target: float = free(0.586, "stop once the validation loss is at most this; 0: never", closed=CHECKER)
    batch: int = free(32, "samples per forward on one rank", least=1, most=MOST_ROWS)
    noise: str = key(
        "fresh",
        "fresh: new noise at each evaluation, as the reference; fixed: always the same",
        choices=("fresh", "fixed"),
        closed=REFERENCE,
    )
    warn_above_public_runs: bool = free(True, "warn if the loss lies above those of the public runs of this batch")


@dataclass(frozen=True)
class DataConfig:
    kind: str = key(
        "embeddings",
        "embeddings: existing shards; toy: made on first use by stand-in encoders, of data.pictures, else of drawings",
        choices=("embeddings", "toy"),
        closed=RULES,
    )
    pictures: str = key("", "with data.kind=toy: folder of captioned pictures; empty: captioned drawings")
    train: str = free("data/mlperf/train", "folder of *.tar shards")
    val: str = free("data/mlperf/val", "folder of *.tar shards; empty: no evaluations")
    empty: str = free(
        "", "folder of t5_empty.npy and clip_empty.npy; empty: empty_encodings beside the folder data.train"
    )
    expected_train_samples: int = key(0, "required number of samples, 0: any; of drawings the number to make")
    expected_val_samples: int = key(0, "the same of validation samples")
    workers: int = free(4, "reading threads per rank", least=1, most=1024)
    prefetch: int = free(2, "batches read ahead per rank; 0: the training thread reads each itself", most=1024)
    drop_page_cache: bool = free(
        True, "drop the data set from the page cache before the clock starts (in the log: cache_clear)", closed=CHECKER
    )


@dataclass(frozen=True)
class ParallelConfig:
    replicate: int = free(0, "number of full copies of the model: 1 is FSDP, n is HSDP, 0 is one copy per node")
    region_blocks: int = free(1, "blocks per FSDP unit and per compiled graph", least=1)
    reduce_dtype: str = key("fp32", "dtype of the gradient reduction", choices=("bf16", "fp32"))
    kept_regions: int = free(0, "number of last regions whose weights stay gathered through a step; -1: all", least=-1)


@dataclass(frozen=True)
class ComputeConfig:
    dtype: str = key(
        "bf16", "dtype of weights and activations in compute; master weights are always fp32", choices=("bf16", "fp32")
    )
    compile: bool = free(False, "torch.compile of each region")
    activation_memory_budget: float = free(1.0, "with compile: share of activations that backward finds kept", most=1)
    activation_checkpointing: str = free(
        "none",
        "block keeps only the input of each block for backward",
        choices=("none", "block"),
    )
    attention: str = free(
        "auto", "kernel on a GPU; auto: the fastest", choices=("auto", "cudnn", "flash", "efficient", "math")
    )
    cuda_graphs: str = free(
        "auto", "replay whole steps as captured graphs; auto: on NVIDIA devices", choices=("auto", "on", "off")
    )


@dataclass(frozen=True)
class PrecisionConfig:
    """Number formats of the blocks' linears (docs/precision.md). Everything else computes in compute.dtype."""

    preset: str = key("bf16", "bf16, fp8, fp8_delayed, mxfp8, under80, mxfp6_fp4 or nvfp4")
    rules: tuple[str, ...] = key((), 'added to this preset: "LAYER PRODUCT: LEFT x RIGHT"; the last match decides')
    switch: tuple[tuple[int, str], ...] = key((), "[[samples, preset], ...]: then another preset, without rules")
    eval: bool = key(
        True, "true: validation and pictures use the formats of training, with dynamic scales; false: bf16"
    )
    native: bool = free(True, "blocks and rows take torch's kernels where it has them; false: emulate them everywhere")
    gather: bool = free(True, "gather e4m3 weights in FP8: half of their bytes, equal results; not with eval=false")
    history: int = key(
        1024, "delayed sides: number of steps whose largest values are remembered", least=1, most=MOST_ROWS
    )
    dynamic_steps: int = key(16, "delayed sides: number of first steps that use dynamic scales")

    @property
    def is_plain(self) -> bool:
        """Whether every block computes in compute.dtype, so that precision/ is not asked."""
        return self.preset == "bf16" and not self.rules and not self.switch


@dataclass(frozen=True)
class PicturesConfig:
    count: int = free(0, "pictures drawn from stored captions at the end of a run and by eval.py")
    every_samples: int = free(
        0, "draw them also so often, on the clock, beside captured graphs too; 0: at the end only"
    )
    seed: int = free(0, "seed of the noise from which pictures are drawn")
    steps: int = free(20, "Euler steps", least=1, most=MOST_STEPS)
    guidance: float = free(1.0, "classifier-free guidance scale; 1: none")
    vae: str = free("", "ae.safetensors or diffusers' vae/ that decodes latents; data.kind=toy needs none")


@dataclass(frozen=True)
class MllogConfig:
    ruleset: str = free("6.1.0", "rules that the benchmark's log follows", choices=("5.1.0", "6.0.0", "6.1.0"))
    submission_org: str = free("flux_ref", "who submits")
    submission_platform: str = free("unknown", "the system's name")
    submission_division: str = free("closed", "division of the benchmark", choices=("closed", "open"))
    submission_status: str = free("onprem", "availability of the system")
    rehearsal: bool = free(False, "a smaller model tries the closed rules; its log names no benchmark result")


@dataclass(frozen=True)
class Config:
    name: str = "tiny"  # of the config file; not a key
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    init: InitConfig = InitConfig()
    train: TrainConfig = TrainConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    compute: ComputeConfig = ComputeConfig()
    precision: PrecisionConfig = PrecisionConfig()
    pictures: PicturesConfig = PicturesConfig()
    mllog: MllogConfig = MllogConfig()


KEYS = {  # by "section.key"
    f"{section.name}.{own.name}": Key(type=own.type, default=own.default, **own.metadata)
    for section in fields(Config)[1:]
    for own in fields(getattr(Config, section.name))
}


def flat(cfg: Config) -> Values:
    """The config as {"section.key": value}."""
    return {key: attrgetter(key)(cfg) for key in KEYS}


def rank_batch(cfg: Config, world_size: int) -> int:
    """Samples per step on one rank."""
    return cfg.train.global_batch // world_size


def micro_batch(cfg: Config, world_size: int) -> int:
    """Samples per forward on one rank."""
    rows = rank_batch(cfg, world_size)
    return min(cfg.train.micro_batch or rows, rows)


def run_dir(cfg: Config) -> Path:
    """The run's folder."""
    return Path(cfg.run.dir or f"runs/{cfg.name}")


def empty_dir(cfg: Config) -> Path:
    """The folder of the empty caption's encodings."""
    return Path(cfg.data.empty) if cfg.data.empty else Path(cfg.data.train).parent / "empty_encodings"
