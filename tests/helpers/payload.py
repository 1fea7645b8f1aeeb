"""A pickle that shows when it is executed."""

from pathlib import Path


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.mkdir, (self.mark,)
