"""`python -m tools.prepare` with a small autoencoder, on each rank."""

import sys
from functools import partial

from peer_vae import SMALL

from flux_ref.errors import leave
from flux_ref.pictures import autoencoder
from tools.prepare import commands


def main(*argv: str) -> int:
    autoencoder.load = partial(autoencoder.load, config=SMALL)
    return commands.main(list(argv))


if __name__ == "__main__":  # under torchrun
    leave(main(*sys.argv[1:]))
