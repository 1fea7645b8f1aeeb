"""The ways in which a run ends early, and the exit code of each.

alone: only this rank knows, so it has to speak for itself; otherwise rank 0 does.
"""

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
