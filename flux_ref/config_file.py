"""A config from a TOML file and from `--section.key=value` overrides, and back; and which values are refused.

What a single key may be stands in config.py; here are the rules that tie keys to each other and to the ranks.
"""

import dataclasses
import difflib
import json
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator
from itertools import pairwise
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
    name = path.stem if path.stem != "config" else path.resolve().parent.name
    if not name.strip("."):  # its run would lie in runs/ itself
        raise Refusal(f"config {path} has no name that a run's folder can have; rename the file")
    return from_flat(name, dict(read(path, "config")) | _parse_all(overrides))


def of_run(folder: Path) -> Config:
    """The config that a run has written into its folder. Raises: Refusal."""
    require_run(folder)
    return load(folder / "config.toml")


def require_run(folder: Path) -> None:
    """Raises: Refusal unless the folder holds a config.toml that a run wrote."""
    path = folder / "config.toml"
    if not path.is_file() or "run.dir" not in dict(read(path, "config")):
        raise Refusal(f"{folder} holds no run (no {path} that a run wrote); give a run's folder, such as runs/tiny")


def override(cfg: Config, overrides: Collection[str]) -> Config:
    """A config with `--section.key=value` overrides applied. Raises: Refusal."""
    return from_flat(cfg.name, flat(cfg) | _parse_all(overrides))


def replace(cfg: Config, **values: object) -> Config:
    """A checked copy with other values; keys are written section__key. Raises: Refusal."""
    return from_flat(cfg.name, flat(cfg) | {key.replace("__", "."): value for key, value in values.items()})


def from_flat(name: str, values: dict[str, Any]) -> Config:
    """The config that `flat` made, also after JSON. Keys that are left out have their defaults. Raises: Refusal."""
    sections: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for key, value in values.items():
        _require_known(key)
        section, field_name = key.split(".")
        sections[section][field_name] = typed(key, value, KEYS[key].type)
    cfg = Config(name=name, **{s: dataclasses.replace(SECTIONS[s], **own) for s, own in sections.items()})
    validate(cfg)
    return cfg


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
        meaning = "; ".join(filter(None, (known.meaning, known.allowed)))
        lines.append(f"{'*' if known.resume else ' '} --{key}={toml_text(known.default)}")
        lines.append(textwrap.fill(meaning, 110, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return "\n".join(lines)


# TOML that people write


def read(path: Path, what: str) -> Iterator[tuple[str, Any]]:
    """Each (dotted key, value) of a TOML file. what: the file's kind, for the message. Raises: Refusal."""
    try:
        tree = tomllib.loads(read_text(path, what, most=2**20))
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{what} {path} is not valid TOML: {error}") from None
    return _leaves(tree, "")


def _leaves(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def config_and_overrides(argv: list[str], default: str) -> tuple[str, list[str]]:
    """Split [FILE] [--section.key=value ...]. Raises: Refusal for a word at another place."""
    before, late = next((pair for pair in pairwise(argv) if not pair[1].startswith("-")), ("", None))
    if re.fullmatch(r"--\w+\.\w+", before):
        raise Refusal(f"{before} {late}: a key and its value need an equals sign; write {before}={late}")
    if late is not None:
        raise Refusal(f"{late!r} is no option; the file or folder comes first, options are --section.key=value")
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    return default, argv


def _parse_all(overrides: Collection[str]) -> dict[str, Any]:
    """The values of `--section.key=value` overrides; a string needs no quotes. Raises: Refusal."""
    values: dict[str, Any] = {}
    for text in overrides:
        key, eq, value = text.removeprefix("--").partition("=")
        if not text.startswith("--") or not eq:
            raise Refusal(f"argument {text!r} is not of the form --section.key=value, as in --optim.lr=1e-4")
        _require_known(key)
        try:
            tree = {"value": value} if KEYS[key].type is str else tomllib.loads(f"value = {value}")
        except (ValueError, RecursionError):
            tree = {}
        if tree.keys() != {"value"}:
            raise Refusal(f"{key}={shown(value)} is not {KINDS[KEYS[key].type]}")
        values[key] = tree["value"]
    return values


def typed(key: str, value: object, kind: Any) -> Any:
    """The value in a key's type. An int may stand for a float and a list for a tuple, nothing else. Raises: Refusal."""
    try:
        return _typed(value, kind)
    except (TypeError, ValueError):
        raise Refusal(f"{key}={shown(value)} is not {KINDS[kind]}") from None


def _typed(value: Any, kind: Any) -> Any:
    """Raises: TypeError, ValueError."""
    if parts := get_args(kind):
        if not isinstance(value, (list, tuple)):
            raise TypeError
        parts = parts[:1] * len(value) if parts[-1] is ... else parts
        return tuple(map(_typed, value, parts)) if len(parts) == len(value) else _typed(None, str)
    if kind is float and type(value) is int:
        return float(f"{value}")  # infinite beyond fp64
    if type(value) is not kind or (kind is str and "\0" in value.encode().decode()):
        raise TypeError  # a byte of the command line that is not UTF-8 is a ValueError
    return value


def _require_known(key: str) -> None:
    if key in KEYS:
        return
    section, _, rest = key.partition(".")
    if rest in KEYS:
        raise Refusal(f"unknown key {key}: the table [{section}] takes in all lines below it; write {rest} above it")
    keys = [name for name in KEYS if name.startswith(f"{section}.")] or SECTIONS
    raise unknown("key", key, KEYS, f"there are {', '.join(keys)}")


def unknown(what: str, name: str, known: Collection[str], otherwise: str) -> Refusal:
    """The refusal of an unknown name, with the nearest known one. otherwise: the hint if no known name is near."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    near = near or [full for full in known if full.endswith("." + name.split(".")[-1])]
    return Refusal(f"unknown {what} {name}; {f'did you mean {near[0]}?' if near else otherwise}")


# Rules


def validate(cfg: Config) -> None:
    """Rules that need no knowledge of the machine. Raises: Refusal."""
    for key, value in flat(cfg).items():
        known = KEYS[key]
        is_number = known.type in (int, float)
        if (known.choices and value not in known.choices) or (is_number and not known.least <= value <= known.most):
            raise Refusal(f"{key}={value} must be {known.allowed}")
        if isinstance(value, str) and value.startswith("~"):
            raise Refusal(f"{key}={value!r} begins with ~, which only a shell replaces; write the whole path")
    model, parallel = cfg.model, cfg.parallel
    if model.hidden % model.heads:
        raise Refusal(f"model.hidden={model.hidden} is not divisible by model.heads={model.heads}")
    axes = model.rope_axes
    if len(axes) != 3 or any(axis % 2 or axis < 0 for axis in axes) or sum(axes) != model.head_dim:
        rule = f"must be three even numbers that add up to hidden / heads = {model.head_dim}"
        raise Refusal(f"model.rope_axes={shown(list(axes))} {rule}")
    if model.latent_height % 2 or model.latent_width % 2:
        raise Refusal("model.latent_height and model.latent_width must be even: tokens are 2 x 2 patches")
    if parallel.attention in ("cudnn", "flash") and parallel.dtype == "fp32":
        raise Refusal(
            f"parallel.attention={parallel.attention} knows no fp32; set parallel.dtype=bf16 or attention=auto"
        )
    if parallel.recompute != "none" and parallel.compile:
        raise Refusal(f"parallel.recompute={parallel.recompute} needs parallel.compile=false, or set activation_budget")
    if cfg.data.kind == "shapes" and not (cfg.data.train_count and cfg.data.val_count):
        raise Refusal("data.kind=shapes makes the data set: set data.train_count and data.val_count above 0")


def validate_world(cfg: Config, world_size: int) -> None:
    """Rules that tie the config to the number of ranks. Raises: Refusal."""
    train = cfg.train
    chunk = world_size * max(1, train.micro_batch)
    if train.global_batch % chunk:
        micro = f" x train.micro_batch={train.micro_batch}" if train.micro_batch else ""
        raise Refusal(
            f"train.global_batch={train.global_batch} is not divisible by {world_size} ranks{micro};"
            f" use a multiple of {chunk}{', or another micro_batch' if micro else ''}"
        )
    replicate = cfg.parallel.replicate
    if replicate and world_size % replicate:
        raise Refusal(f"parallel.replicate={replicate} does not divide the {world_size} ranks")
