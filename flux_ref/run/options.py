"""Command lines: bad arguments and missing packages are refused in one line. Needs no torch."""

import argparse
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

from flux_ref.errors import Refusal
from flux_ref.formats.outside import decimal, shown, whole_number


class Options(argparse.ArgumentParser):
    """A parser whose help is a module's docstring. No option is abbreviated: it could be meant for the config."""

    def __init__(self, prog: str, description: str = "", **others):
        raw = argparse.RawDescriptionHelpFormatter
        super().__init__(prog, description=description, formatter_class=raw, allow_abbrev=False, **others)

    def parse_known_args(self, args=None, namespace=None):
        """Raises: Refusal. argparse of Python 3.11 drops a value that is two dashes."""
        if empty := next((word for word in args or () if word.endswith("=--")), None):
            self.error(f"{shown(empty)} gives no value")
        found, rest = super().parse_known_args(args, namespace)
        for action in self._actions:
            if action.option_strings and getattr(found, action.dest, None) == "" != action.default:
                self.error(f"{action.option_strings[-1]} gives no value")
        return found, rest

    def error(self, message: str) -> NoReturn:
        raise Refusal(f"{message}; see --help")


def between(least: float, most: float, kind: type = int) -> Callable[[str], float]:
    """The type of an option that takes a number from `least` to `most`."""

    def parse(text: str) -> float:
        value = whole_number(text, least, most) if kind is int else decimal(text, least, most)
        if value is None:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{shown(text)}: give {what} from {least} to {most}")
        return value

    return parse


STEP = between(0, 2**63 - 1)  # the type of an option that names a checkpoint


def listed(kind: Callable[[str], object] = str) -> Callable[[str], list]:
    """The type of an option that takes values between commas."""

    def parse(text: str) -> list:
        if not all(parts := text.split(",")):
            raise argparse.ArgumentTypeError(f"{text!r}: give values between commas, none of them empty")
        return [kind(part) for part in parts]

    return parse


def package(name: str, use: str) -> ModuleType:
    """A package that few commands need. use: what needs it. Raises: Refusal if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise Refusal(f"{use} needs {name}, which is not installed: pip install {name}") from None
