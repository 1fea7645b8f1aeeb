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
REACHED, ENDED = "target reached", "train.max_samples reached"  # the outcomes of a run; one that broke off has none
MOST = 1e100  # sums, squares and ratios of figures up to here are finite, too


def records(path: Path, samples: float = math.inf, figures: tuple[str, ...] = ()) -> list[dict]:
    """The records of a .jsonl file up to `samples`; none if there is no file. figures: what else each must hold.

    Raises: Refusal for a damaged line, unless it is the last: a run that was killed may have left half a line.
    """
    if not path.exists():
        return []
    kept = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        record = _parsed(line) or {}
        lacks = [key for key in ("samples", *figures) if not is_number(record.get(key))]
        if not lacks and record["samples"] >= 0:
            kept.append(record)
        elif number < len(lines):
            why = f"{lacks[0]} is no finite number" if record and lacks else "no record of a run"
            raise Refusal(f"{path} line {number} is damaged ({why}); mend it or set run.dir to another folder")
    return [record for record in kept if record["samples"] <= samples]


def is_number(value: object) -> bool:
    """Whether a value out of JSON is a finite number that can be reckoned with."""
    return type(value) in (int, float) and -MOST < value < MOST


def json_object(path: Path) -> dict:
    """What a file holds; nothing if there is none. Raises: Refusal."""
    found = _parsed(path.read_bytes()) if path.exists() else {}
    if found is None:
        raise Refusal(f"{path} is damaged (no JSON object); mend it")
    return found


def _parsed(text: bytes) -> dict | None:
    """A JSON object; None for anything else."""
    try:
        found = json.loads(text.decode())
    except (ValueError, RecursionError):  # also bad UTF-8
        return None
    return found if isinstance(found, dict) else None


def outcome(run: Path) -> str:
    """How a run ended, REACHED or ENDED; "" for one that has not, or has broken off. Raises: Refusal."""
    path = run / "outcome.json"
    if not path.exists():
        return ""
    found = json_object(path).get("outcome")
    if found not in (REACHED, ENDED):
        raise Refusal(f"{path} is damaged (its outcome is neither {REACHED!r} nor {ENDED!r}); mend it")
    return found


def rewrite(path: Path, kept: list[dict]) -> None:
    """Cut off what came after these records."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_name(f".{path.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


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
