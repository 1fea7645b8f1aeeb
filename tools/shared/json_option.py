"""What commands give with --json."""

import argparse
import contextlib
import json
import sys
from pathlib import Path

from flux_ref.files import write_whole

STDOUT = Path("-")


def json_option(parser: argparse.ArgumentParser) -> None:
    """Add --json, which prints the figures and sends text to stderr, and --json=FILE.json, which writes them, too."""
    words = "print the figures as JSON, the text to stderr; or write them to FILE.json"
    parser.add_argument("--json", nargs="?", const=STDOUT, type=_json_path, metavar="FILE.json", help=words)


def _json_path(text: str) -> Path:
    if not text.endswith(".json"):  # it would rather be an input, which must not be written over
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .json; put --json last or write --json=FILE.json")
    return Path(text)


def text_beside(to: Path | None) -> contextlib.AbstractContextManager:
    """Where text goes while `to`, the value of --json, may want stdout for itself."""
    return contextlib.redirect_stdout(sys.stderr if to == STDOUT else sys.stdout)


def give(figures: dict[str, object], to: Path | None) -> None:
    """Print the figures, write them whole or not at all, or neither, as `to`, the value of --json, asks.

    JSON has no number that is not finite; null stands for it.
    """
    known = json.loads(json.dumps(figures), parse_constant=lambda name: None)
    if to == STDOUT:
        print(json.dumps(known), flush=True)
    elif to:
        to.parent.mkdir(parents=True, exist_ok=True)
        write_whole(to, json.dumps(known, indent=2) + "\n")


def show(text: str, figures: dict[str, object], to: Path | None) -> None:
    """A command's whole answer, as text and as figures."""
    with text_beside(to):
        print(text)
    give(figures, to)
