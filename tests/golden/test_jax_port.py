"""The port in examples/ against the golden values. Needs jax: pip install jax."""

import subprocess
import sys

import pytest
from conftest import ROOT

from tools.golden import commands as golden
from tools.golden.files import FOLDER

pytest.importorskip("jax")
pytestmark = pytest.mark.interop


def test_the_port_makes_the_golden_values(tmp_path, capsys):
    """All but the blocks of full width, which take a minute more."""
    dump = tmp_path / "dump.safetensors"
    subprocess.run([sys.executable, ROOT / "examples" / "jax_port.py", FOLDER, dump], check=True, timeout=300)
    code = golden.main(["check", "--from", str(dump)])
    text = capsys.readouterr().out
    assert code == 0 and " 0 differ, 67 missing, 0 unknown" in text, text
    assert "full.double.img, full.double.img.size" in text
