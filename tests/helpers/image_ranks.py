"""`python -m tools.prepare images` with a small autoencoder and small parts, on each rank."""

import sys

from small_encoders import CHANNELS

from flux_ref.cli import exit_now
from flux_ref.pictures import encoders
from tools.prepare import __main__ as commands
from tools.prepare import images


def main(*argv):
    encoders.VAE["block_out_channels"] = CHANNELS
    images.PER_PART = 5
    return commands.main(list(argv))


if __name__ == "__main__":  # under torchrun
    exit_now(main(*sys.argv[1:]))
