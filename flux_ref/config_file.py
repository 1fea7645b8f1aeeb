"""A config from a TOML file and from `--section.key=value` overrides, and back.

Unknown keys, wrong types and combinations that config_rules.py forbids are refused.
Nothing edits a config after `load`.
"""

import dataclasses
import json
from pathlib import Path

from flux_ref import config_rules
from flux_ref.config import SECTIONS, TYPES, Config, flat
from flux_ref.errors import Refusal
from flux_ref.formats import toml_file

EARLIER_PRESETS = {"mxfp4_backward": "under80"}
EARLIER = {  # keys whose values had other names in earlier versions
    "fp8.recipe": {"off": "bf16", "dynamic": "fp8", "delayed": "fp8_delayed"},
    "precision.preset": EARLIER_PRESETS,
    "precision.switch": EARLIER_PRESETS,
}
REMOVED = {  # keys of earlier versions, with the only value that is left
    "parallel.compile_cache": "",
    "parallel.separate_reduce_scatter": False,
    "parallel.reduce_buffers": 0,
    "parallel.sum_reduction": False,
    "parallel.symmetric_memory": False,
    "precision.max_scale_exponent": 44,
    "run.tensorboard": False,
    "sample.shift": False,
}


def load(path: str | Path, overrides: list[str] = ()) -> Config:
    """The config in a TOML file with `--section.key=value` overrides applied.

    Raises: Refusal, naming the key, the value, the rule and the remedy.
    """
    path = Path(path)
    name = path.stem if path.stem != "config" else path.resolve().parent.name
    if not name.strip("."):  # its run would lie in runs/ itself
        raise Refusal(f"config {path} has no name that a run's folder can have; rename the file")
    return _build(name, _read(path) | _parse_all(overrides))


def of_run(folder: Path) -> Config:
    """The config that a run has written into its folder. Raises: Refusal."""
    require_run(folder)
    return load(folder / "config.toml")


def require_run(folder: Path) -> None:
    """Raises: Refusal unless the folder holds a config.toml that a run wrote."""
    path = folder / "config.toml"
    if not path.is_file() or "run.dir" not in _read(path):
        raise Refusal(f"{folder} holds no run (no {path} that a run wrote); give a run's folder, such as runs/tiny")


def override(cfg: Config, overrides: list[str]) -> Config:
    """A config with `--section.key=value` overrides applied. Raises: Refusal."""
    return _build(cfg.name, flat(cfg) | _parse_all(overrides))


def _parse_all(overrides: list[str]) -> dict[str, object]:
    values = {}
    for text in overrides:
        key, eq, value = text.removeprefix("--").partition("=")
        if not text.startswith("--") or not eq:
            raise Refusal(f"argument {text!r} is not of the form --section.key=value, as in --optim.lr=1e-4")
        _check_key(key)
        values[key] = toml_file.parse(key, value, TYPES[key])
    return values


def dump(cfg: Config) -> str:
    """The whole config as TOML, one `section.key = value` per line; `load` gives the same config back."""
    return "".join(f"{key} = {_toml(value)}\n" for key, value in flat(cfg).items())


def from_flat(name: str, values: dict[str, object]) -> Config:
    """The config that `flat` made, also after JSON. Keys that were removed are left out. Raises: Refusal."""
    renamed = dict(_renamed(key, value) for key, value in values.items())
    return _build(name, {key: value for key, value in renamed.items() if key not in REMOVED})


def replace(cfg: Config, **values: object) -> Config:
    """A checked copy with other values; keys are written section__key."""
    return from_flat(cfg.name, flat(cfg) | {key.replace("__", "."): value for key, value in values.items()})


def _read(path: Path) -> dict[str, object]:
    values = {}
    for section, content in toml_file.read(path, "config").items():
        for name, value in (content if isinstance(content, dict) else {"": content}).items():
            key, value = _renamed(f"{section}.{name}".rstrip("."), value)
            if key in values:
                raise Refusal(f"config {path} gives {key} twice; keep one line of the two")
            if not _is_removed(key, value):
                values[key] = value
    return values


def _renamed(key: str, value: object) -> tuple[str, object]:
    """What a key of an earlier version and its value are today, so that old runs and checkpoints can be read."""
    value = _renamed_value(value, EARLIER.get(key, {}))
    if key == "fp8.recipe":
        key = "fp8.preset"
    return (f"precision.{key[4:]}" if key.startswith("fp8.") else key), value


def _renamed_value(value: object, names: dict[str, str]) -> object:
    """A value, or a list of any depth, with today's names."""
    if isinstance(value, (list, tuple)):
        return [_renamed_value(part, names) for part in value]
    return names.get(value, value) if isinstance(value, str) else value


def _is_removed(key: str, value: object) -> bool:
    """Whether a key of an earlier version says only what every run does today. Raises: Refusal if it says more."""
    if key not in REMOVED:
        return False
    if value != REMOVED[key]:
        raise Refusal(f"{key}={_toml(value)}: this key was removed, runs have {_toml(REMOVED[key])}; delete the key")
    return True


def _check_key(key: str) -> None:
    if key not in TYPES:
        keys = [name for name in TYPES if name.startswith(f"{key.split('.')[0]}.")] or SECTIONS
        if key in SECTIONS:
            raise Refusal(f"{key} is a section; give one of its keys, as in {keys[0]}")
        raise toml_file.unknown("key", key, TYPES, f"there are {', '.join(keys)}")


def _build(name: str, values: dict[str, object]) -> Config:
    sections = {section: {} for section in SECTIONS}
    for key, value in values.items():
        _check_key(key)
        section, field_name = key.split(".")
        sections[section][field_name] = toml_file.typed(key, value, TYPES[key])
    cfg = Config(name=name, **{s: dataclasses.replace(SECTIONS[s], **v) for s, v in sections.items()})
    config_rules.validate(cfg)
    return cfg


def _toml(value: object) -> str:
    if type(value) is float:
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
