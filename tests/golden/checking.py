"""Running `check --from` on a dump."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import safetensors.numpy

from tools.golden import commands


def checked(dump: dict[str, np.ndarray], tmp_path: Path, capsys, *options: str) -> SimpleNamespace:
    """What the command prints: its exit code, the first value that differs, the text and the errors."""
    safetensors.numpy.save_file({name: np.array(array, order="C") for name, array in dump.items()}, tmp_path / "dump")
    capsys.readouterr()
    code = commands.main(["check", "--from", str(tmp_path / "dump"), *options])
    out, err = capsys.readouterr()
    first = re.search(r"^first difference: (.*)$", out, re.M)
    return SimpleNamespace(code=code, first=first and first[1], text=out, err=err)
