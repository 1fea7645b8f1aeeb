"""The port in examples/ against the golden values. Needs jax: pip install jax."""

import re
import subprocess
import sys

import pytest
from conftest import ROOT

from flux_ref import cli
from tools.golden.check import main
from tools.golden.files import FOLDER, Golden

pytest.importorskip("jax")
pytestmark = pytest.mark.interop


def test_the_port_makes_the_golden_values(tmp_path, capsys):
    """All but those of FP8 and of block formats."""
    dump = tmp_path / "dump.safetensors"
    subprocess.run([sys.executable, ROOT / "examples" / "jax_port", FOLDER, dump], check=True, timeout=600)
    code = cli.run("golden", main, [str(dump)])
    text = capsys.readouterr().out
    names = [value.name for value in Golden(FOLDER).values if not value.given]
    left_out = [name for name in names if re.match(r"fp8\.|formats\.", name)]
    assert code == 0 and f" 0 differ, {len(left_out)} missing, 0 unknown" in text, text
