"""Files that appear whole or not at all."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file that is there whole or not at all."""
    partial = path.with_name(f".{path.name}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
