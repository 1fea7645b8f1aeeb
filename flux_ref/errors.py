"""The ways in which a run ends early, and the exit code of each.

alone: only this rank has the error, so this rank prints it. Otherwise all ranks raise it and rank 0 prints it.
"""

import os
import sys
from collections.abc import Callable
from signal import Signals


class Refusal(Exception):
    """The request cannot be honoured. Nothing has been trained. The process exits with 2."""

    exit_code = 2

    def __init__(self, message: str, alone: bool = False):
        super().__init__(message)
        self.alone = alone


class Fault(Exception):
    """Something broke while the run was under way. The process exits with 3."""

    exit_code = 3

    def __init__(self, message: str, alone: bool = False):
        super().__init__(message)
        self.alone = alone


class Interrupted(Exception):
    """A signal has stopped the run. The process exits with 128 + the signal's number, as shells do."""

    alone = False

    def __init__(self, signal: int):
        super().__init__(f"stopped by {Signals(signal).name}")
        self.signal = signal
        self.exit_code = 128 + signal


def attempt(name: str, task: Callable[[], int]) -> int:
    """Run a command of one process; an error becomes one line. Returns the exit code. For ranks see run/cli.py."""
    try:
        return task()
    except (Refusal, Fault) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"{name}: {error}", file=sys.stderr)
        _give_stdout_up()
        return Refusal.exit_code
    except KeyboardInterrupt:
        return 130


def _give_stdout_up() -> None:
    """Close a full stdout. Otherwise Python writes to it again at its end, and changes the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
