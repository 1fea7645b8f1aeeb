"""train.py, whose rank 0 makes a data set for longer than run.watchdog_s, file by file. Started by fork_ranks.py."""

import time

from flux_ref import cli, toy
from train import main as train

MAKES_S = 10.0


def main(*argv):
    real = toy.make_shapes

    def slowly(folder, cfg):
        for _ in cli.count_progress(range(50)):
            time.sleep(MAKES_S / 50)
        real(folder, cfg)

    toy.make_shapes = slowly
    return cli.run("train.py", train, [*argv])
