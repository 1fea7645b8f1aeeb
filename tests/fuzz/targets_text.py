"""Targets: configs, options, environment variables, logs, curves and tables, that is text."""

import tomllib
from pathlib import Path

from fuzz import damage
from fuzz.engine import Target

from flux_ref import config, config_file

ROOT = Path(__file__).parents[2]


def make_config(folder: Path) -> None:
    (folder / "one.toml").write_text(config_file.dump(config_file.load(ROOT / "tests" / "micro.toml")))


def run_config(folder: Path) -> dict[str, object]:
    return config.flat(config_file.load(folder / "one.toml"))


def read_config(folder: Path) -> dict[str, object]:
    """The config by tomllib alone, from the bytes; what it lacks has its default."""
    tree = tomllib.loads((folder / "one.toml").read_bytes().decode())
    given = {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}
    found = config.flat(config.Config()) | given
    return {key: _typed(value, config.TYPES[key]) for key, value in found.items()}


def _typed(value: object, kind: type) -> object:
    return float(value) if kind is float else tuple(value) if isinstance(value, list) else value


TARGETS = [
    Target("config", make_config, damage.of_text("one.toml"), run_config, read_config),
]
