"""Figures as JSON: what a run has written down, and what commands give with --json.

A run writes metrics.jsonl and eval.jsonl, one JSON object a line, each with `samples`.
"""

import argparse
import contextlib
import json
import math
import sys
from pathlib import Path

from flux_ref.errors import Refusal

STDOUT = Path("-")


def records(path: Path, samples: float = math.inf) -> list[dict]:
    """The records of a .jsonl file up to `samples`; none if there is no file.

    Raises: Refusal for a damaged line, unless it is the last: a run that was killed may have left half a line.
    """
    if not path.exists():
        return []
    kept = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if record["samples"] <= samples:
                kept.append(record)
        except (ValueError, KeyError, TypeError):
            if number < len(lines):
                raise Refusal(f"{path} line {number} is damaged; mend it or set run.dir to another folder") from None
    return kept


def rewrite(path: Path, kept: list[dict]) -> None:
    """Cut off what came after these records."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


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
