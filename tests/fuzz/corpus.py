"""What the fuzzer has found: corpus.txt, a line `TARGET DAMAGE SEED: damage  # what it found` for each."""

import re
from pathlib import Path

from fuzz.engine import Input

FILE = Path(__file__).with_name("corpus.txt")
LINE = re.compile(r"(\S+) (\S+) (\d+): (.*?)  # .+")


def inputs() -> dict[Input, str]:
    """The inputs and the damage of each, in words. A damage that now says otherwise has been changed: mend the line."""
    found = {}
    for line in FILE.read_text(encoding="utf-8").splitlines():
        match = LINE.fullmatch(line)
        assert match, f"{FILE.name} has a bad line: {line}"
        found[match[1], match[2], int(match[3])] = match[4]
    return found
