"""How a command of one process ends: an error becomes one line and an exit code. For ranks see cli.py."""

import errno
import os
import sys
from collections.abc import Callable

from flux_ref.errors import Fault, Refusal

BROKEN_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


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
        return Fault.exit_code if error.errno in BROKEN_DISK and error.filename else Refusal.exit_code
    except KeyboardInterrupt:
        return 130


def _give_stdout_up() -> None:
    """Close a full stdout. Otherwise Python writes to it again at its end, and changes the exit code."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
