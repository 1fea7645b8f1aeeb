"""The checksums of a folder's files, as `sha256sum` writes and checks them."""

import re
from pathlib import Path

from flux_ref.formats import outside

MANIFEST = "manifest.sha256"
LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)")


def read(path: Path) -> tuple[dict[str, str], list[int]]:
    """`parse` of a file. Raises: Refusal."""
    return parse(outside.read_bytes(path, "manifest", outside.OWN_BYTES).decode(errors="replace"))


def parse(text: str) -> tuple[dict[str, str], list[int]]:
    """The SHA-256 of each file, by name, and the numbers of the lines that are not usable.

    A line is not usable if it has another form or names a file again.
    """
    sums = {}
    unusable = []
    for number, line in enumerate(text.splitlines(), 1):
        parts = LINE.fullmatch(line)
        if parts and parts[2] not in sums:
            sums[parts[2]] = parts[1].lower()
        else:
            unusable.append(number)
    return sums, unusable


def is_sha256(value: object) -> bool:
    return isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{64}", value))


def written(sums: dict[str, str]) -> str:
    """The text of a manifest. sums: the SHA-256 of each file, by name."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def fits(name: str) -> bool:
    """Whether a line of a manifest can hold a file's name."""
    return name.isprintable() and "\\" not in name
