"""Captions in metadata.jsonl and metadata.csv: each row and each file is a sample or is rejected with a reason."""

import io
import json
import os
from pathlib import Path

from conftest import refusal
from PIL import Image

from flux_ref.errors import Refusal
from tools.prepare import raw_images


def put(folder: Path, texts: dict[str, str], pictures: tuple[str, ...] = ("a.png", "b.png", "sub/c.png")) -> Path:
    stream = io.BytesIO()
    Image.new("RGB", (64, 64)).save(stream, "PNG")
    for name in pictures:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(stream.getvalue())
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
    return folder


def outcome(folder: Path, column: str = "") -> list[tuple[str, str]]:
    """Name and caption, or why it is rejected, of each sample."""
    source, found = raw_images.source(str(folder), column), []
    for part in source.parts(source.files()):
        for candidate in part():
            sample = candidate.load(8, 8)
            assert sample.timestep is None
            found.append((sample.name, sample.rejected or f"= {sample.caption}"))
    return found


def test_each_row_and_each_file_is_a_sample_or_is_rejected_with_a_reason(tmp_path):
    rows = [
        '{"file_name": "sub/../sub/c.png", "text": " a cat\\n", "more": [1]}',
        '{"file_name": "b.png", "text": "a second\u2028line"}',
        '{"file_name": "b.png", "text": "a row more"}',
        '{"file_name": "absent.png", "text": "x"}',
        json.dumps({"file_name": str(tmp_path / "jsonl" / "a.png"), "text": "x"}),
        '{"file_name": "../jsonl/a.png", "text": "x"}',
        '{"file_name": ".hidden.png", "text": "x"}',
        '{"file_name": "note.pdf", "text": "x"}',
        "",
        '{"file_name": 3, "text": "x"}',
        "[1]",
        '{"file_name"',
        '{"text": "x"}',
        *(f'{{"file_name": "b.png"{text}}}' for text in ("", ', "text": ""', ', "text": ["x"]', ', "text": "\\ud83d"')),
    ]
    others = {"README.txt": "for people", "note.pdf": "", ".hidden.png": "", "metadata.jsonl": "\n".join(rows)}
    assert outcome(put(tmp_path / "jsonl", others)) == [
        ("sub/c.png", "= a cat"),
        ("b.png", "= a second\u2028line"),
        ("b.png", "= a row more"),
        ("absent.png", "not in the folder"),
        (str(tmp_path / "jsonl" / "a.png"), "not in the folder"),
        ("../jsonl/a.png", "not in the folder"),
        (".hidden.png", "not in the folder"),
        ("note.pdf", "unsupported type"),
        *((f"metadata.jsonl, row {row}", "unreadable row") for row in (9, 10, 11, 12)),
        *(("b.png", reason) for reason in ("no caption", "no caption", "unreadable caption", "unreadable caption")),
        ("a.png", "not in metadata.jsonl"),
    ]
    table = 'file_name,text,n\r\nb.png,"a cat, ""red""\nand blue",1\r\na.png,bare, comma,1\r\nsub/c.png\r\n'
    assert outcome(put(tmp_path / "csv", {"metadata.csv": table})) == [
        ("b.png", '= a cat, "red"\nand blue'),
        ("metadata.csv, row 2", "unreadable row"),
        ("sub/c.png", "no caption"),
        ("a.png", "not in metadata.csv"),
    ]


def test_another_column_may_hold_the_captions(tmp_path):
    folder = put(tmp_path, {"metadata.csv": "file_name,prompt\na.png,a cat\n"}, ("a.png",))
    assert outcome(folder, "prompt") == [("a.png", "= a cat")]
    assert "no column 'text', only 'file_name', 'prompt'; add it or give --caption-column" in refusal(outcome, folder)


def test_captions_in_two_places_or_in_none_are_refused(tmp_path):
    row = '{"file_name": "a.png", "text": "x"}\n'
    cases = {  # files, words of the refusal
        "two": ({"metadata.jsonl": row, "metadata.csv": "file_name,text\n"}, "metadata.csv both describe"),
        "beside": ({"metadata.jsonl": row, "a.txt": "x"}, "captions in metadata.jsonl and in a.txt"),
        "tars": ({"metadata.jsonl": row, "x.tar": ""}, "x.tar both describe"),
        "below": ({"train/metadata.jsonl": row}, "below/train"),
        "quote": ({"metadata.csv": 'file_name,text\na.png,"x\nb.png,y\n'}, "row after line 1: unexpected end"),
        "empty": ({"metadata.csv": ""}, "no column 'file_name', only none"),
        "semicolons": ({"metadata.csv": "file_name;text\na.png;x\n"}, "only 'file_name;text'"),
        "pipe": ({"metadata.csv": "|"}, "metadata.csv is not a regular file"),
        "latin": ({"metadata.jsonl": "\udc80"}, "is not UTF-8"),
    }
    wrong = []
    for name, (texts, words) in cases.items():
        folder = put(tmp_path / name, texts)
        if name == "pipe":
            (folder / "metadata.csv").unlink()
            os.mkfifo(folder / "metadata.csv")
        try:
            outcome(folder)
            wrong.append((name, "not refused"))
        except Refusal as error:
            wrong += [(name, str(error))] * (words not in str(error))
    assert wrong == []
    assert "has no metadata.jsonl or metadata.csv" in refusal(outcome, put(tmp_path / "no", {"a.txt": "x"}), "text")
