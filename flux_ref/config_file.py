"""A config from a TOML file and from `--section.key=value` overrides, and back.

Unknown keys, wrong types and combinations that config_rules.py forbids are refused.
Nothing edits a config after `load`.
"""

import dataclasses
import difflib
import json
import math
import tomllib
from pathlib import Path

from flux_ref import config_rules
from flux_ref.config import SECTIONS, TYPES, Config, flat
from flux_ref.errors import Refusal


def load(path: str | Path, overrides: list[str] = ()) -> Config:
    """The config in a TOML file with `--section.key=value` overrides applied.

    Raises: Refusal, naming the key, the value, the rule and the remedy.
    """
    path = Path(path)
    name = path.stem if path.stem != "config" else path.resolve().parent.name
    return _build(name, _read(path) | _parse_all(overrides))


def of_run(folder: Path) -> Config:
    """The config that a run has written into its folder, every key of it. Raises: Refusal."""
    path = folder / "config.toml"
    if not path.is_file():
        raise Refusal(f"{folder} holds no run (no config.toml); give a run's folder, such as runs/tiny")
    lacks = TYPES.keys() - _read(path).keys()
    if lacks:
        raise Refusal(f"{path} lacks {len(lacks)} keys, such as {min(lacks)}; this version writes all into a run")
    return load(path)


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
        values[key] = _parse(key, value)
    return values


def dump(cfg: Config) -> str:
    """The whole config as TOML, one `section.key = value` per line; `load` gives the same config back."""
    return "".join(f"{key} = {_toml(value)}\n" for key, value in flat(cfg).items())


def from_flat(name: str, values: dict[str, object]) -> Config:
    """The config that `flat` made, also after JSON. Raises: Refusal."""
    for key in values:
        _check_key(key)
    return _build(name, values)


def replace(cfg: Config, **values: object) -> Config:
    """A checked copy with other values; keys are written section__key."""
    return from_flat(cfg.name, flat(cfg) | {key.replace("__", "."): value for key, value in values.items()})


def _read(path: Path) -> dict[str, object]:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal(f"config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # also bad UTF-8 and endless integers
        raise Refusal(f"config {path} is not valid TOML: {error}") from None
    values = {}
    for section, content in tree.items():
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


def _parse(key: str, text: str) -> object:
    """The value of a command-line override: TOML, except that strings need no quotes."""
    if key in SECTIONS:
        raise Refusal(f"--{key}={text}: {key} is a section; give a key, as in --{key}.{_first(key)}=...")
    if TYPES[key] is str:
        return text
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        parsed = {}
    if parsed.keys() != {"value"}:
        raise Refusal(f"{key}={text!r} is not {_describe(TYPES[key])}")
    return parsed["value"]


def _build(name: str, values: dict[str, object]) -> Config:
    sections = {section: {} for section in SECTIONS}
    for key, value in values.items():
        section, field_name = key.split(".")
        sections[section][field_name] = _typed(key, value)
    cfg = Config(name=name, **{s: dataclasses.replace(SECTIONS[s], **v) for s, v in sections.items()})
    config_rules.validate(cfg, flat(cfg))
    return cfg


def _typed(key: str, value: object) -> object:
    """The value in the key's own type; an int may stand for a float and a list for a tuple, nothing else."""
    want = TYPES[key]
    if want is float and type(value) is int:
        return float(value) if abs(value) < 2**63 else math.inf  # which validate refuses
    is_list = want in (tuple[int, ...], tuple[str, ...]) and isinstance(value, (list, tuple))
    if is_list and all(type(item) is want.__args__[0] for item in value):
        return tuple(value)
    if type(value) is want:
        return value
    raise Refusal(f"{key}={value!r} is not {_describe(want)}")


def _describe(kind: type) -> str:
    names = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
    return names.get(kind, "a list of " + ("integers" if kind == tuple[int, ...] else "strings"))


def _toml(value: object) -> str:
    return repr(value) if type(value) is float else json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
