"""A train.py whose ranks take SAVE_S seconds to write their part of a checkpoint."""

import os
import sys
import time

from conftest import ROOT

from flux_ref.formats import checkpoint_files
from flux_ref.run import cli

sys.path.insert(0, str(ROOT))
import train

write_rank = checkpoint_files.write_rank


def slowly(*args: object) -> object:
    time.sleep(float(os.environ["SAVE_S"]))
    return write_rank(*args)


if __name__ == "__main__":
    checkpoint_files.write_rank = slowly
    cli.leave(cli.run("train.py", train.__doc__, train.main, sys.argv[1:]))
