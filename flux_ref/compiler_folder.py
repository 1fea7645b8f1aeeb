"""The folder in which torch's compiler keeps what it has compiled.

By itself torch keeps pickled graphs, code and headers in /tmp/torchinductor_USER, and takes what lies there; another
user may have made this folder. So each start has a folder of its own, which only its user may enter and which is
removed at the end. TORCHINDUCTOR_CACHE_DIR=DIR keeps the files in DIR for later starts. They are as trusted as code.
"""

import os
import tempfile
from contextlib import ExitStack

from flux_ref import ranks
from flux_ref.attention import attention_kernel
from flux_ref.config import Config
from flux_ref.ranks import World

PLACE = "TORCHINDUCTOR_CACHE_DIR"


def choose(cfg: Config, world: World, stack: ExitStack) -> None:
    """Set the compiler's folder for all ranks of a node, until the stack ends. Collective. Raises: Refusal.

    Call this before a net is built: torch then imports its compiler, which looks for the folder. The own folder is on
    the node's own disk: a shared disk may be slow and may lack the locks that torch takes.
    """
    path = ""
    leader = world.nodes.index(world.nodes[world.rank])  # the first rank of this node
    with ranks.agreed():
        if world.rank == leader:
            folder = tempfile.TemporaryDirectory(prefix="flux_ref_compiled_", ignore_cleanup_errors=True)
            path = stack.enter_context(folder)  # its mode is 0700
    path = ranks.gather_objects(path)[leader]
    kept = os.environ.get(PLACE) or f"{path}/code"
    # torch finds a graph again by the code of the net, which does not tell the kernel of attention.
    code = f"{kept}/{attention_kernel(cfg, world.device).replace(' ', '_')}"
    own = {
        PLACE: code,
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", f"{code}/triton"),
        "TMPDIR": path,  # torch keeps some files below the temporary folder, whatever TORCHINDUCTOR_CACHE_DIR says
    }
    stack.callback(_set, {name: os.environ.get(name) for name in own}, tempfile.tempdir)
    _set(own, path)


def _set(variables: dict[str, str | None], temporary: str | None) -> None:
    """Set environment variables, for this process and those that it starts, and Python's temporary folder."""
    tempfile.tempdir = temporary
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
