"""The captions of a folder of pictures in one file, as Hugging Face's imagefolder has them.

metadata.jsonl holds one JSON object per line, metadata.csv a table with a head. The column file_name names a picture by
its path in the folder; another column, by default `text`, holds the caption. Each row is one sample.
"""

import csv
import io
import os
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.formats import jsonl, outside

NAMES = JSONL, CSV = "metadata.jsonl", "metadata.csv"
KEY = "file_name"
COLUMN = "text"
Entry = tuple[str, str, object]  # name of a sample, why it is rejected or "", its caption as it stands in the file


def entries(path: Path, column: str, files: list[str]) -> list[Entry]:
    """The rows in order, then the files that no row names. Raises: Refusal.

    column: that of the captions; "": COLUMN. files: their paths in the folder.
    """
    text = outside.read_text(path, "captions", outside.OWN_BYTES).removeprefix("\ufeff")  # Excel begins with one
    column = column or COLUMN
    rows = _of_json_lines(text) if path.name == JSONL else _of_csv(path, text)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    for absent in (KEY, column):
        if absent not in columns:
            found = ", ".join(map(outside.shown, columns[:20])) or "none"
            raise Refusal(f"{path} has no column {absent!r}, only {found}; add it or give --caption-column NAME")
    unlisted = dict.fromkeys(files)
    unlisted.pop(path.name, None)
    inside = set(files)
    listed = []
    for number, row in enumerate(rows, 1):
        given = row.get(KEY)
        if not given or not isinstance(given, str):
            listed.append((f"{path.name}, row {number}", "unreadable row", None))
            continue
        name = os.path.normpath(given)
        unlisted.pop(name, None)
        listed.append((name, "" if name in inside else "not in the folder", row.get(column)))
    return listed + [(name, f"not in {path.name}", None) for name in unlisted]


def _of_json_lines(text: str) -> list[dict]:
    return [jsonl.parsed(line) or {} for line in text.split("\n") if line.strip()]


def _of_csv(path: Path, text: str) -> list[dict]:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)  # strict: an open quote would swallow rows
    try:  # a caption with a bare comma has more fields than the head; csv puts them under None
        return [dict.fromkeys(reader.fieldnames) if None in row else row for row in reader]
    except csv.Error as error:
        raise Refusal(f"{path}, the row after line {reader.line_num}: {error}; mend this row") from None
