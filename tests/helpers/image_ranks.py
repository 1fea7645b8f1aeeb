"""`python -m tools.prepare` with a small autoencoder, on each rank."""

import sys

from small_encoders import CHANNELS

from flux_ref.errors import leave
from flux_ref.pictures import encoders
from tools.prepare import commands


def main(*argv: str) -> int:
    encoders.VAE["block_out_channels"] = CHANNELS
    return commands.main(list(argv))


if __name__ == "__main__":  # under torchrun
    leave(main(*sys.argv[1:]))
