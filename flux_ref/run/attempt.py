"""A command of one process that parses its own arguments."""

from collections.abc import Callable

from flux_ref import errors


def attempt(name: str, task: Callable[[], int]) -> int:
    """Run it; returns its exit code."""
    return errors.run(name, lambda _: task(), [])
