"""Runs a program of the tests on several ranks. The ranks are forks of one process, so torch is imported once.

    python tests/helpers/fork_ranks.py 3 PROGRAM ARGUMENTS

The ranks find each other as under torchrun. When one rank fails, all others are ended.
"""

import importlib
import os
import signal
import socket
import sys
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path

import torch._dynamo  # noqa: F401  every rank would import it later

from flux_ref import cli


def run_rank(rank, size, port, main, argv):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    cli.exit_now(main(*argv))


def run(size, main, argv):
    """The exit code of the first rank that fails; 0 if none does."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    context = get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, size, port, main, argv)) for rank in range(size)]
    for process in ranks:
        process.daemon = True  # ends with this process
        process.start()
    alive = {process.sentinel: process for process in ranks}
    while alive:
        for sentinel in wait(alive):
            process = alive.pop(sentinel)
            process.join()  # its pipe closes a moment before its exit code is known
            if process.exitcode:
                return process.exitcode
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    size, program, *argv = sys.argv[1:]
    sys.path.insert(0, str(Path(program).parent))
    sys.exit(run(int(size), importlib.import_module(Path(program).stem).main, argv))
