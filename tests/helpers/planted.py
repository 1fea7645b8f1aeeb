"""train.py with one defect planted: python tests/helpers/planted.py DEFECT CONFIG [--section.key=value ...]

Earlier implementations of the benchmark had these defects, or a porter makes them.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import train
from flux_ref import config_file, latents
from flux_ref.run import cli

LR_FACTOR = 4


def none(argv: list[str]) -> list[str]:
    return argv


def lr_times_4(argv: list[str]) -> list[str]:
    lr = config_file.load(*cli.config_and_overrides(argv, "")).optim.lr
    return [*argv, f"--optim.lr={LR_FACTOR * lr}"]


def no_warmup(argv: list[str]) -> list[str]:
    return [*argv, "--optim.warmup_steps=0"]


def latent_scale(argv: list[str]) -> list[str]:
    latents.SCALE = 1.0  # the autoencoder's own scale
    return argv


DEFECTS: dict[str, Callable[[list[str]], list[str]]] = {
    plant.__name__: plant for plant in (none, lr_times_4, no_warmup, latent_scale)
}

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    name, *argv = sys.argv[1:]
    cli.leave(cli.run("train.py", __doc__, train.main, DEFECTS[name](argv)))
