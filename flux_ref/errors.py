"""The ways in which a run ends early, and the exit code of each.

alone: only this rank has the error, so this rank prints it. Otherwise all ranks raise it and rank 0 prints it.
"""

from signal import Signals


class Stop(Exception):
    """A run ends early. The subclasses say how, and give the exit code."""

    def __init__(self, message: str, alone: bool = False):
        super().__init__(message)
        self.alone = alone


class Refusal(Stop):
    """The request cannot be honoured. Nothing has been trained. The process exits with 2."""

    exit_code = 2


class Fault(Stop):
    """Something broke while the run was under way. The process exits with 3."""

    exit_code = 3


class Interrupted(Stop):
    """A signal has stopped the run. The process exits with 128 + the signal's number, as shells do."""

    def __init__(self, signal: int):
        super().__init__(f"stopped by {Signals(signal).name}")
        self.signal = signal
        self.exit_code = 128 + signal
