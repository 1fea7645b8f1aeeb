"""Runs commands of flux_ref one after another in one process, which starts torch once; test_traced.py traces it.

python traced_commands.py JOBS.json        JOBS.json: a list of [name, script, arguments, exit code]
"""

import contextlib
import importlib
import json
import sys
from functools import partial
from pathlib import Path

from flux_ref.run import cli
from flux_ref.sampling import vae
from tools.prepare import commands as prepare


def run(script: str, argv: list[str]) -> int:
    if script == "prepare":
        return prepare.main(argv)
    return cli.run(script, "", importlib.import_module(script.removesuffix(".py")).main, argv)


if __name__ == "__main__":
    vae.load = partial(vae.load, sizes=vae.Sizes(base=32))  # FLUX's autoencoder would take most of the time
    for name, script, argv, want in json.loads(Path(sys.argv[1]).read_text()):
        with contextlib.suppress(FileNotFoundError):
            open(f"/job begins: {name}").close()  # a mark in the trace
        code = run(script, argv)
        if code != want:
            cli.leave(100 + code)
    cli.leave(0)
