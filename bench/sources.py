"""A hash of the sources that figures come from. Git's commit alone cannot tell two changed trees apart."""

import hashlib
from pathlib import Path

ROOT = Path(__file__).parent.parent
FIGURES = ("flux_ref", "tools/shared", "bench", "configs")  # what a benchmark runs
TESTS = (*FIGURES, "tools", "train.py", "eval.py", "tests")  # what a test runs
# What only orders, predicts and shows figures: a change there changes no figure.
SHOWS = ("bench/sweep.py", "bench/sweep_table.py", "bench/plan_check.py", "bench/static")
KINDS = (".py", ".toml", ".csv")


def sources(places: tuple[str, ...] = FIGURES, root: Path = ROOT) -> str:
    """The first 12 digits of a SHA-256 over names and contents; the same wherever the tree lies, with git or without.

    places: files, and folders whose files of KINDS count.
    """
    digest = hashlib.sha256()
    for place in places:
        for path in sorted([root / place, *(root / place).rglob("*")]):
            name = str(path.relative_to(root))
            if path.suffix in KINDS and path.is_file() and not name.startswith(SHOWS):
                content = path.read_bytes()
                digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
