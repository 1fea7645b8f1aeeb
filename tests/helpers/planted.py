"""train.py with one defect planted: python tests/helpers/planted.py DEFECT CONFIG [--section.key=value ...]

The defects are those that earlier implementations of the benchmark had, or that a porter makes.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import train
from flux_ref import config, config_file, data, latents, rng
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


def dropped_validation_captions(argv: list[str]) -> list[str]:
    fill = data.ValSet._fill

    def dropping(self: data.ValSet, rows: data.Rows, i: int, sample: int, text: int, evaluation: int) -> None:
        fill(self, rows, i, sample, text, evaluation)
        if rng.train_draw(1, evaluation, sample, self.cfg.model.latent_shape, 0.1).drop_caption:
            empty = data.shards.read_empty(config.empty_dir(self.cfg), self.shards.layout)
            rows["t5"][i], rows["clip"][i] = empty["t5"], empty["clip"]

    data.ValSet._fill = dropping
    return argv


DEFECTS: dict[str, Callable[[list[str]], list[str]]] = {
    plant.__name__: plant for plant in (none, lr_times_4, no_warmup, latent_scale, dropped_validation_captions)
}

if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    name, *argv = sys.argv[1:]
    cli.leave(cli.run("train.py", __doc__, train.main, DEFECTS[name](argv)))
