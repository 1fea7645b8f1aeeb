"""The C++ port in examples/ against the golden values, and against damaged files. Needs g++."""

import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

pytestmark = [
    pytest.mark.slow,  # g++ needs 15 seconds or more for the port
    pytest.mark.skipif(not shutil.which("g++"), reason="the C++ port needs g++, which is not installed"),
]
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    """The compiled port. A warning is an error."""
    program = tmp_path_factory.mktemp("cpp") / "port"
    command = ["g++", "-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror", str(ROOT / "examples" / "cpp_port.cpp")]
    done = subprocess.run([*command, "-o", str(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return program
