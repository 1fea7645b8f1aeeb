"""Command lines: bad arguments are refused in one line. Needs no torch."""

import argparse
import math
from collections.abc import Callable
from typing import NoReturn

from flux_ref.errors import Refusal


class Options(argparse.ArgumentParser):
    """A parser whose help is a module's docstring. No option is abbreviated: it could be meant for the config."""

    def __init__(self, name: str, text: str):
        super().__init__(
            name, description=text, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
        )

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}; see --help")


def between(least: float, most: float, kind: type = int) -> Callable[[str], float]:
    """The type of an option that takes a number from `least` to `most`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r}: give {what} from {least} to {most}")
        return value

    return parse


def listed(kind: Callable[[str], object] = str) -> Callable[[str], list]:
    """The type of an option that takes values between commas."""
    return lambda text: [kind(part) for part in text.split(",")]
