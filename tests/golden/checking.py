"""Comparing a dump with the golden values."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.torch
import torch

from flux_ref import cli
from tools.golden.check import main


def checked(dump: dict[str, np.ndarray | torch.Tensor], tmp_path: Path, capsys, *options: str) -> SimpleNamespace:
    """What the command prints: its exit code, the first value that differs, the text and the errors."""
    tensors = {name: torch.as_tensor(np.array(x) if isinstance(x, np.ndarray) else x) for name, x in dump.items()}
    safetensors.torch.save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "dump")
    capsys.readouterr()
    code = cli.run("golden", main, [str(tmp_path / "dump"), *options])
    out, err = capsys.readouterr()
    first = re.search(r"^first difference: ([^,]*),", out, re.M)
    return SimpleNamespace(code=code, first=first and first[1], text=out, err=err)
