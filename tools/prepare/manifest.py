"""The files of a data set and their checksums, as `sha256sum` writes and checks them."""

import os
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path

from flux_ref.formats import outside

MANIFEST = "manifest.sha256"
HIDDEN = ".stage"  # in which stage.py keeps unfinished files
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")


def walk(root: Path, is_left_out: Callable[[Path], bool] | None = None) -> Iterator[Path]:
    """All that lies below a folder and is no folder. Links are not followed. Raises: OSError.

    is_left_out tells folders that are not entered; by default this is root/.stage.
    """
    is_left_out = is_left_out or (lambda folder: folder == root / HIDDEN)
    folders = [root]
    for folder in folders:
        for entry in sorted(os.scandir(folder), key=attrgetter("name")):  # with their kinds
            path = Path(entry.path)
            if not entry.is_dir(follow_symlinks=False):
                yield path
            elif not is_left_out(path):
                folders.append(path)


def read(path: Path) -> tuple[dict[str, str], list[int]]:
    """The SHA-256 of each file, by name, and the numbers of the lines that are not usable. Raises: Refusal.

    A line is not usable if it has another form or names a file again.
    """
    text = outside.read_bytes(path, "manifest", outside.OWN_BYTES).decode(errors="replace")
    sums = {}
    unusable = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = LINE.fullmatch(line)
        if parts and parts[2] not in sums:
            sums[parts[2]] = parts[1].lower()
        else:
            unusable.append(number)
    return sums, unusable


def written(sums: dict[str, str]) -> str:
    """The text of a manifest. sums: the SHA-256 of each file, by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def fits(name: str) -> bool:
    """Whether a line of a manifest can hold a file's name."""
    return name.isprintable() and "\\" not in name
