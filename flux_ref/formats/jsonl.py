"""The records in a run's folder: metrics.jsonl and eval.jsonl, one JSON object a line, each with `samples`.

Also outcome.json, which says how the run ended.
"""

import json
import math
import zlib
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.formats import outside
from flux_ref.formats.files import write_whole

REACHED, ENDED = "target reached", "train.max_samples reached"  # `outcome` of a run that came to its end
FILES = ("metrics.jsonl", "eval.jsonl")
MOST = 1e100  # sums, squares and ratios of figures up to here are finite too


def records(path: Path, samples: float = math.inf, figures: tuple[str, ...] = ()) -> list[dict]:
    """The records of a .jsonl file up to `samples`; none if there is no file. figures: what else each must hold.

    A damaged line raises a Refusal. Text after the last newline does not: a killed run may have left half a line.
    """
    lines = _content(path).split(b"\n")
    kept = []
    for number, line in enumerate(lines, 1):
        record = parsed(line) or {}
        missing = [key for key in ("samples", *figures) if not is_number(record.get(key))]
        if not missing and record["samples"] >= 0:
            kept.append(record)
        elif number < len(lines):
            why = f"{missing[0]} is no finite number" if record and missing else "no record of a run"
            raise Refusal(f"{path} line {number} is damaged ({why}); mend it or set run.dir to another folder")
    return [record for record in kept if record["samples"] <= samples]


def is_number(value: object) -> bool:
    """Whether a value from JSON is a number within +-MOST."""
    return type(value) in (int, float) and -MOST < value < MOST


def json_object(path: Path) -> dict:
    """The JSON object in a file; {} if there is no file. Raises: Refusal."""
    content = parsed(outside.read_bytes(path, "file")) if path.exists() else {}
    if content is None:
        raise Refusal(f"{path} is damaged (no JSON object); mend it")
    return content


def parsed(text: str | bytes) -> dict | None:
    """A JSON object; None for anything else."""
    try:
        content = outside.parse_json(text)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def outcome(run: Path) -> str:
    """How a run ended, REACHED or ENDED; "" if it has not ended or was cut off. Raises: Refusal."""
    if not (run / "outcome.json").exists():
        return ""
    ending = json_object(run / "outcome.json").get("outcome")
    if ending not in (REACHED, ENDED):
        raise Refusal(f"{run}/outcome.json is damaged (its outcome is neither {REACHED!r} nor {ENDED!r}); mend it")
    return ending


def stamps(run: Path) -> dict[str, list[int]]:
    """Length in bytes and CRC-32 of a run's records so far, by file. A checkpoint holds them. Raises: Refusal."""
    contents = {name: _content(run / name) for name in FILES}
    return {name: [len(content), zlib.crc32(content)] for name, content in contents.items()}


def strangers(run: Path, stamps: dict[str, list[int]]) -> list[str]:
    """The files of records that do not begin as `stamps` of a checkpoint say. Raises: Refusal."""
    found = []
    for name, (size, checksum) in stamps.items():
        begin = _content(run / name)[:size]
        if [len(begin), zlib.crc32(begin)] != [size, checksum]:
            found.append(name)
    return found


def _content(path: Path) -> bytes:
    return outside.read_bytes(path, "records", outside.OWN_BYTES) if path.exists() else b""


def rewrite(path: Path, kept: list[dict]) -> None:
    """Write the file anew with these records, which cuts off what came after them."""
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
