"""The port in examples/ against the golden values. Needs jax: pip install jax."""

import subprocess
import sys

import pytest
from conftest import ROOT

pytest.importorskip("jax")
pytestmark = pytest.mark.interop


def test_the_port_makes_the_golden_values(tmp_path):
    golden, dump = ROOT / "tests" / "golden", tmp_path / "dump.safetensors"
    port = [sys.executable, str(ROOT / "examples" / "jax_port.py"), str(golden), str(dump)]
    subprocess.run(port, check=True, timeout=300)
    check = [sys.executable, "-m", "tools.golden", "check", "--from", str(dump)]
    done = subprocess.run(check, cwd=ROOT, capture_output=True, text=True, timeout=120)
    lacking = "full.double.img, full.double.img.size"  # blocks of full width take a minute more
    assert done.returncode == 0 and " 0 differ, 67 missing, 0 unknown" in done.stdout, done.stdout
    assert lacking in done.stdout
