"""Commands that are given several configs say which of them they refuse."""

from collections.abc import Iterator
from contextlib import contextmanager

from flux_ref.errors import Refusal


@contextmanager
def naming(path: str) -> Iterator[None]:
    """A Refusal of the block names the config in this file."""
    try:
        yield
    except Refusal as refusal:
        raise Refusal(str(refusal) if path in str(refusal) else f"{path}: {refusal}") from None
