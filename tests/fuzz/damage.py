"""Ways to hurt files, texts and JSON, for all targets. A damage keeps its name and its draws: the corpus names both."""
# ruff: noqa: SIM905  (lists would take a line per entry)

import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from fuzz.engine import Damage

Change = Callable[[Path, Random], str]  # changes a file or folder, and says how


@dataclass(frozen=True)
class OfContent:
    """The change of a file by what becomes of its content: from it, the content after, and what was done."""

    change: Callable[[bytes, Random], tuple[bytes, str]]

    def __call__(self, path: Path, random: Random) -> str:
        content, said = self.change(path.read_bytes(), random)
        path.write_bytes(content)
        return said


NUMBERS = (
    *"0 -1 1 2 9223372036854775807 9223372036854775808 -9223372036854775808 18446744073709551616 2147483648".split(),
    *"4294967296 65535 65536 999999999 1e999 -1e999 1e-999 NaN nan inf -inf Infinity 0x10 1_000 1.5 1e18 1e308".split(),
    *"-0 -0.0 +7 007 true null 1e5 0.1 1e-320 \u0663 \u00b2 \uff11\uff12 \u09ea".split(" "),
    *("9" * 30, "9" * 400, "1" + "0" * 4000, "9" * 5000, " 7", "7 ", ""),
)
TEXTS = (
    *"~ - -- * \\ ' \" ` %s %n%n {} {0.__class__} $HOME $(id) None null True auto NaN &amp; a,b a=b :: . .. /".split(),
    *"/dev/zero /dev/null /proc/self/mem /dev/stdin <script>alert(1)</script> {000000..999999999}".split(),
    *("", " ", "a\nb", "a\rb", "a\tb", "\x1b[2J\x1b[31m", "\x07\x08\x7f", "\x9b2J", "\u2028\u2029", "\u202egpj"),
    *("\ufeff", "\ud800", "\U0001f600", "\u00e9", "\u00df", "\ufb01", "x" * 300, "x" * 5000, "../" * 50, "[1, 2"),
    *('{"a": 1}', "{0..9}" * 12, "{" + ",".join("ab" * 50) + "}", "[" * 3000, "(" * 500),
)
VALUES = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63 - 1, 2**63, -(2**63), 2**64, 10**400, 1.5, -0.0, 1e308, 1e-320, 5e17),
    *(float("nan"), float("inf"), -float("inf"), [], {}, [[]], [None], {"": None}, [0] * 1000, *TEXTS),
)


def at(pattern: str, changes: dict[str, Change], prefix: str = "") -> dict[str, Damage]:
    """The damages by which each change hits one file or folder whose path matches a pattern such as "*.json"."""
    return {f"{prefix}{name}": partial(_hurt, pattern, change) for name, change in changes.items()}


def _hurt(pattern: str, change: Change, folder: Path, random: Random) -> str:
    paths = sorted(folder.rglob(pattern))
    if isinstance(change, OfContent):
        paths = [path for path in paths if path.is_file()]
    path = random.choice(paths)
    return f"{path.relative_to(folder)}: {change(path, random)}"


def by_name(*changes: Callable) -> dict[str, Callable]:
    return {change.__name__: change for change in changes}


def of_content(*changes: Callable) -> dict[str, OfContent]:
    return {change.__name__: OfContent(change) for change in changes}


# Bytes


def cut(content: bytes, random: Random) -> tuple[bytes, str]:
    at = random.randrange(len(content) + 1)
    return content[:at], f"cut at byte {at}"


def flip(content: bytes, random: Random) -> tuple[bytes, str]:
    at, bit = random.randrange(len(content)), random.randrange(8)
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :], f"bit {bit} of byte {at} flipped"


def noise(content: bytes, random: Random) -> tuple[bytes, str]:
    at, size = random.randrange(len(content)), random.choice((1, 2, 8, 100))
    return content[:at] + random.randbytes(size) + content[at + size :], f"{size} bytes of noise at byte {at}"


def insert(content: bytes, random: Random) -> tuple[bytes, str]:
    at = random.choice((0, len(content), random.randrange(len(content) + 1)))
    text = random.choice((b"\0", b"\r", b"\n", b"\x1b[31m", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf"))
    return content[:at] + text + content[at:], f"{text!a} inserted at byte {at}"


def part_gone(content: bytes, random: Random) -> tuple[bytes, str]:
    begin, size = random.randrange(len(content)), random.choice((1, 3, 17, 512))
    return content[:begin] + content[begin + size :], f"{size} bytes gone at byte {begin}"


def part_twice(content: bytes, random: Random) -> tuple[bytes, str]:
    begin, size = random.randrange(len(content)), random.choice((1, 3, 17, 512))
    return content[: begin + size] + content[begin:], f"{size} bytes twice at byte {begin}"


def other_lines(content: bytes, random: Random) -> tuple[bytes, str]:
    end = random.choice((b"\r", b"\r\n", b"\n\r", b"\n\n", b"\x0b", b"\x0c", b"\xe2\x80\xa8"))
    few = random.random() < 0.5
    return content.replace(b"\n", end, 1 if few else -1), f"{'one line ends' if few else 'lines end'} in {end!a}"


def number(content: bytes, random: Random) -> tuple[bytes, str]:
    """Replace a number by an absurd one."""
    found = list(re.finditer(rb"(?<![\w.])-?\d+(\.\d+)?(e-?\d+)?(?![\w.])", content))
    if not found:
        return content, "no number"
    match, text = random.choice(found), random.choice(NUMBERS)
    said = f"number {match[0].decode()[:20]} at byte {match.start()} becomes {text[:30]!a} of {len(text)}"
    return content[: match.start()] + text.encode() + content[match.end() :], said


def word(content: bytes, random: Random) -> tuple[bytes, str]:
    """Replace a word by an absurd one."""
    match = random.choice(list(re.finditer(rb"[A-Za-z_]{2,}", content)) or [re.match(b"", content)])
    text = random.choice(TEXTS)
    said = f"word {match[0].decode()[:20]} at byte {match.start()} becomes {text[:30]!a} of {len(text)}"
    return content[: match.start()] + text.encode("utf-8", "surrogatepass") + content[match.end() :], said


def line(content: bytes, random: Random) -> tuple[bytes, str]:
    """A line gone, twice, moved, or very long."""
    lines = content.split(b"\n")
    at, to = random.randrange(len(lines)), random.randrange(len(lines))
    how = random.choice(("gone", "twice", "moved", "long"))
    if how == "gone":
        del lines[at]
    elif how == "twice":
        lines.insert(to, lines[at])
    elif how == "moved":
        lines.insert(to, lines.pop(at))
    else:
        lines[at] = lines[at] * 3000 or b"x" * 100_000
    return b"\n".join(lines), f"line {at + 1} {how}{f' to {to + 1}' if how in ('twice', 'moved') else ''}"


def depth(content: bytes, random: Random) -> tuple[bytes, str]:
    """A deep nest at the place of a value."""
    match = random.choice(list(re.finditer(rb"(?<=[:=] )\S", content)) or [re.match(b"", content)])
    opening = random.choice((b"[", b'{"a":', b"{a=", b"(", b"- ", b"{a: ", b"[{"))
    count = random.choice((50, 999, 20_000, 200_000))
    closing = random.choice((b"", b"]" * count))
    content = content[: match.start()] + opening * count + closing + content[match.start() :]
    return content, f"{count} times {opening!a} at byte {match.start()}, {'closed' if closing else 'open'}"


# Files


def gone(path: Path, random: Random) -> str:
    _remove(path)
    return "gone"


def other_kind(path: Path, random: Random) -> str:
    """Something else than a file stands in its place."""
    kinds = (
        "empty file",
        "folder",
        "dead link",
        "link to itself",
        "/dev/zero",
        "/dev/null",
        "/dev/stdin",
        "pipe",
        "huge",
    )
    kind = random.choice((*kinds, "/proc/self/mem", "socket", "full folder"))
    _remove(path)
    if kind == "empty file":
        path.touch()
    elif kind.endswith("folder"):
        path.mkdir()
        if kind == "full folder":
            (path / path.name).write_text("x")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, 0o140600)
    elif kind == "huge":  # a terabyte of zeros, which takes no disk
        path.touch()
        os.truncate(path, 2**40)
    else:
        path.symlink_to({"dead link": "nowhere", "link to itself": path.name}.get(kind, kind))
    return f"becomes {kind}"


def other_file(path: Path, random: Random) -> str:
    """The content of a file beside it, or the same file under a hostile name."""
    others = [other for other in sorted(path.parent.iterdir()) if other.is_file() and other != path]
    if not others or not path.is_file():
        return "stays"
    other = random.choice(others)
    path.write_bytes(other.read_bytes())
    return f"becomes a copy of {other.name}"


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        for inner in path.iterdir():
            _remove(inner)
        path.rmdir()
    else:
        path.unlink()


# JSON


def tree(content: bytes, random: Random) -> tuple[bytes, str]:
    """A value of a JSON file, at any depth, becomes absurd, is missing, is there twice, or changes places."""
    text, said = tree_text(content.decode(), random)
    return text.encode(), said


def tree_line(content: bytes, random: Random) -> tuple[bytes, str]:
    """The same in a line of JSON; text may stand before it."""
    lines = content.decode().split("\n")
    at = random.choice([i for i, text in enumerate(lines) if "{" in text])
    head, brace, text = lines[at].partition("{")
    text, said = tree_text(brace + text, random)
    lines[at] = head + text
    return "\n".join(lines).encode(), f"line {at + 1}, {said}"


def tree_text(text: str, random: Random) -> tuple[str, str]:
    root = json.loads(text)
    spots = _spots(root)
    holder, key = random.choice(spots)
    how = random.choice(("odd", "odd", "odd", "missing", "twice", "swapped", "renamed"))
    said = f"{ascii(key)[:40]} {how}"
    if how == "odd":
        holder[key] = random.choice(VALUES)
        said += f": {ascii(holder[key])[:30]}"
    elif how == "missing":
        del holder[key]
    elif how == "twice" and isinstance(holder, list):
        holder.insert(key, holder[key])
    elif how == "twice":  # the name of the second is made equal in the text
        holder["\ue000twice"] = random.choice((holder[key], random.choice(VALUES)))
        return json.dumps(root).replace('"\\ue000twice"', json.dumps(key)), said
    elif how == "swapped":
        other, place = random.choice(spots)
        holder[key], other[place] = other[place], holder[key]
        said += f" with {ascii(place)[:40]}"
        if not _is_tree(root):  # a swap of a value with its own part
            return text, f"{said}: no tree"
    elif isinstance(holder, dict):
        name = random.choice(TEXTS)
        holder[name] = holder.pop(key)
        said += f" {ascii(name)[:30]}"
    return json.dumps(root), said


def _is_tree(root: object) -> bool:
    try:
        json.dumps(root)
    except ValueError:
        return False
    return True


def _spots(value: object) -> list[tuple]:
    """(holder, key) of every value in a tree."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ())
    return [(value, key) for key, _ in items] + [spot for _, inner in items for spot in _spots(inner)]


# What may happen to each kind of file

BYTES = of_content(cut, flip, noise, insert, part_gone, part_twice) | by_name(gone, other_kind, other_file)
TEXT = BYTES | of_content(other_lines, number, word, line, depth)
JSON = TEXT | of_content(tree)
JSON_LINES = TEXT | of_content(tree_line)
