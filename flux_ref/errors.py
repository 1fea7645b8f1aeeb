"""The ways in which a run ends early, and the exit code of each.

alone: only this rank knows, so it has to speak for itself; otherwise rank 0 does.
"""

import os
import sys
from collections.abc import Callable
from signal import Signals


class Refusal(Exception):
    """The request cannot be honoured as asked; nothing has been trained. The process exits with 2."""

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
    """A signal asked the run to stop; it has. The process exits with 128 + the signal, as shells have it."""

    alone = False

    def __init__(self, signal: int):
        super().__init__(f"stopped by {Signals(signal).name}")
        self.signal = signal
        self.exit_code = 128 + signal


def attempt(name: str, task: Callable[[], int]) -> int:
    """The exit code of a command that needs no torch; what ends it early is one line. cli.run does so for ranks."""
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
    """Where stdout takes no more: Python would try again at its end, and change the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
