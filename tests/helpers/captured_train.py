"""train.py with captured steps, on a device or on its stand-in. BREAKS_AT=N raises an error amid training, at step N.

python tests/helpers/captured_train.py CONFIG [--section.key=value ...]
"""

import os
import sys
import time

import stand_in
import torch

import train
from flux_ref import errors
from flux_ref.graphs import CapturedRunner

run_step = CapturedRunner.train


def breaking(steps: CapturedRunner):
    """The training step, until it breaks."""
    if steps.state.step == int(os.environ["BREAKS_AT"]):
        print(f"broken at {time.time()}", flush=True)
        raise RuntimeError("an error amid training")
    return run_step(steps)


def main(*argv: str) -> int:
    if not torch.accelerator.is_available():
        stand_in.install()
    if "BREAKS_AT" in os.environ:
        CapturedRunner.train = breaking
    return errors.run("train.py", train.main, list(argv))


if __name__ == "__main__":
    errors.leave(main(*sys.argv[1:]))
