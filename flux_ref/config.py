"""Every key of a run, with its unit and default.

config_file.py loads a config; config_rules.py says which values are refused. Nothing changes a config after loading.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    dir: str = ""  # the run's folder; empty: runs/<config name>
    overwrite: bool = False  # replace the run that the folder holds; it is deleted at the new run's first checkpoint
    resume: str = "auto"  # auto: continue an unfinished run in the folder; must: refuse if there is none; never
    hang_s: float = 600.0  # end the job after so many seconds without progress; 0: no watch, only the backend's timeout


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The defaults are FLUX.1-schnell at 256 x 256 pixels (Black Forest Labs flux, util.configs)."""

    hidden: int = 3072
    heads: int = 24
    double_blocks: int = 19
    single_blocks: int = 38
    mlp_ratio: int = 4
    rope_axes: tuple[int, ...] = (16, 56, 56)  # features of a head that RoPE turns by (0, row, column)
    rope_theta: int = 10_000
    text_tokens: int = 256
    t5_dim: int = 4096
    clip_dim: int = 768
    latent_channels: int = 16
    latent_height: int = 32  # rows of the latent, an eighth of the image's rows
    latent_width: int = 32

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


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    seed: int = 0  # of every random number in training and validation
    max_samples: int = 25_165_824  # stop here if the target is not reached; 96 evaluation intervals
    global_batch: int = 512  # samples per optimizer step over all ranks
    micro_batch: int = 0  # samples per forward on one rank, the rest is gradient accumulation; 0: no accumulation
    caption_drop: float = 0.1  # probability; spec: training only
    timestep: str = "uniform"  # distribution of the time t in training: uniform or logit_normal
    timestep_mean: float = 0.0  # logit_normal: mean of the logit of t; below 0: more times near the data, t = 0
    timestep_width: float = 1.0  # logit_normal: standard deviation of the logit of t
    timestep_shift: float = 1.0  # then t becomes shift t / (1 + (shift - 1) t); above 1: more times near the noise
    log_every_samples: int = 10_240
    synthetic_steps: int = 2  # warm-up steps on synthetic batches, before the clock; 0: none


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    weights: str = ""  # a run, a checkpoint, BFL's safetensors or diffusers' folder to start from; "": the seed


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    save: bool = True  # at the end, at the target and on Ctrl-C, SIGTERM or SIGUSR1; false: never
    every_samples: int = 0  # also every so many samples, rounded up to whole steps; 0: only at the moments above
    keep: int = 2  # keep the last so many checkpoints
    keep_every: int = 0  # also keep every n-th checkpoint of every_samples; 0: none


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW as the benchmark's closed division fixes it; lr and warmup_steps belong to the global batch."""

    lr: float = 2e-4  # peak, after warm-up
    warmup_steps: int = 1600  # linear
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # spec: on every parameter
    clip_norm: float = 1.0
    ema: int = 0  # half-life in samples of an average of the weights (eval.py --ema), 0: none


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every_samples: int = 262_144  # spec: rounded up to whole steps
    at_start: bool = False  # also before the first step
    target: float = 0.586  # spec: stop once the validation loss is at most this; 0: never
    batch: int = 32  # samples per forward on one rank
    noise: str = "fresh"  # fresh: new noise at each evaluation, as the reference; fixed: always the same
    band: bool = True  # warn if the loss lies above those of the public runs of this batch
    permuted_captions: bool = False  # at the end and in eval.py: also the loss with captions exchanged


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    kind: str = "embeddings"  # embeddings: existing shards; shapes: drawings that are made on first use
    train: str = "data/mlperf/train"  # folder of *.tar shards
    val: str = "data/mlperf/val"  # "": no validation set and no evaluations, with eval.target=0
    empty: str = ""  # folder of t5_empty.npy and clip_empty.npy; "": empty_encodings beside the folder data.train
    train_count: int = 0  # embeddings: required number of samples, 0: any; shapes: number of samples to make
    val_count: int = 0
    skip_bad: int = 0  # damaged training samples that may be skipped before the run stops
    workers: int = 4  # reading threads per rank
    prefetch: int = 2  # batches read ahead per rank
    evict: bool = True  # drop the data set from the page cache before the clock starts (in the log: cache_clear)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    replicate: int = 0  # number of full copies of the model: 1 is FSDP, n is HSDP, 0 is one copy per node
    region_blocks: int = 1  # blocks per FSDP unit and per compiled graph
    dtype: str = "bf16"  # of weights and activations in compute; master weights are always fp32
    reduce_dtype: str = "fp32"  # of the gradient reduction
    reshard_after_forward: bool = True  # free a region's gathered weights until its backward
    kept_regions: int = 0  # with reshard_after_forward: this number of last regions stays gathered even so
    compile: bool = False  # torch.compile of each region
    activation_budget: float = 1.0  # with compile: share of the activations that are kept for backward, 0 to 1
    recompute: str = "none"  # without compile: keep only the input of each "block" or "region" for backward
    forward_prefetch: int = 0  # gather so many regions ahead; 0: gather the next region while one computes
    backward_prefetch: int = 0  # the same in backward
    attention: str = "auto"  # kernel on a GPU: cudnn, flash, efficient, math; auto: the fastest


@dataclass(frozen=True, kw_only=True)
class GraphConfig:
    enabled: str = "auto"  # replay whole steps as captured graphs: on, off, auto (on NVIDIA devices)


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Number formats of the blocks' linears (docs/precision.md). Everything else computes in parallel.dtype."""

    preset: str = "bf16"  # bf16, fp8, fp8_delayed, mxfp8, under80, pareto_a, pareto_b, mxfp6_fp4, nvfp4
    rules: tuple[str, ...] = ()  # added to this preset: "LAYER PRODUCT: LEFT x RIGHT"; the last match decides
    switch: tuple[tuple[int, str], ...] = ()  # [[samples, preset], ...]: then another preset, without rules
    eval: bool = True  # true: validation and pictures use the formats of training, with dynamic scales; false: bf16
    native: bool = True  # blocks and rows take torch's kernels where it has them; false: emulate them everywhere
    gather: bool = True  # gather weights in FP8 where e4m3 is their side: half of their bytes, equal results
    history: int = 1024  # delayed sides: number of steps whose largest values are remembered
    algorithm: str = "max"  # delayed sides: the scale follows the "max" or the "most_recent" value of the history
    margin: int = 0  # delayed sides: powers of two left free above that value
    dynamic_steps: int = 16  # delayed sides: number of first steps that use dynamic scales


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    count: int = 0  # pictures drawn from stored captions at the end of a run and by eval.py
    every_samples: int = 0  # draw them also so often, on the clock, beside captured graphs too; 0: at the end only
    seed: int = 0  # of the noise from which pictures are drawn
    steps: int = 20  # Euler steps
    guidance: float = 1.0  # classifier-free guidance scale; 1: none
    vae: str = ""  # ae.safetensors or diffusers' vae/ that decodes latents; shapes need no file


@dataclass(frozen=True, kw_only=True)
class MllogConfig:
    ruleset: str = "6.1.0"
    submission_org: str = "flux_ref"
    submission_platform: str = "unknown"
    submission_division: str = "closed"
    submission_status: str = "onprem"
    rehearsal: bool = False  # a smaller model tries the closed rules; its log names no benchmark result


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "tiny"  # of the config file; not a key
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    init: InitConfig = InitConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    optim: OptimConfig = OptimConfig()
    eval: EvalConfig = EvalConfig()
    data: DataConfig = DataConfig()
    parallel: ParallelConfig = ParallelConfig()
    graph: GraphConfig = GraphConfig()
    precision: PrecisionConfig = PrecisionConfig()
    sample: SampleConfig = SampleConfig()
    mllog: MllogConfig = MllogConfig()


DTYPE_NAMES = {"bf16": "bfloat16", "fp32": "float32"}  # what torch calls each dtype
SECTIONS = {f.name: f.default for f in dataclasses.fields(Config) if f.name != "name"}
TYPES = {f"{section}.{f.name}": f.type for section, default in SECTIONS.items() for f in dataclasses.fields(default)}


def flat(cfg: Config) -> dict[str, object]:
    """The config as {"section.key": value}."""
    values = {}
    for section in SECTIONS:
        for name, value in vars(getattr(cfg, section)).items():
            values[f"{section}.{name}"] = value
    return values


def rank_batch(cfg: Config, world_size: int) -> int:
    """Samples per step on one rank."""
    return cfg.train.global_batch // world_size


def micro_batch(cfg: Config, world_size: int) -> int:
    """Samples per forward on one rank."""
    return cfg.train.micro_batch or rank_batch(cfg, world_size)


def run_dir(cfg: Config) -> Path:
    """The run's folder."""
    return Path(cfg.run.dir or f"runs/{cfg.name}")


def empty_dir(cfg: Config) -> Path:
    """The folder of the empty caption's encodings."""
    return Path(cfg.data.empty) if cfg.data.empty else Path(cfg.data.train).parent / "empty_encodings"
