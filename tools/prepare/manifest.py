"""The files of a folder of pictures."""

import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

from flux_ref.formats import files


def walk(root: Path) -> Iterator[Path]:
    """All that lies below a folder and is no folder. Links are not followed. Raises: OSError.

    Left out is what another process is writing (formats/files.py).
    """
    folders = [root]
    for folder in folders:
        for entry in sorted(os.scandir(folder), key=attrgetter("name")):  # with their kinds
            path = Path(entry.path)
            if path.name.endswith((files.CLAIM, files.PARTIAL)):
                continue
            if entry.is_dir(follow_symlinks=False):
                folders.append(path)
            else:
                yield path
