"""Brace patterns as in shard_{000000..000109}.tar, written out. None is expanded before its size is known."""

import re
from math import prod

from braceexpand import braceexpand

MOST, DEPTH = 1_000_000, 20  # names, braces inside braces
LETTERS = 52  # a range of letters has no more
RANGE = re.compile(r"(-?[0-9]{1,18})\.\.(-?[0-9]{1,18})(\.\.-?[0-9]{1,18})?(?=\})")


def expanded(patterns: list[str]) -> list[str]:
    """The names of all patterns, in order. Raises: ValueError."""
    names = []
    for pattern in patterns:
        names += _expanded(pattern, MOST - len(names))
    return names


def _expanded(pattern: str, room: int) -> list[str]:
    """At most `room` names of a pattern.

    Raises: ValueError for unbalanced braces, for too many names, and for what hides their number.
    """
    if "{" not in pattern:
        return [pattern]
    if not (pattern.isascii() and pattern.isprintable()) or "\\" in pattern:  # braceexpand takes digits of any script
        raise ValueError("a pattern with braces holds only ASCII, and no backslash")
    sizes = [abs(int(last) - int(first)) + 1 for first, last, _ in RANGE.findall(pattern)]
    rest = RANGE.sub("", pattern)
    if re.search(r"[0-9]\.\.", rest) or _most(rest) * prod(sizes) > room:
        raise ValueError(f"its braces stand for more than {MOST:,} names")
    return list(braceexpand(pattern))


def _most(pattern: str) -> int:
    """An upper bound of the names that lists and ranges of letters stand for. Raises: ValueError for deep braces."""
    most, choices = LETTERS ** min(4, pattern.count("..")), []  # choices: of the braces that are open
    for character in pattern:
        if character == "{":
            choices.append(1)
        elif character == "," and choices:
            choices[-1] += 1
        elif character == "}" and choices:
            most = min(most * choices.pop(), 2 * MOST)
        if len(choices) > DEPTH:
            raise ValueError(f"its braces are nested more than {DEPTH} deep")
    return most
