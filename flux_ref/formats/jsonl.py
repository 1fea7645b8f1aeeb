"""Figures as JSON: what a run has written down, and what commands give with --json.

A run writes metrics.jsonl and eval.jsonl, one JSON object a line, each with `samples`.
"""

import json
import math
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.formats.files import write_whole

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
