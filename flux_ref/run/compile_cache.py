"""Where torch's compiler keeps its files, and these files as one file that a later start reads.

By itself torch keeps pickled graphs, compiled code and compiled headers in /tmp/torchinductor_USER, and takes what lies
there. Here each start has a folder of its own, which only its user may enter and which is removed at the end.

parallel.compile_cache names a file: the first start writes it, a later start compiles nothing. The file is one line of
JSON, which says what it was made for, and a tar archive of the folder. torch.compiler.save_cache_artifacts would leave
out C++ kernels, which take most of a start on the CPU. Compiled code names its device, so one file holds the code of
all ranks of a node.

torch unpickles graphs and loads kernels from the archive. So the file is as trusted as code: it is read only if it
belongs to the user and nobody else may write it.
"""

import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import tarfile
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from flux_ref import config, ranks
from flux_ref.errors import Refusal
from flux_ref.formats import claim, files, outside
from flux_ref.speed.attention import attention_kernel
from flux_ref.speed.fp8_product import architecture
from flux_ref.step_runner import StepRunner

PLACE = "TORCHINDUCTOR_CACHE_DIR"  # names the folder of torch's compiler
KEY = "parallel.compile_cache"
REMEDY = "delete it or name another file"
# These keys decide no graph by themselves. Equal regions share one graph, whatever their number.
FREE = (KEY, "parallel.replicate", "model.double_blocks", "model.single_blocks")
# Triton's files name their folder, so they fit no other. Each graph holds a copy of its kernels, which torch unpacks.
HEADER_BYTES = 2**20
LEFT_OUT = {"triton", "locks"}


def own_folder(cfg: config.Config, world: ranks.World, stack: ExitStack) -> None:
    """Make a folder for the compiler of all ranks of a node; the stack removes it. Collective. Raises: Refusal.

    Call this before a net is built: torch then imports its compiler, which looks for the folder.
    TORCHINDUCTOR_CACHE_DIR of the user stays, except with parallel.compile_cache. The folder is on the node's own disk:
    a shared one may be slow and may lack the locks that torch takes. The run's folder does not hold it: people hand
    runs on, and this is code.
    """
    leader, path = world.nodes.index(world.nodes[world.rank]), ""  # leader: the first rank of this node
    with ranks.agreed():
        if world.rank == leader:
            path = tempfile.mkdtemp(prefix="flux_ref_compiled_")  # its mode is 0700
            stack.callback(shutil.rmtree, path, ignore_errors=True)
            (Path(path) / "code").mkdir()
    path = ranks.gather_objects(path)[leader]
    own = {"TMPDIR": path}  # torch keeps some files below the temporary folder whatever TORCHINDUCTOR_CACHE_DIR says
    if cfg.parallel.compile_cache or not os.environ.get(PLACE):
        own[PLACE] = f"{path}/code"
        if "TRITON_CACHE_DIR" not in os.environ:
            own["TRITON_CACHE_DIR"] = f"{path}/code/triton"
    stack.callback(_set, {name: os.environ.get(name) for name in own}, tempfile.tempdir)
    _set(own, path)


def _set(variables: dict[str, str | None], temporary: str | None) -> None:
    """Set environment variables, for this process and those that it starts, and Python's temporary folder."""
    tempfile.tempdir = temporary
    for name, value in variables.items():
        os.environ.pop(name, None)
        os.environ |= {} if value is None else {name: value}


def warm_up(steps: StepRunner, cfg: config.Config, world: ranks.World) -> str:
    """Warm the steps up with the file's code. Write the file if it is missing or lacked a graph.

    Call `own_folder` before. Returns one line for the log. Collective. Raises: Refusal, Fault.
    """
    path = Path(cfg.parallel.compile_cache)
    use = purpose(cfg, world)
    folder = Path(os.environ[PLACE])
    leads = world.rank == world.nodes.index(world.nodes[world.rank])  # the first rank of a node reads and writes
    with ranks.agreed():
        if leads:
            read(path, use, folder)
    before = torch._dynamo.utils.counters["inductor"].copy()
    # Otherwise torch compiles graphs with FP8 anew: its products are functions with a backward of their own.
    with torch._functorch.config.patch(autograd_cache_allow_custom_autograd_functions=True):
        steps.warm_up()
    new = torch._dynamo.utils.counters["inductor"] - before
    own = new["fxgraph_cache_hit"], new["fxgraph_cache_miss"] + new["fxgraph_cache_bypass"]
    found, compiled = map(sum, zip(*ranks.gather_objects(own)))
    with ranks.agreed():
        if not found + compiled:
            raise Refusal(f"{KEY}={path}: torch's cache is off; unset TORCHINDUCTOR_FORCE_DISABLE_CACHES and its like")
        if leads and compiled:
            write(path, use, folder)
    return f"compiler: {found} graphs taken from {path}, {compiled} compiled{' and added' if compiled else ''}"


def purpose(cfg: config.Config, world: ranks.World) -> dict[str, str]:
    """What decides the compiled code: versions, device, sizes and keys, by name."""
    use = {"torch": torch.__version__, "python": platform.python_version(), "device": architecture(world.device)}
    if world.device.type == "cpu":  # C++ kernels use all instructions of the CPU at hand
        known = "".join(path.read_text() for path in Path("/proc").glob("cpuinfo"))
        lines = sorted(set(re.findall(r"^(?:model name|flags|Features)\s*:.*", known, re.M)))
        use["device"] += f" {hashlib.sha256(''.join(lines).encode()).hexdigest()[:12]}"
    use |= {"samples per forward": config.micro_batch(cfg, world.size), "eval.batch": cfg.eval.batch}
    sections = ("model.", "parallel.", "precision.")
    use |= {key: value for key, value in config.flat(cfg).items() if key.startswith(sections) and key not in FREE}
    use["parallel.attention"] = attention_kernel(cfg, world.device)  # torch's own name of a graph leaves it out
    return {name: str(value) for name, value in use.items()}


def read(path: Path, use: dict[str, str], folder: Path) -> None:
    """Unpack a file into a folder; a missing file holds nothing. Raises: Refusal, OSError."""
    if not os.access(path.parent, os.W_OK):
        raise Refusal(f"{KEY}={path}: {path.parent} is no folder that you may write; make it or name another file")
    if not os.path.lexists(path):
        return
    if not stat.S_ISREG(path.lstat().st_mode):
        raise Refusal(f"{KEY}={path} is no regular file; {REMEDY}")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        status = os.fstat(file.fileno())  # of the open file, whoever renames files meanwhile
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            owner = f"belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}"
            raise Refusal(f"{KEY}={path} {owner}; it is code: only you may own and write it; {REMEDY}")
        try:
            header = outside.parse_json(file.readline(HEADER_BYTES))
            made_for = dict(header["made for"])
            checksum = header["sha256"]
        except (ValueError, KeyError, TypeError):
            raise Refusal(f"{KEY}={path} is no compile cache; {REMEDY}") from None
        archive = file.read()
    for name in {**use, **made_for}:
        if made_for.get(name) != use.get(name):
            raise Refusal(f"{KEY}={path} was made for {name}={made_for.get(name)}, not {use.get(name)}; {REMEDY}")
    if hashlib.sha256(archive).hexdigest() != checksum:
        raise Refusal(f"{KEY}={path} is damaged, its checksum is wrong; {REMEDY}")
    try:
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            if sum(entry.size for entry in tar) > len(archive):
                raise tarfile.TarError("its files are larger than itself")
            tar.extractall(folder, filter="data")  # refuses links and paths that lead out of the folder
    except (tarfile.TarError, ValueError, RecursionError, MemoryError, OverflowError, KeyError) as error:
        raise Refusal(f"{KEY}={path} holds no archive: {error}; {REMEDY}") from None


def write(path: Path, use: dict[str, str], folder: Path) -> None:
    """Write a folder as a file, whole or not at all. Skipped while another process writes the same file."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.add(folder, ".", filter=lambda entry: entry if LEFT_OUT.isdisjoint(Path(entry.name).parts) else None)
    header = {"made for": use, "sha256": hashlib.sha256(archive.getbuffer()).hexdigest()}
    busy = path.with_name(f".{path.name}.claim")
    if own := claim.take(busy):  # nodes may share a path
        private = partial(os.open, mode=0o600)
        with own, files.whole(path) as unfinished, open(unfinished, "xb", opener=private) as file:
            file.writelines((json.dumps(header).encode(), b"\n", archive.getbuffer()))
