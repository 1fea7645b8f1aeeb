"""What several subcommands take from their command line."""

import argparse

from flux_ref import config_file
from flux_ref.config import Config


def number(text: str) -> int:
    """A whole number above 0, for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def number_or_any(text: str) -> int:
    """A whole number above 0; 0 for "any"."""
    return 0 if text == "any" else number(text)


def config(path: str | None) -> Config:
    """The config of --config, or FLUX.1-schnell's. Raises: Refusal."""
    return config_file.load(path) if path else Config()
