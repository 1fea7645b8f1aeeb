"""A config from a TOML file and from `--section.key=value` overrides, and back; and which values are refused.

What a single key may be stands in config.py; here are the rules that tie keys to each other and to the ranks.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import textwrap
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

from flux_ref.cli import Refusal, printable, shown
from flux_ref.config import KEYS, Config, Values, flat, rank_batch
from flux_ref.files import read_text


def load(path: str | Path, overrides: Collection[str] = ()) -> Config:
    """The config in a TOML file with `--section.key=value` overrides applied.

    Raises: Refusal, naming the key, the value, the rule and the remedy.
    """
    path = Path(path)
    try:
        tree = tomllib.loads(read_text(path))
    except ValueError as error:
        raise Refusal(f"config {path} is not valid TOML: {error}") from None
    values: Values = {}
    for section, part in tree.items():
        if isinstance(part, dict):
            values |= {f"{section}.{name}": value for name, value in part.items()}
        else:
            values[section] = part
    return from_flat(printable(path.stem), values | parsed(overrides))


def replace(cfg: Config, **values: object) -> Config:
    """A checked copy with other values; keys are written section__key. Raises: Refusal."""
    return from_flat(cfg.name, flat(cfg) | {key.replace("__", "."): value for key, value in values.items()})


def from_flat(name: str, values: Values) -> Config:
    """The config that `flat` made, also after JSON. Keys that are left out have their defaults. Raises: Refusal."""
    cfg = Config(name)
    for key, value in values.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1)
            remedy = f"did you mean {near[0]}?" if near else "--help lists all keys"
            raise Refusal(f"unknown key {key}; {remedy}")
        known = KEYS[key]
        try:
            value = _typed(value, known.type)
        except (TypeError, ValueError):
            default = toml_text(known.default)
            raise Refusal(f"{key}={shown(value)} has the wrong type; default {default}: {known.meaning}") from None
        section, field = key.split(".")
        part = dataclasses.replace(getattr(cfg, section), **{field: value})
        cfg = dataclasses.replace(cfg, **{section: part})
    validate(cfg)
    return cfg


def _typed(value: Any, kind: Any) -> Any:
    """The value in its kind. An int may stand for a float and a list for a tuple. Raises: TypeError, ValueError."""
    parts = get_args(kind)
    if parts and isinstance(value, (list, tuple)):
        kinds = parts[:1] * len(value) if parts[-1] is ... else parts
        return tuple(_typed(*pair) for pair in zip(value, kinds, strict=True))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError
    return os.path.expanduser(value) if kind is str else value  # no shell does it in a file, nor after an equals sign


def config_and_overrides(argv: list[str], default: str) -> tuple[str, list[str]]:
    """Split [FILE] [--section.key=value ...]."""
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    return default, argv


def parsed(overrides: Collection[str]) -> Values:
    """The values of `--section.key=value` overrides by key; a string needs no quotes. Raises: Refusal."""
    values: Values = {}
    for text in overrides:
        key, equals, value = text.removeprefix("--").partition("=")
        if not (text.startswith("--") and equals):
            raise Refusal(f"argument {text!r} is not --section.key=value, as in --optim.lr=1e-4; a path comes first")
        values[key] = value
        if key in KEYS and KEYS[key].type is not str:
            with contextlib.suppress(ValueError):  # then the text is refused, as it is no string's key
                values[key] = tomllib.loads(f"value = {value}")["value"]
    return values


def dump(cfg: Config) -> str:
    """The whole config as TOML, one `section.key = value` per line; `load` gives the same config back."""
    return "".join(f"{key} = {toml_text(value)}\n" for key, value in flat(cfg).items())


def toml_text(value: object) -> str:
    """A value as TOML has it."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # which JSON leaves as it is


def key_list() -> str:
    """Every key of a config with its default, meaning and limits."""
    lines = [
        "",
        "Every key of a config, with its default. Give it as --section.key=value. A run may continue with another",
        "value of a key that is marked *.",
    ]
    for key, known in KEYS.items():
        lines.append(f"{'*' if known.resume else ' '} --{key}={toml_text(known.default)}")
        meaning = f"{known.meaning}; {known.allowed}".removesuffix("; ")
        lines.append(textwrap.indent(textwrap.fill(meaning, 104), " " * 6))
    return "\n".join(lines)


def validate(cfg: Config) -> None:
    """Rules that need no knowledge of the machine. Raises: Refusal."""
    for key, value in flat(cfg).items():
        if not KEYS[key].allows(value):
            raise Refusal(f"{key}={value} must be {KEYS[key].allowed}")
    model = cfg.model
    data = cfg.data
    axes = model.rope_axes
    rules = {
        f"model.hidden={model.hidden} is not divisible by model.heads={model.heads}": model.hidden % model.heads == 0,
        f"model.rope_axes={axes} must be three even numbers with the sum hidden / heads = {model.head_dim}": (
            len(axes) == 3 and not any(axis % 2 or axis < 0 for axis in axes) and sum(axes) == model.head_dim
        ),
        "model.latent_height and model.latent_width must be even: tokens are 2 x 2 patches": (
            model.latent_height % 2 == model.latent_width % 2 == 0
        ),
        "compute.attention=cudnn and flash know no fp32; set compute.dtype=bf16 or compute.attention=auto": (
            cfg.compute.attention not in ("cudnn", "flash") or cfg.compute.dtype == "bf16"
        ),
        "data.kind=toy makes a data set: give --data.pictures=DIR, a folder of captioned pictures, or set"
        " data.expected_train_samples and data.expected_val_samples above 0 for drawings": (
            data.kind != "toy" or data.pictures or (data.expected_train_samples and data.expected_val_samples)
        ),
        "data.pictures makes a data set of data.kind=toy; set data.kind=toy, or prepare the pictures as"
        " docs/own_pictures.md says": data.kind == "toy" or not data.pictures,
        "data.pictures makes a sample of each picture: set data.expected_train_samples and"
        " data.expected_val_samples to 0, or take configs/own_small.toml": not (
            data.pictures and (data.expected_train_samples or data.expected_val_samples)
        ),
    }
    for words, holds in rules.items():
        if not holds:
            raise Refusal(words)


def validate_world(cfg: Config, world_size: int) -> None:
    """Raises: Refusal if the ranks and their micro-batches do not divide the batch."""
    train = cfg.train
    accumulates = 0 < train.micro_batch < rank_batch(cfg, world_size)
    chunk = world_size * (train.micro_batch if accumulates else 1)
    if train.global_batch % chunk:
        rule = "the number of ranks times train.micro_batch" if accumulates else "the number of ranks"
        raise Refusal(f"train.global_batch={train.global_batch} is no multiple of {chunk}, {rule}")
