"""A train.py that takes SAVE_S seconds to write a part of a checkpoint, and says so once it has got Ctrl-C."""

import gc
import os
import signal
import sys
import time

from conftest import ROOT

from flux_ref import checkpoint, errors
from flux_ref.alive import Alive

sys.path.insert(0, str(ROOT))
import train

write_rank = checkpoint.write_rank


def slowly(*args: object) -> object:
    (watcher,) = [found for found in gc.get_objects() if isinstance(found, Alive)]
    while watcher.signal != signal.SIGINT:  # torchrun passes it on to one rank after the other
        time.sleep(0.01)
    os.write(2, b"\na rank writes and has got Ctrl-C\n")  # in one piece: both ranks write into one log
    time.sleep(float(os.environ["SAVE_S"]))
    return write_rank(*args)


if __name__ == "__main__":
    checkpoint.write_rank = slowly
    errors.leave(errors.run("train.py", train.main, sys.argv[1:]))
