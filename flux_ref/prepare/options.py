"""What several subcommands take from their command line and from packages that may be missing."""

import importlib
from types import ModuleType

from flux_ref import config_file
from flux_ref.config import Config
from flux_ref.errors import Refusal
from flux_ref.run.options import between

number = between(1, 10**9)


def number_or_any(text: str) -> int:
    """A whole number above 0; 0 for "any"."""
    return 0 if text == "any" else number(text)


def config(path: str | None) -> Config:
    """The config of --config, or FLUX.1-schnell's. Raises: Refusal."""
    return config_file.load(path) if path else Config()


def package(name: str, use: str) -> ModuleType:
    """A package that only one subcommand needs. use: what needs it. Raises: Refusal if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Refusal(f"{use} needs {name}, which is not installed: pip install {name}") from None
