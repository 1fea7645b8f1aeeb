"""What commands share: options that take numbers; reading JSON; figures as tables, and as JSON with --json."""

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from flux_ref.cli import Refusal
from flux_ref.files import json_object_or_empty, read_bytes, write_whole


def between(least: float, most: float, kind: type = int) -> Callable[[str], float]:
    """The type of an option that takes a number from `least` to `most`."""

    def number(text: str) -> float:
        value = kind(text)  # argparse refuses what this does not take
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value}: give a number from {least} to {most}")
        return value

    return number


def read_json(path: Path) -> dict:
    """The JSON object in a file. Raises: Refusal, OSError."""
    content = json_object_or_empty(read_bytes(path))
    if not content:
        raise Refusal(f"{path} holds no JSON object")
    return content


def json_option(parser: argparse.ArgumentParser) -> None:
    """Add --json=FILE."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON, too")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table. The first column is a name, the others are figures."""
    lines = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join([name.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]) for name, *rest in lines]


def show(text: str, figures: dict[str, object], to: Path | None) -> None:
    """Print a command's answer. Write its figures whole or not at all, if `to`, the value of --json, names a file.

    JSON has no number that is not finite; null stands for it.
    """
    print(text)
    if to:
        known = json.loads(json.dumps(figures), parse_constant=lambda name: None)
        to.parent.mkdir(parents=True, exist_ok=True)
        write_whole(to, json.dumps(known, indent=2) + "\n")
