"""A config from a TOML file and from `--section.key=value` overrides, and back; and which values are refused.

What a single key may be stands in config.py; here are the rules that tie keys to each other and to the ranks.
"""

import contextlib
import dataclasses
import difflib
import json
import textwrap
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_args

from flux_ref.config import KEYS, SECTIONS, Config, flat
from flux_ref.errors import Refusal, shown
from flux_ref.files import read_text

KINDS = {
    str: "a string of plain text",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    tuple[int, ...]: "a list of integers",
    tuple[str, ...]: "a list of strings",
    tuple[tuple[int, str], ...]: "a list of [integer, string]",
}


def load(path: str | Path, overrides: Collection[str] = ()) -> Config:
    """The config in a TOML file with `--section.key=value` overrides applied.

    Raises: Refusal, naming the key, the value, the rule and the remedy.
    """
    path = Path(path)
    try:
        tree = tomllib.loads(read_text(path, "config"))
    except ValueError as error:
        raise Refusal(f"config {path} is not valid TOML: {error}") from None
    values: dict[str, Any] = {}
    for section, part in tree.items():
        if isinstance(part, dict):
            values |= {f"{section}.{name}": value for name, value in part.items()}
        else:
            values[section] = part
    name = path.stem if path.stem != "config" else path.resolve().parent.name  # that of a run
    return from_flat(name, values | _parsed(overrides))


def override(cfg: Config, overrides: Collection[str]) -> Config:
    """A config with `--section.key=value` overrides applied. Raises: Refusal."""
    return from_flat(cfg.name, flat(cfg) | _parsed(overrides))


def replace(cfg: Config, **values: object) -> Config:
    """A checked copy with other values; keys are written section__key. Raises: Refusal."""
    return from_flat(cfg.name, flat(cfg) | {key.replace("__", "."): value for key, value in values.items()})


def from_flat(name: str, values: dict[str, Any]) -> Config:
    """The config that `flat` made, also after JSON. Keys that are left out have their defaults. Raises: Refusal."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, value in values.items():
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.7)
            near += [known for known in KEYS if known.endswith(f".{key.split('.')[-1]}")]
            raise Refusal(f"unknown key {key}; {f'did you mean {near[0]}?' if near else '--help lists all keys'}")
        kind = KEYS[key].type
        section, field = key.split(".")
        try:
            sections[section][field] = _typed(value, kind)
        except (TypeError, ValueError, OverflowError):
            raise Refusal(f"{key}={shown(value)} is not {KINDS[kind]}") from None
    parts = {section: dataclasses.replace(SECTIONS[section], **own) for section, own in sections.items()}
    cfg = Config(name=name, **parts)
    validate(cfg)
    return cfg


def _typed(value: Any, kind: Any) -> Any:
    """The value in its kind. An int may stand for a float and a list for a tuple, nothing else.

    Raises: TypeError, ValueError, OverflowError.
    """
    parts = get_args(kind)
    if parts and isinstance(value, (list, tuple)):
        kinds = parts[:1] * len(value) if parts[-1] is ... else parts
        return tuple(_typed(*pair) for pair in zip(value, kinds, strict=True))
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise TypeError
    if kind is str:
        value.encode()  # a byte of the command line that is not UTF-8 is a ValueError
    return value


def config_and_overrides(argv: list[str], default: str) -> tuple[str, list[str]]:
    """Split [FILE] [--section.key=value ...]."""
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    return default, argv


def _parsed(overrides: Collection[str]) -> dict[str, Any]:
    """The values of `--section.key=value` overrides; a string needs no quotes. Raises: Refusal."""
    values: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.removeprefix("--").partition("=")
        if not (text.startswith("--") and equals):
            form = "--section.key=value, as in --optim.lr=1e-4; a file or a folder comes first"
            raise Refusal(f"argument {text!r} is not of the form {form}")
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
    return repr(value) if type(value) is float else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


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
        lines.append(textwrap.fill(meaning, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


def validate(cfg: Config) -> None:
    """Rules that need no knowledge of the machine. Raises: Refusal."""
    for key, value in flat(cfg).items():
        if not KEYS[key].allows(value):
            raise Refusal(f"{key}={value} must be {KEYS[key].allowed}")
    model = cfg.model
    axes = model.rope_axes
    attention = cfg.parallel.attention
    rules = [
        (
            model.hidden % model.heads == 0,
            f"model.hidden={model.hidden} is not divisible by model.heads={model.heads}",
        ),
        (
            len(axes) == 3 and not any(axis % 2 or axis < 0 for axis in axes) and sum(axes) == model.head_dim,
            f"model.rope_axes={shown(axes)} must be three even numbers with the sum hidden / heads = {model.head_dim}",
        ),
        (
            model.latent_height % 2 == model.latent_width % 2 == 0,
            "model.latent_height and model.latent_width must be even: tokens are 2 x 2 patches",
        ),
        (
            attention not in ("cudnn", "flash") or cfg.parallel.dtype == "bf16",
            f"parallel.attention={attention} knows no fp32; set parallel.dtype=bf16 or attention=auto",
        ),
        (
            cfg.data.kind != "shapes" or (cfg.data.train_count and cfg.data.val_count),
            "data.kind=shapes makes the data set: set data.train_count and data.val_count above 0",
        ),
    ]
    for holds, words in rules:
        if not holds:
            raise Refusal(words)


def validate_world(cfg: Config, world_size: int) -> None:
    """Raises: Refusal if the ranks and their micro-batches do not divide the batch."""
    train = cfg.train
    chunk = world_size * (train.micro_batch or 1)
    if train.global_batch % chunk:
        micro = f" x train.micro_batch={train.micro_batch}" if train.micro_batch else ""
        rule = f"is not divisible by {world_size} ranks{micro}; use a multiple of {chunk}"
        raise Refusal(f"train.global_batch={train.global_batch} {rule}")
