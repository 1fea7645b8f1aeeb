"""A train.py that takes SAVE_S seconds to write a part of a checkpoint, and says so once it has got Ctrl-C."""

import os
import signal
import sys
import time

from conftest import ROOT

from flux_ref.formats import checkpoint_files
from flux_ref.run import alive, cli

sys.path.insert(0, str(ROOT))
import train

write_rank = checkpoint_files.write_rank


def slowly(*args: object) -> object:
    while alive.received() != signal.SIGINT:  # torchrun passes it on to one rank after the other
        time.sleep(0.01)
    os.write(2, b"\na rank writes and has got Ctrl-C\n")  # in one piece: both ranks write into one log
    time.sleep(float(os.environ["SAVE_S"]))
    return write_rank(*args)


if __name__ == "__main__":
    checkpoint_files.write_rank = slowly
    cli.leave(cli.run("train.py", train.__doc__, train.main, sys.argv[1:]))
