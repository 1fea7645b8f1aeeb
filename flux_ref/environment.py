"""What a run runs on: device, versions, commit; and the folder of its compiler."""

import os
import re
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch

from flux_ref import ranks
from flux_ref.attention import attention_kernel
from flux_ref.config import Config
from flux_ref.ranks import World


def device_name(device: torch.device) -> str:
    """The model of a device, such as "NVIDIA H200"."""
    return "cpu" if device.type == "cpu" else torch.get_device_module(device).get_device_name(device)


def environment(world: World) -> dict[str, object]:
    """What a run runs on, as environment.json has it."""
    return {
        "ranks": world.size,
        "replicas": world.replicas,
        "device": device_name(world.device),
        "torch": torch.__version__,
        "commit": commit(),
    }


def commit(folder: Path = Path(__file__).parent) -> str:
    """The commit of the code in a folder, "+" with changes that are not in it; "" outside a repository.

    Nothing is written: `git describe --dirty` would lock and rewrite the index.
    """
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    try:
        told = subprocess.run([*git, "status", "--porcelain=v2", "--branch", "-uno"], capture_output=True).stdout
    except OSError:  # there is no git
        return ""
    head = re.search(rb"^# branch.oid (\w{12})", told)
    is_changed = re.search(rb"^[^#]", told, re.MULTILINE)
    return head[1].decode() + ("+" if is_changed else "") if head else ""


def peak_memory_gb(device: torch.device) -> float:
    """Largest device memory this process has held, in 1e9 bytes; on the CPU its peak resident size."""
    if device.type == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9
    return torch.get_device_module(device).max_memory_allocated(device) / 1e9


def choose_compiler_folder(cfg: Config, world: World, stack: ExitStack) -> None:
    """Give torch's compiler a folder of this start, for all ranks of a node. Collective. Raises: Refusal.

    By itself torch takes the pickles and the code that lie in /tmp/torchinductor_USER; another user may have made it.
    The own folder is removed when the stack ends; TORCHINDUCTOR_CACHE_DIR=DIR keeps the code in DIR for later starts.
    Call this before a net is built: torch then imports its compiler, which looks for the folder.
    """
    token = ranks.gather_objects(secrets.token_hex(8))[0]  # nobody can have made a folder of this name
    own = f"{tempfile.gettempdir()}/flux_ref_compiled_{token}"
    stack.callback(shutil.rmtree, own, ignore_errors=True)
    with ranks.agreed():
        os.makedirs(own, mode=0o700, exist_ok=True)
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or own
    # torch finds compiled code by the code of the net. That does not name the kernel of attention, so the folder does.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{kept}/{attention_kernel(cfg, world.device).replace(' ', '_')}"
    # torch keeps some files below the temporary folder, whatever TORCHINDUCTOR_CACHE_DIR says.
    os.environ["TMPDIR"] = own
    tempfile.tempdir = own
