"""A hash of the sources that figures come from. Git's commit alone cannot tell two changed trees apart."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIGURES = ("flux_ref", "tools", "bench", "configs", "train.py")  # what a benchmark runs
TESTS = (*FIGURES, "eval.py", "tests")  # what a test runs
KINDS = (".py", ".toml", ".csv")


def sources(places: tuple[str, ...] = FIGURES, root: Path = ROOT) -> str:
    """The first 12 digits of a SHA-256 over names and contents; the same wherever the tree lies, with git or without.

    places: files, and folders whose files of KINDS count.
    """
    digest = hashlib.sha256()
    for place in places:
        for path in sorted([root / place, *(root / place).rglob("*")]):
            if path.suffix in KINDS and path.is_file():
                content = path.read_bytes()
                digest.update(f"{path.relative_to(root)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
