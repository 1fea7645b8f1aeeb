"""What a run has written down: metrics.jsonl and eval.jsonl, one JSON object a line, each with `samples`."""

import json
import math
from pathlib import Path

from flux_ref.errors import Refusal


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
