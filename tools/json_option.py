"""What commands give with --json."""

import argparse
import json
from pathlib import Path

from flux_ref.files import write_whole


def json_option(parser: argparse.ArgumentParser) -> None:
    """Add --json=FILE."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON, too")


def show(text: str, figures: dict[str, object], to: Path | None) -> None:
    """Print a command's answer. Write its figures whole or not at all, if `to`, the value of --json, names a file.

    JSON has no number that is not finite; null stands for it.
    """
    print(text)
    if to:
        known = json.loads(json.dumps(figures), parse_constant=lambda name: None)
        to.parent.mkdir(parents=True, exist_ok=True)
        write_whole(to, json.dumps(known, indent=2) + "\n")
