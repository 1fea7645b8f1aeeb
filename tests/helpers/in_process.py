"""A stand-in for subprocess.Popen that runs train.py inside this process, which saves the start of torch."""

from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TextIO

from conftest import called


class InProcess:
    """Trains the config that a command ends with. started: the names of all runs that were asked for."""

    started: tuple[str, ...] = ()

    def __init__(self, command: list, stdout: TextIO, **_):
        InProcess.started += (Path(command[-1]).stem,)
        with redirect_stdout(stdout), redirect_stderr(stdout):
            self.code = called("train.py", command[-1])

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_) -> None:
        pass

    def wait(self) -> int:
        return self.code
