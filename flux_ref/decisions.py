"""The lines of the source that say why something must be as it is, found by their tags.

    spec:       a rule of the benchmark
    numerics:   a dtype, an epsilon or an order that changes results
    port:       a convention that a port has to keep, or what it may build on
    sync:       the host waits here for the device or for other ranks

A tag stands in a comment or a docstring; what follows it, up to the end of the comment or the paragraph, is its text.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TAGS = ("spec", "numerics", "port", "sync")
TAG = re.compile(rf"(?:^|(?<=\s))({'|'.join(TAGS)}): ")
ROOT = Path(__file__).parent.parent


class Decision(NamedTuple):
    """A tagged text: its file, the innermost class or function around it, and the code of its line."""

    tag: str
    file: str
    place: str  # "" on the level of the file
    code: str  # "" for a docstring or a comment of its own
    text: str


def sources() -> list[Path]:
    """The files of a run: the two scripts and the package."""
    return [ROOT / "train.py", ROOT / "eval.py", *sorted((ROOT / "flux_ref").glob("*.py"))]


def decisions(path: Path) -> list[Decision]:
    """Those of one file, from its top to its bottom."""
    if path == Path(__file__):  # which only explains the tags
        return []
    source = path.read_text(encoding="utf-8")
    tree, found = ast.parse(source), []
    for line, code, text in sorted([*_comments(source), *_docstrings(tree)]):
        tags = list(TAG.finditer(text))
        for tag, end in zip(tags, [*(next.start() for next in tags[1:]), len(text)]):
            own = " ".join(re.split(r"\s(?:Source|Raises|Returns):\s", text[tag.end() : end])[0].split())
            found.append(Decision(tag[1], str(path.relative_to(ROOT)), _place(tree, line), code, own))
    return found


def _comments(source: str) -> Iterator[tuple[int, str, str]]:
    """(line, code before it, text); comments below each other are one."""
    begin, code, text, end = 0, "", "", (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        own, before = token.string.lstrip("# "), token.line[: token.start[1]].strip()
        if not before and not code and token.start == (end[0] + 1, end[1]):
            text += " " + own
        else:
            yield begin, code, text
            begin, code, text = token.start[0], before, own
        end = token.start
    yield begin, code, text


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """(line, "", paragraph)."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node)):
                yield node.body[0].lineno, "", paragraph


def _place(tree: ast.Module, line: int) -> str:
    """The innermost class or function that a line belongs to, with its class."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    around = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.lineno <= line <= n.end_lineno]
    return ".".join(node.name for node in sorted(around, key=lambda node: node.lineno))
