"""Brace patterns as in shard_{000000..000109}.tar, written out. None is expanded before its size is known."""

import itertools
import re
from math import prod

MOST = 1_000_000  # names
GROUP = re.compile(r"\{([^{}]*)\}")
RANGE = re.compile(r"([0-9]{1,9})\.\.([0-9]{1,9})")


def expand(patterns: list[str]) -> list[str]:
    """The names of all patterns, in order. Braces hold a range of numbers or a list: {000..109} or {a,b}.

    Raises: ValueError for other braces, and for too many names.
    """
    names = []
    for pattern in patterns:
        if re.search(r"[{}]", GROUP.sub("", pattern)):
            raise ValueError("its braces are nested, or one is missing")
        texts = GROUP.split(pattern)
        parts = [[text] for text in texts]
        parts[1::2] = map(_choices, texts[1::2])  # what stood in braces
        if len(names) + prod(map(len, parts)) > MOST:
            raise ValueError(f"its braces stand for more than {MOST:,} names")
        names += map("".join, itertools.product(*parts))
    return names


def _choices(inside: str) -> list[str]:
    if "," in inside and ".." not in inside:
        return inside.split(",")
    limits = RANGE.fullmatch(inside)
    numbers = range(int(limits[1]), int(limits[2]) + 1) if limits else ()
    if not 0 < len(numbers) <= MOST:
        raise ValueError(f"{{{inside[:40]}}} is no list and no range of 1 to {MOST:,} numbers")
    is_padded = any(limit.startswith("0") and limit != "0" for limit in limits.groups())
    width = max(map(len, limits.groups())) if is_padded else 1  # as the package braceexpand, which Energon calls
    return [f"{number:0{width}}" for number in numbers]
