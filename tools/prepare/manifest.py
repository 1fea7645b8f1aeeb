"""The files of a data set and their checksums, as `sha256sum` writes and checks them."""

import os
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from flux_ref.errors import Refusal
from flux_ref.formats import files, outside

MANIFEST = "manifest.sha256"
HIDDEN = ".stage"  # in which stage.py keeps unfinished files
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")


def walk(root: Path) -> Iterator[Path]:
    """All that lies below a folder and is no folder. Links are not followed. Raises: OSError.

    Left out are root/.stage and what another process is writing (formats/files.py).
    """
    folders = [root]
    for folder in folders:
        for entry in sorted(os.scandir(folder), key=attrgetter("name")):  # with their kinds
            path = Path(entry.path)
            if path.name.endswith((files.CLAIM, files.PARTIAL)):
                continue
            if not entry.is_dir(follow_symlinks=False):
                yield path
            elif path != root / HIDDEN:
                folders.append(path)


def read(path: Path) -> dict[str, str]:
    """The SHA-256 of each file, by name. Raises: Refusal for a line of another form or one that names a file again."""
    text = outside.read_bytes(path, "manifest", outside.OWN_BYTES).decode(errors="replace")
    sums = {}
    for number, line in enumerate(text.splitlines(), 1):
        parts = LINE.fullmatch(line)
        if not parts or parts[2] in sums:
            raise Refusal(f"{path}, line {number}: not a line of sha256sum, or names a file again; make it again")
        sums[parts[2]] = parts[1].lower()
    return sums


def written(sums: dict[str, str]) -> str:
    """The text of a manifest. sums: the SHA-256 of each file, by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def fits(name: str) -> bool:
    """Whether a line of a manifest can hold a file's name."""
    return name.isprintable() and "\\" not in name
