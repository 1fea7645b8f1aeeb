"""Plain English in the pages: short sentences, no phrase that a reader has to read twice.

Rules, from CONTRIBUTING.md: a sentence has mostly under 25 words, here at most 30. It does not begin with Of, Whose or
Which, and uses no idiom of IDIOMS. Code blocks and tables have no sentences; their idioms count all the same in tables.
"""

import re

from conftest import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "PORTING.md", "launch/README.md", "bench/README.md"]
PAGES += ["docs/guide.md", "docs/architecture.md", "docs/arithmetic.md", "docs/draws.md", "docs/faults.md"]
PAGES += [
    "docs/formats.md",
    "docs/log.md",
    "docs/measured.md",
    "docs/own_pictures.md",
    "docs/precision.md",
    "docs/ten_runs.md",
]
MAX_WORDS = 30
IDIOMS = re.compile(
    r"\b(leaves? word|hears? of|let go of|by the very|what is more|is none|to hand|wants? to be|is no )\b"
)
START = re.compile(r"(Of|Whose|Which)\b")


def without_code(page: str) -> str:
    """The text without code blocks and comments; code spans and links keep the place of one word or their text."""
    page = re.sub(r"^ *```.*?^ *```", "", page, flags=re.M | re.S)
    page = re.sub(r"`[^`]+`", "CODE", page)
    return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", page)


def sentences(page: str) -> list[str]:
    """The sentences outside code and tables; a heading, a list item and a paragraph each begin a new one."""
    text = re.sub(r"^(\|.*| {4,}.*|#+ )", "\n", without_code(page), flags=re.M)
    text = re.sub(r"^ *([-*]|\d+\.) ", "\n", text, flags=re.M)
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [own for part in paragraphs for own in re.split(r"(?<=[.:!?])\)?\s+", part) if own]


def offences(page: str) -> list[str]:
    long = [f"{len(own.split())} words: {own}" for own in sentences(page) if len(own.split()) > MAX_WORDS]
    starts = [f"begins badly: {own}" for own in sentences(page) if START.match(own)]
    return long + starts + [f"idiom: {found.group()}" for found in IDIOMS.finditer(without_code(page))]


def test_pages_are_plain():
    found = [f"{page}: {offence}" for page in PAGES for offence in offences((ROOT / page).read_text())]
    assert not found, "\n".join(found)


def test_the_check_finds_what_it_looks_for():
    long = "word " * (MAX_WORDS + 1)
    bad = [long, f"- {long}", "Fine. Of these, two.", "Fine. Whose?", "There is no way.", "| rank 1 hears of it |"]
    assert [text for text in bad if not offences(text)] == []
    good = [f"```\n{long}\n```", f"| {long} |", f"`{long}` is one.", "Half a sentence. " * 20, f"# {long[:50]}\nmore"]
    assert [text for text in good if offences(text)] == []
