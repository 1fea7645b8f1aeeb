"""Where torch's compiler keeps its files, and a file from which a later start takes its graphs.

By itself torch keeps pickled graphs, compiled code and compiled headers in /tmp/torchinductor_USER, and takes what lies
there. Here each start has a folder of its own, which only its user may enter and which is removed at the end.

parallel.compile_cache=FILE names files, FILE.KERNEL.0, FILE.KERNEL.1, ..., one for each rank of a node, since code
names its device. The first start writes them with torch.compiler.save_cache_artifacts, later starts read them with
load_cache_artifacts. torch unpickles the graphs in them. So a file is as trusted as code: it is read only if it
belongs to the user and nobody else may write it. C++ kernels of a CPU are not in it and are compiled again.
"""

import hashlib
import os
import stat
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from flux_ref import config, ranks
from flux_ref.errors import Refusal
from flux_ref.formats import claim, files, outside
from flux_ref.speed.attention import attention_kernel
from flux_ref.step_runner import StepRunner

PLACE = "TORCHINDUCTOR_CACHE_DIR"  # names the folder of torch's compiler
KEY = "parallel.compile_cache"
REMEDY = "delete it or name another file"


def own_folder(cfg: config.Config, world: ranks.World, stack: ExitStack) -> None:
    """Make a folder for the compiler of all ranks of a node; the stack removes it. Collective. Raises: Refusal.

    Call this before a net is built: torch then imports its compiler, which looks for the folder.
    TORCHINDUCTOR_CACHE_DIR of the user stays, except with parallel.compile_cache. The folder is on the node's own disk:
    a shared one may be slow and may lack the locks that torch takes.
    """
    path = ""
    leader = world.nodes.index(world.nodes[world.rank])  # the first rank of this node
    with ranks.agreed():
        if world.rank == leader:
            folder = tempfile.TemporaryDirectory(prefix="flux_ref_compiled_", ignore_cleanup_errors=True)
            path = stack.enter_context(folder)  # its mode is 0700
    path = ranks.gather_objects(path)[leader]
    own = {"TMPDIR": path}  # torch keeps some files below the temporary folder whatever TORCHINDUCTOR_CACHE_DIR says
    if cfg.parallel.compile_cache or not os.environ.get(PLACE):
        own[PLACE] = f"{path}/code"
        own["TRITON_CACHE_DIR"] = os.environ.get("TRITON_CACHE_DIR", f"{path}/code/triton")
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


def warm_up(steps: StepRunner, cfg: config.Config, world: ranks.World) -> str:
    """Warm the steps up with the graphs of this rank's file. Write the file if it is missing or lacked a graph.

    Call `own_folder` before. Returns one line for the log. Collective. Raises: Refusal, Fault.
    """
    path = file_of(cfg, world)
    held = set()
    with ranks.agreed():
        if content := read(path):
            info = torch.compiler.load_cache_artifacts(content)
            if info is None:
                raise Refusal(f"{KEY}={path} is of another torch; {REMEDY}")
            held = set(info.inductor_artifacts)
    # Otherwise torch compiles graphs with FP8 anew: its products are functions with a backward of their own.
    with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True):
        steps.warm_up()
    used = set()
    said = ""
    with ranks.agreed():
        saved = torch.compiler.save_cache_artifacts()
        if saved is None:
            raise Refusal(f"{KEY}={path}: torch's cache is off; unset TORCHINDUCTOR_FORCE_DISABLE_CACHES and its like")
        content, info = saved
        used = set(info.inductor_artifacts)
        if used - held:
            said = write(path, content)
    of_ranks = ranks.gather(torch.tensor([len(used & held), len(used - held)], dtype=torch.float64))
    taken = sum(row[0] for row in of_ranks)
    added = sum(row[1] for row in of_ranks)
    return f"compiler: {taken:.0f} graphs taken from {path}, {added:.0f} compiled and added{said}"


def file_of(cfg: config.Config, world: ranks.World) -> Path:
    """The file of this rank. torch tells graphs of other sizes or versions apart, but not those of other kernels."""
    index = world.nodes[: world.rank].count(world.nodes[world.rank])
    kernel = attention_kernel(cfg, world.device).replace(" ", "_")
    return Path(f"{cfg.parallel.compile_cache}.{kernel}.{index}")


def read(path: Path) -> bytes:
    """What torch saved in a file; empty if there is none. Raises: Refusal."""
    if not os.access(path.parent, os.W_OK):
        raise Refusal(f"{KEY}={path}: {path.parent} is no folder that you may write; make it or name another file")
    if not os.path.lexists(path):
        return b""
    with outside.opened(path, KEY) as file:
        status = os.fstat(file.fileno())  # of the open file, whoever renames files meanwhile
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            owner = f"belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}"
            raise Refusal(f"{KEY}={path} {owner}; it is code: only you may own and write it; {REMEDY}")
        checksum = file.read(hashlib.sha256().digest_size)
        content = file.read() if status.st_size < outside.OWN_BYTES else b""  # it may be a sparse terabyte
    if hashlib.sha256(content).digest() != checksum:
        raise Refusal(f"{KEY}={path} is damaged or no compile cache; {REMEDY}")
    return content


def write(path: Path, content: bytes) -> str:
    """Write a file, whole or not at all. Where another process has the claim, returns words that say so."""
    place = path.with_name(f".{path.name}.claim")
    own = claim.take(place)
    if own is None:
        return f"; not written, as it is being written by {claim.owner(place)}"
    private = partial(os.open, mode=0o600)
    with own, files.whole(path) as unfinished, open(unfinished, "xb", opener=private) as file:
        file.write(hashlib.sha256(content).digest() + content)
    return ""
