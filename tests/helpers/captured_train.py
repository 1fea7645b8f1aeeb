"""train.py with captured steps, on a device or on its stand-in. BREAKS_AT=N raises an error amid training, at step N.

python tests/helpers/captured_train.py CONFIG [--section.key=value ...]
"""

import os
import sys
import time

import stand_in
import torch

import train
from flux_ref import cli
from flux_ref.graphs import CapturedTrainer

run_step = CapturedTrainer.step


def breaking(steps, feed):
    """The training step, until it breaks."""
    if steps.state.step == int(os.environ["BREAKS_AT"]):
        print(f"broken at {time.time()}", flush=True)
        raise RuntimeError("an error amid training")
    run_step(steps, feed)


def main(*argv):
    if not torch.accelerator.is_available():
        stand_in.install()
    if "BREAKS_AT" in os.environ:
        CapturedTrainer.step = breaking
    return cli.run("train.py", train.main, list(argv))


if __name__ == "__main__":
    cli.exit_now(main(*sys.argv[1:]))
