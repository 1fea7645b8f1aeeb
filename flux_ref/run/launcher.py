"""What a rank under torchrun does for torchrun's sake. Plain python needs none of it."""

import contextlib
import json
import os
import re
import sys
import time
from pathlib import Path

from flux_ref.errors import Fault


def follow(name: str) -> None:
    """End this rank when torchrun dies. A rank that goes on would keep memory, devices and the run's folder."""
    launcher = os.getppid()
    program = b"python"
    with contextlib.suppress(OSError):
        program = Path("/proc/1/cmdline").read_bytes().split(b"\0")[0]
    # A rank that lost torchrun while it started has process 1 as parent. In a container torchrun may be process 1.
    orphaned = launcher == 1 and not re.search(rb"python|torchrun", program)
    while os.getppid() == launcher and not orphaned:
        time.sleep(1.0)
    print(f"{name}: torchrun has died; rank {os.environ.get('RANK')} ends", file=sys.stderr, flush=True)
    os._exit(Fault.exit_code)


def tell(line: str) -> None:
    """Write why this rank ends into a file. torchrun prints it at the end of its own report."""
    cause = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps({"message": cause}))
