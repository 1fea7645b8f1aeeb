"""Ways to hurt files, texts and JSON, for all targets. A damage keeps its name and its draws: the corpus names both."""
# ruff: noqa: SIM905  (lists would take a line per entry)

import json
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random

from fuzz.engine import Damage

from flux_ref.formats import files

Change = Callable[[Path, Random], str]  # changes a file or folder, and says how
Edit = Callable[[bytes, Random], tuple[bytes, str]]  # from the content of a file to that after, and what was done

NUMBERS = (
    *"0 -1 1 2 9223372036854775807 9223372036854775808 -9223372036854775808 18446744073709551616 2147483648".split(),
    *"4294967296 65535 65536 999999999 1e999 -1e999 1e-999 NaN nan inf -inf Infinity 0x10 1_000 1.5 1e18 1e308".split(),
    *"-0 -0.0 +7 007 true null 1e5 0.1 1e-320 \u0663 \u00b2 \uff11\uff12 \u09ea".split(" "),
    *("9" * 30, "9" * 400, "1" + "0" * 4000, "9" * 5000, " 7", "7 ", ""),
)
TEXTS = (
    *"~ - -- * \\ ' \" ` %s %n%n {} {0.__class__} $HOME $(id) None null True auto NaN &amp; a,b a=b :: . .. /".split(),
    *"/dev/zero /dev/null /proc/self/mem /dev/stdin <script>alert(1)</script> {000000..999999999}".split(),
    *("", " ", "a\nb", "a\rb", "a\tb", "\x1b[2J", "\x07\x08\x7f", "\x9b2J", "\u2028\u2029", "\u202egpj"),
    *("\ufeff", "\ud800", "\U0001f600", "\u00e9", "\u00df", "\ufb01", "x" * 300, "x" * 5000, "../" * 50, "[1, 2"),
    *('{"a": 1}', "{0..9}" * 12, "{" + ",".join("ab" * 50) + "}", "[" * 3000, "(" * 500),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, 1.5, -0.0, 1e308, 1e-320, 5e17),
    *(float("nan"), float("inf"), -float("inf"), [], {}, [[]], [None], {"": None}, [0] * 1000, *TEXTS),
)
OPENINGS = ("[", '{"a":', "{a=", "(", "- ", "{a: ", "[{")
NESTS = tuple(opening * count for opening in OPENINGS for count in (50, 999, 200_000))
LINE_ENDS = ("\r", "\r\n", "\n\n", "\x0b", "\x0c", "\u2028", "")
INSERTS = (b"\0", b"\r", b"\n", b"\x1b[31m", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf")
KINDS = {"dead link": "nowhere", "link to itself": "", "/dev/zero": "/dev/zero", "/dev/stdin": "/dev/stdin"}  # links


def at(pattern: str, changes: dict[str, Change], prefix: str = "") -> dict[str, Damage]:
    """The damages by which each change hits one file or folder whose path matches a pattern such as "*.json"."""
    return {f"{prefix}{name}": partial(_hurt, pattern, change) for name, change in changes.items()}


def _hurt(pattern: str, change: Change, folder: Path, random: Random) -> str:
    path = random.choice(sorted(folder.rglob(pattern)))
    return f"{path.relative_to(folder)}: {change(path, random)}"


def edits(**changes: Edit) -> dict[str, Change]:
    return {name: partial(_edit, change) for name, change in changes.items()}


def _edit(change: Edit, path: Path, random: Random) -> str:
    if not path.is_file():
        return "stays"
    content, said = change(path.read_bytes(), random)
    path.write_bytes(content)
    return said


# Bytes


def flip(content: bytes, random: Random) -> tuple[bytes, str]:
    at = random.randrange(len(content))
    bit = random.randrange(8)
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :], f"bit {bit} of byte {at} flipped"


def splice(content: bytes, random: Random) -> tuple[bytes, str]:
    """Some bytes, perhaps none, become others: lost or cut off, noise, inserted, there twice."""
    at = random.choice((0, len(content), *(random.randrange(len(content)) for _ in range(4))))
    count = random.choice((0, 0, 1, 8, 512, len(content)))
    text = random.choice((b"", b"", random.randbytes(8), content[at : at + 17], content[:512], *INSERTS))
    return content[:at] + text + content[at + count :], f"{count} bytes at byte {at} become {text[:20]!a}"


def replaced(pattern: bytes, texts: tuple[str, ...]) -> Edit:
    """What matches a pattern becomes one of these texts, at one place."""

    def change(content: bytes, random: Random) -> tuple[bytes, str]:
        match = random.choice(list(re.finditer(pattern, content)) or [re.match(b"", content)])
        text = random.choice(texts)
        said = f"{match[0][:20]!a} at byte {match.start()} becomes {text[:30]!a} of {len(text)}"
        return content[: match.start()] + text.encode("utf-8", "surrogatepass") + content[match.end() :], said

    return change


def moved(begins: Callable[[bytes], list[int]]) -> Edit:
    """Parts of a file go, are there twice or change places. begins: where each part begins."""

    def change(content: bytes, random: Random) -> tuple[bytes, str]:
        places = [0, *begins(content), len(content)]
        parts, said = moved_parts([content[a:b] for a, b in pairwise(places)], random)
        return b"".join(parts), said

    return change


def moved_parts(parts: list, random: Random) -> tuple[list, str]:
    """Parts with one that is gone, twice, moved, or in the place of another."""
    one = random.randrange(len(parts))
    other = random.randrange(len(parts))
    how = random.choice(("gone", "twice", "moved", "replaces"))
    rest = [part for number, part in enumerate(parts) if number != one or how == "twice"]
    if how != "gone":
        rest[other : other + (how == "replaces")] = [parts[one]]
    return rest, f"part {one} {how}, with {other}"


def lines(content: bytes) -> list[int]:
    return [match.end() for match in re.finditer(b"\n", content)]


# Files


def gone(path: Path, random: Random) -> str:
    files.remove(path)
    return "gone"


def other_kind(path: Path, random: Random) -> str:
    """Something else than a file stands in its place."""
    kind = random.choice(("empty file", "folder", "pipe", "socket", "huge", *KINDS))
    files.remove(path)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, 0o140600)
    elif kind in KINDS:
        path.symlink_to(KINDS[kind] or path.name)
    else:
        path.touch()
        os.truncate(path, 2**40 if kind == "huge" else 0)  # a terabyte of zeros takes no disk
    return f"becomes {kind}"


def other_file(path: Path, random: Random) -> str:
    """The content is that of a file beside it, or of the same name in the other set, which lies in other/."""
    places = [*path.parent.iterdir(), *Path("other").rglob(path.name)]
    others = [place for place in sorted(places) if place.is_file() and place != path]
    if not others or not path.is_file():
        return "stays"
    other = random.choice(others)
    shutil.copyfile(other, path)
    return f"becomes a copy of {other.name} in {other.parent.name}"


# JSON


def tree(content: bytes, random: Random) -> tuple[bytes, str]:
    """A value of a JSON file, at any depth, becomes absurd, is missing, is there twice, or has another name."""
    text, said = tree_text(content.decode(), random)
    return text.encode(), said


def tree_line(content: bytes, random: Random) -> tuple[bytes, str]:
    """The same in a line of JSON; text may stand before it."""
    match = random.choice(list(re.finditer(rb"\{.*", content)))
    text, said = tree_text(match[0].decode(), random)
    return content[: match.start()] + text.encode() + content[match.end() :], f"JSON at byte {match.start()}, {said}"


def tree_text(text: str, random: Random) -> tuple[str, str]:
    root = json.loads(text)
    holder, key = random.choice(_spots(root))
    how = random.choice(("odd", "odd", "odd", "missing", "twice", "renamed"))
    new = random.choice(VALUES if how == "odd" else TEXTS)
    said = f"{ascii(key)[:40]} {how}: {ascii(new)[:30]}"
    if how == "odd":
        holder[key] = new
    elif how == "missing" or isinstance(holder, list):
        del holder[key]
    elif how == "renamed":
        holder[new] = holder.pop(key)
    else:  # the name of the second is made equal in the text
        holder["\ue000"] = new
        return json.dumps(root).replace('"\\ue000"', json.dumps(key)), said
    return json.dumps(root), said


def _spots(value: object) -> list[tuple]:
    """(holder, key) of every value in a tree."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in items] + [spot for _, inner in items for spot in _spots(inner)]


# What may happen to each kind of file

BYTES = edits(flip=flip, splice=splice) | {"gone": gone, "other_kind": other_kind, "other_file": other_file}
number = replaced(rb"(?<![\w.])-?\d+(\.\d+)?(e-?\d+)?(?![\w.])", NUMBERS)
word = replaced(rb"[A-Za-z_]{2,}", TEXTS)
depth = replaced(rb"(?<=[:=] )(?=\S)", NESTS)
TEXT = BYTES | edits(number=number, word=word, depth=depth, line_end=replaced(rb"\n", LINE_ENDS), line=moved(lines))
JSON = TEXT | edits(tree=tree)
JSON_LINES = TEXT | edits(tree_line=tree_line)
