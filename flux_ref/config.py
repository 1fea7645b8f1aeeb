"""Every knob of a run, with its unit and default; strict loading, overriding, checking and dumping.

A config is a TOML file that holds differences from the defaults below, then `--section.key=value` overrides.
Unknown keys, wrong types and impossible combinations are refused. Nothing edits a config after `load`.
"""

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.values import parse, toml, tree, typed


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    dir: str = ""  # the run's folder; empty: runs/<config name>
    overwrite: bool = False  # delete the run that the folder already holds
    resume: str = "auto"  # an unfinished run in the folder: auto: continue it; must: refuse if there is none; never
    hang_s: float = 600.0  # end the job if nothing moves for so long; 0: wait for ever


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The defaults are FLUX.1-schnell at 256 x 256 pixels (Black Forest Labs flux, util.configs)."""

    hidden: int = 3072
    heads: int = 24
    double_blocks: int = 19
    single_blocks: int = 38
    mlp_ratio: int = 4
    rope_axes: tuple[int, ...] = (16, 56, 56)  # features of a head that turn with (0, row, column)
    rope_theta: int = 10_000
    text_tokens: int = 256
    t5_dim: int = 4096
    clip_dim: int = 768
    latent_channels: int = 16
    latent_height: int = 32  # rows of the autoencoder's latent, an eighth of the image's
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
    seed: int = 0  # the run's only seed
    max_samples: int = 25_165_824  # stop here if the target is not reached; 96 evaluation intervals
    global_batch: int = 512  # samples per optimizer step over all ranks
    micro_batch: int = 0  # samples per forward on one rank, the rest is gradient accumulation; 0: no accumulation
    caption_drop: float = 0.1  # probability; spec: training only
    log_every_samples: int = 10_240
    synthetic_steps: int = 2  # warm-up steps on synthetic batches, before the clock; 0: none


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    weights: str = (
        ""  # start from these: a run, a checkpoint, BFL's safetensors or diffusers' folder; "": from the seed
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    save: bool = True  # also at the end, at the target and on SIGTERM or SIGUSR1; false: never
    every_samples: int = 0  # rounded up to whole steps; 0: only at those moments
    keep: int = 2  # the last so many
    keep_every: int = 0  # and of those due by every_samples every n-th; 0: none


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW as the benchmark's closed division fixes it; lr and warmup_steps belong to the global batch."""

    lr: float = 2e-4  # peak, after warm-up
    warmup_steps: int = 1600  # linear
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1  # on every parameter
    clip_norm: float = 1.0


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    every_samples: int = 262_144  # spec: rounded up to whole steps
    at_start: bool = False  # also before the first step
    target: float = 0.586  # stop once the validation loss is at most this; 0: never
    batch: int = 32  # samples per forward on one rank
    noise: str = "fresh"  # fresh: new noise at each evaluation, as the reference; fixed: always the same
    permuted_captions: bool = False  # in eval.py and at the end: also the loss with captions exchanged


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    kind: str = "embeddings"  # embeddings: shards that exist; shapes: drawings, made on first use
    train: str = "data/mlperf/train"  # folder of *.tar shards
    val: str = "data/mlperf/val"
    empty: str = ""  # folder of t5_empty.npy and clip_empty.npy; "": empty_encodings beside the folder data.train
    train_count: int = 0  # embeddings: samples that must be there, 0: any number; shapes: how many to make
    val_count: int = 0
    skip_bad: int = 0  # damaged training samples that may be skipped before the run stops
    workers: int = 4  # reading threads per rank
    prefetch: int = 2  # batches read ahead per rank
    evict: bool = False  # drop the data set from the page cache before the clock starts (logged as cache_clear)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    replicate: int = 0  # groups that each hold a full copy: 1 is FSDP, n is HSDP, 0 is one per node
    region_blocks: int = 1  # blocks per FSDP unit and per compiled graph
    dtype: str = "bf16"  # of weights and activations in compute; master weights are fp32
    reduce_dtype: str = "fp32"  # of the gradient reduction
    reshard_after_forward: bool = True  # free a region's gathered weights until its backward
    compile: bool = False  # torch.compile of each region


@dataclass(frozen=True, kw_only=True)
class Fp8Config:
    """FP8 in the linears of the blocks; everything else computes in parallel.dtype."""

    recipe: str = "off"  # dynamic: scales from the tensor itself; delayed: from the steps before; off: no FP8
    eval: bool = True  # also without gradients (validation, pictures), there always with dynamic scales
    history: int = 1024  # delayed: steps whose largest values are remembered
    algorithm: str = "max"  # delayed: the scale follows the largest of the history, or the most_recent
    margin: int = 0  # delayed: powers of two left free above it
    max_scale_exponent: int = 44  # a quantisation scale is at most 2 to this
    dynamic_steps: int = 16  # delayed: so many first steps of a run take dynamic scales


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    count: int = 0  # pictures drawn from stored captions at the end of a run and by eval.py
    captions: tuple[str, ...] = ()  # eval.py: draw these instead
    steps: int = 20  # Euler steps
    guidance: float = 1.0  # classifier-free guidance scale; 1: none
    vae: str = ""  # ae.safetensors that decodes the latents; "": a preview in false colours (shapes need none)
    shift: bool = False  # time shift by the number of image tokens (BFL: dev yes, schnell no)


@dataclass(frozen=True, kw_only=True)
class MllogConfig:
    ruleset: str = "6.0.0"
    submission_org: str = "flux_ref"
    submission_platform: str = "unknown"
    submission_division: str = "closed"
    submission_status: str = "onprem"


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
    fp8: Fp8Config = Fp8Config()
    sample: SampleConfig = SampleConfig()
    mllog: MllogConfig = MllogConfig()


SECTIONS = {f.name: f.default for f in dataclasses.fields(Config) if f.name != "name"}
TYPES = {f"{section}.{f.name}": f.type for section, default in SECTIONS.items() for f in dataclasses.fields(default)}
CHOICES = {
    "run.resume": ("auto", "must", "never"),
    "eval.noise": ("fresh", "fixed"),
    "data.kind": ("embeddings", "shapes"),
    "parallel.dtype": ("bf16", "fp32"),
    "parallel.reduce_dtype": ("bf16", "fp32"),
    "fp8.recipe": ("off", "dynamic", "delayed"),
    "fp8.algorithm": ("max", "most_recent"),
    "mllog.ruleset": ("5.1.0", "6.0.0", "6.1.0"),
    "mllog.submission_division": ("closed", "open"),
}
# What may differ when a run continues: no sample, weight or loss depends on it, but for rounding.
MAY_DIFFER = (
    *(key for key in TYPES if key.split(".")[0] in ("run", "checkpoint", "sample", "mllog")),
    *("train.micro_batch", "train.log_every_samples", "train.synthetic_steps", "eval.batch", "eval.permuted_captions"),
    *("data.train", "data.val", "data.empty", "data.skip_bad", "data.workers", "data.prefetch", "data.evict"),
    *("parallel.replicate", "parallel.region_blocks", "parallel.reshard_after_forward", "parallel.compile"),
)
POSITIVE = (
    *("model.hidden", "model.heads", "model.double_blocks", "model.single_blocks", "model.mlp_ratio"),
    *("model.rope_theta", "model.text_tokens", "model.t5_dim", "model.clip_dim"),
    *("model.latent_channels", "model.latent_height", "model.latent_width"),
    *("train.max_samples", "train.global_batch", "train.log_every_samples", "optim.eps", "optim.clip_norm"),
    *("eval.every_samples", "eval.batch", "checkpoint.keep", "data.workers", "data.prefetch"),
    *("parallel.region_blocks", "fp8.history", "sample.steps"),
)


def load(path: str | Path, overrides: list[str] = ()) -> Config:
    """The config in a TOML file with `--section.key=value` overrides applied.

    Raises: Refusal, naming the key, the value, the rule and the remedy.
    """
    path = Path(path)
    name = path.stem if path.stem != "config" else path.resolve().parent.name
    return _build(name, _read(path) | _parse_all(overrides))


def override(cfg: Config, overrides: list[str]) -> Config:
    """A config with `--section.key=value` overrides applied. Raises: Refusal."""
    return _build(cfg.name, flat(cfg) | _parse_all(overrides))


def _parse_all(overrides: list[str]) -> dict[str, object]:
    values = {}
    for text in overrides:
        key, eq, value = text.removeprefix("--").partition("=")
        if not text.startswith("--") or not eq:
            raise Refusal(f"argument {text!r} is not of the form --section.key=value")
        _check_key(key)
        if key in SECTIONS:
            raise Refusal(f"--{key}={value}: {key} is a section; give a key, as in --{key}.{_first(key)}=...")
        values[key] = parse(key, value, TYPES[key])
    return values


def dump(cfg: Config) -> str:
    """The whole config as TOML, one `section.key = value` per line; `load` gives the same config back."""
    return "".join(f"{key} = {toml(value)}\n" for key, value in flat(cfg).items())


def flat(cfg: Config) -> dict[str, object]:
    """The config as {"section.key": value}."""
    return {key: getattr(getattr(cfg, key.split(".")[0]), key.split(".")[1]) for key in TYPES}


def from_flat(name: str, values: dict[str, object]) -> Config:
    """The config that `flat` made, also after JSON. Raises: Refusal."""
    for key in values:
        _check_key(key)
    return _build(name, values)


def replace(cfg: Config, **values: object) -> Config:
    """A checked copy with other values; keys are written section__key."""
    return from_flat(cfg.name, flat(cfg) | {key.replace("__", "."): value for key, value in values.items()})


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
        if isinstance(value, (int, float)) and not (value >= 0 and value < 2**63):
            raise Refusal(f"{key}={value} must be a finite number that is not negative")
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str) and any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
                raise Refusal(f"{key}={text!r} holds a null byte or is not UTF-8")
    if not cfg.train.caption_drop <= 1:
        raise Refusal(f"train.caption_drop={cfg.train.caption_drop} is a probability; use a value from 0 to 1")
    if max(cfg.optim.beta1, cfg.optim.beta2) >= 1:
        raise Refusal("optim.beta1 and optim.beta2 must be below 1")
    _validate_model(cfg.model)
    _validate_fp8(cfg)
    if cfg.checkpoint.keep_every and not cfg.checkpoint.every_samples:
        raise Refusal("checkpoint.keep_every counts the checkpoints of checkpoint.every_samples; set that above 0")
    if cfg.data.kind == "shapes" and not (cfg.data.train_count and cfg.data.val_count):
        raise Refusal("data.kind=shapes makes the data set: set data.train_count and data.val_count above 0")
    if cfg.data.kind != "shapes" and cfg.sample.captions:
        raise Refusal(
            "sample.captions needs data.kind=shapes, whose encoders are here; sample.count draws stored captions"
        )
    if cfg.data.kind == "shapes" and cfg.sample.vae:
        raise Refusal(
            f"sample.vae={cfg.sample.vae} decodes FLUX's latents; those of data.kind=shapes have a codec of their own"
        )


def _validate_model(model: ModelConfig) -> None:
    if model.hidden % model.heads:
        raise Refusal(f"model.hidden={model.hidden} is not divisible by model.heads={model.heads}")
    if len(model.rope_axes) != 3 or any(axis % 2 or axis < 0 for axis in model.rope_axes):
        raise Refusal(f"model.rope_axes={list(model.rope_axes)} must be three even numbers")
    if sum(model.rope_axes) != model.head_dim:
        raise Refusal(f"model.rope_axes={list(model.rope_axes)} must add up to hidden / heads = {model.head_dim}")
    if model.latent_height % 2 or model.latent_width % 2:
        raise Refusal("model.latent_height and model.latent_width must be even: tokens are 2 x 2 patches")


def _validate_fp8(cfg: Config) -> None:
    """The widths of all converted linears are multiples of the hidden size."""
    fp8 = cfg.fp8
    if fp8.margin > 8:
        raise Refusal(f"fp8.margin={fp8.margin} leaves e4m3 too few binades; use 0 to 8")
    if fp8.max_scale_exponent > 126:
        raise Refusal(f"fp8.max_scale_exponent={fp8.max_scale_exponent} is beyond fp32; use at most 126")
    if fp8.recipe == "off":
        return
    if cfg.parallel.dtype != "bf16":
        raise Refusal(f"fp8.recipe={fp8.recipe} needs parallel.dtype=bf16, not {cfg.parallel.dtype}; set it so")
    if cfg.model.hidden % 16:
        raise Refusal(f"model.hidden={cfg.model.hidden} is not divisible by 16, as fp8.recipe={fp8.recipe} needs")


def validate_world(cfg: Config, world_size: int) -> None:
    """Rules that tie the config to the number of ranks. Raises: Refusal."""
    train, replicate = cfg.train, cfg.parallel.replicate
    chunk = world_size * max(1, train.micro_batch)
    if train.global_batch % chunk:
        low = train.global_batch // chunk * chunk
        usable = f"{low} or {low + chunk}" if low else f"{chunk}"
        micro = f" x train.micro_batch={train.micro_batch}" if train.micro_batch else ""
        raise Refusal(
            f"train.global_batch={train.global_batch} is not divisible by {world_size} ranks{micro}; use {usable}"
            f"{', or another micro_batch' if micro else ''}"
        )
    if replicate and world_size % replicate:
        raise Refusal(f"parallel.replicate={replicate} does not divide the {world_size} ranks")
    rows = micro_batch(cfg, world_size)
    if cfg.fp8.recipe != "off" and (rows * cfg.model.text_tokens % 16 or rows * cfg.model.image_tokens % 16):
        raise Refusal(
            f"fp8.recipe={cfg.fp8.recipe} needs text and image tokens divisible by 16 for the gradient of weights, but"
            f" a micro-batch of {rows} has {rows * cfg.model.text_tokens} and {rows * cfg.model.image_tokens};"
            " set train.micro_batch to another"
        )


def micro_batch(cfg: Config, world_size: int) -> int:
    """Samples per forward on one rank."""
    return cfg.train.micro_batch or cfg.train.global_batch // world_size


def run_dir(cfg: Config) -> Path:
    """The run's folder."""
    return Path(cfg.run.dir or f"runs/{cfg.name}")


def empty_dir(cfg: Config) -> Path:
    """The folder of the empty caption's encodings."""
    return Path(cfg.data.empty) if cfg.data.empty else Path(cfg.data.train).parent / "empty_encodings"


def _read(path: Path) -> dict[str, object]:
    values = {}
    for section, content in tree(path).items():
        if not isinstance(content, dict):
            _check_key(section)
            raise Refusal(f"{section} in {path} is a section; give its keys, as in {section}.{_first(section)}")
        for key, value in content.items():
            _check_key(f"{section}.{key}")
            values[f"{section}.{key}"] = value
    return values


def _first(section: str) -> str:
    return dataclasses.fields(SECTIONS[section])[0].name


def _check_key(key: str) -> None:
    if key in TYPES or key in SECTIONS:
        return
    near = difflib.get_close_matches(key, TYPES, n=1, cutoff=0.5)
    near = near or [full for full in TYPES if full.endswith("." + key.split(".")[-1])]
    hint = f"; did you mean {near[0]}?" if near else f"; sections are {', '.join(SECTIONS)}"
    raise Refusal(f"unknown key {key}{hint}")


def _build(name: str, values: dict[str, object]) -> Config:
    sections = {section: {} for section in SECTIONS}
    for key, value in values.items():
        section, field_name = key.split(".")
        sections[section][field_name] = typed(key, value, TYPES[key])
    cfg = Config(name=name, **{s: dataclasses.replace(SECTIONS[s], **v) for s, v in sections.items()})
    validate(cfg)
    return cfg
